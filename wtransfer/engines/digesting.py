"""The source as an engine gets it: it digests what it yields, so that engines need not."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

from wtransfer.engines.staging import is_out_of_memory
from wtransfer.errors import RoundAbortedError, SourceError, WTransferError
from wtransfer.manifest import Algorithm, Manifest, Piece
from wtransfer.transport.digests import copy_digest, digest
from wtransfer.transport.nonfinite import count_nonfinite
from wtransfer.transport.tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    import torch

    from wtransfer.engines.interface import ParamMeta, WeightSource


class DigestingSource:
    """Wraps a source for one trainer engine, round after round.

    Args:
        source: The user's.
        algorithm: How pieces are digested.
    """

    def __init__(self, source: WeightSource, algorithm: Algorithm = "xxh3-128") -> None:
        self.nonfinite: dict[str, int] = {}
        self.moved_at = time.monotonic()
        self.on_packed: Callable[[], None] | None = None
        """Called when every tensor has been copied: the trainer may change its weights."""
        self._source = source
        self._algorithm = algorithm
        self._metadata: Sequence[ParamMeta] = ()
        self._manifest = Manifest(())
        self._digests: dict[str, str] = {}
        self._stopped: str | None = None
        self._lock = threading.Lock()

    def plan(self) -> Manifest:
        """Begin a round: read the source's metadata, forget the digests of the round before.

        Raises:
            ManifestError: The source names something that no update can hold.
            SourceError: It cannot say what it has.
        """
        with _blaming_source("metadata"):
            metadata = list(self._source.metadata)
            pieces = tuple(Piece(m.name, dtype_name(m.dtype), tuple(m.shape)) for m in metadata)
        self._manifest = Manifest(pieces, algorithm=self._algorithm)
        self._manifest.check()
        self._metadata = metadata
        self._digests = {}
        self.nonfinite = {}
        self._stopped = None
        self.moved_at = time.monotonic()
        return self._manifest

    def stop(self, reason: str) -> None:
        """Let every further step of an iteration raise."""
        self._stopped = reason

    def digests(self) -> list[str]:
        """Return the digests in plan order.

        Raises:
            SourceError: The engine did not read every tensor.
        """
        missing = [p.name for p in self._manifest.pieces if p.name not in self._digests]
        if missing:
            raise SourceError(
                f"the engine sent without reading {len(missing)} tensors of the source, first "
                f"{missing[0]!r}",
                piece=missing[0],
            )
        return [self._digests[piece.name] for piece in self._manifest.pieces]

    # -- for the engine

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        """Every tensor of this round, in order."""
        return self._metadata

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors, digested."""
        for meta, tensor in self._checked():
            self._note(meta, digest(tensor, self._algorithm), count_nonfinite(tensor))
            yield meta.name, tensor

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank holds. Sources are not sharded yet, so this is the whole."""
        return self.iter_full()

    def iter_into(
        self, allocate: Callable[[ParamMeta], memoryview | np.ndarray]
    ) -> Iterator[tuple[ParamMeta, memoryview | np.ndarray]]:
        """Copy every tensor to where `allocate` says, and digest it in the same pass."""
        import numpy as np

        for meta, tensor in self._checked():
            memory = allocate(meta)
            done = copy_digest(
                np.frombuffer(memory, np.uint8), tensor, self._algorithm, screen=True
            )
            self._note(meta, done.hexdigest, done.nonfinite)
            yield meta, memory
        # Not so for `iter_full`: there an engine may go on reading the tensors themselves.
        if self.on_packed is not None:
            self.on_packed()

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        # Nobody throws into this generator: whatever is raised in here is the source's.
        with _blaming_source("iter_full"):
            for name, tensor in self._source.iter_full():  # noqa: UP028 (unpacking may fail)
                yield name, tensor

    def _checked(self) -> Iterator[tuple[ParamMeta, torch.Tensor]]:
        """Hold the iteration against the metadata, and name the first divergence."""
        expected = iter(self._metadata)
        for name, tensor in self._pairs():
            if self._stopped is not None:
                raise RoundAbortedError(f"the round was ended: {self._stopped}")
            meta = next(expected, None)
            _check_same(meta, name, tensor)
            assert meta is not None
            yield meta, tensor.detach()
            self.moved_at = time.monotonic()
        left = next(expected, None)
        if left is not None:
            raise SourceError(
                f"the source ended before {left.name!r}, which its metadata has", piece=left.name
            )

    def _note(self, meta: ParamMeta, hexdigest: str, nonfinite: int) -> None:
        with self._lock:
            before = self._digests.setdefault(meta.name, hexdigest)
        if before != hexdigest:
            raise SourceError(
                f"{meta.name!r} had other bytes in a second pass of the same round; do not change "
                "weights until the round is packed",
                piece=meta.name,
            )
        if nonfinite:
            self.nonfinite[meta.name] = nonfinite


@contextlib.contextmanager
def _blaming_source(what: str) -> Iterator[None]:
    """Say of an error in the user's code that it is the source's; the engine only called it."""
    try:
        yield
    except (WTransferError, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, MemoryError):
            raise
        if isinstance(error, (RuntimeError, OSError)) and is_out_of_memory(error):
            raise
        raise SourceError(f"the source's {what} raised {type(error).__name__}: {error}") from error


def _check_same(meta: ParamMeta | None, name: str, tensor: torch.Tensor) -> None:
    if meta is None:
        raise SourceError(
            f"the source yields {name!r} after the last tensor of its metadata", piece=name
        )
    # Whatever a source yields must be compared and shown, tensor or not.
    named = name if isinstance(name, str) else type(name).__name__
    dtype = getattr(tensor, "dtype", type(tensor).__name__)
    got = (named, dtype, tuple(getattr(tensor, "shape", ())))
    expected = (meta.name, meta.dtype, tuple(meta.shape))
    if got != expected:
        raise SourceError(
            f"the source yields {got}, its metadata says {expected} at this place; every pass must "
            "follow the order of `metadata`",
            piece=meta.name,
        )
