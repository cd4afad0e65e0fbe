"""The source as an engine gets it: it digests what it yields, so that engines need not."""

from __future__ import annotations

import contextlib
import operator
import time
from typing import TYPE_CHECKING, Protocol, TypeAlias

from wtransfer.engines.interface import ParamMeta
from wtransfer.engines.staging import is_out_of_memory
from wtransfer.errors import RoundAbortedError, SourceError, WTransferError
from wtransfer.manifest import Algorithm, Manifest, Piece
from wtransfer.transport.digests import Digested, copy_digest, digest
from wtransfer.transport.nonfinite import count_nonfinite
from wtransfer.transport.packing import Run
from wtransfer.transport.tensors import PLAIN_TYPES, dtype_name, lacks_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    import torch

    from wtransfer.engines.interface import WeightSource
    from wtransfer.transport.tensors import ByteArray

    Memory: TypeAlias = memoryview | np.ndarray | torch.Tensor
    Allocate: TypeAlias = Callable[[ParamMeta], Memory]

    class Spans(Protocol):
        """Places by name."""

        def __getitem__(self, name: str, /) -> slice: ...


class Places:
    """One piece of memory for all tensors, as something to hand to `DigestingSource.iter_into`.

    A tensor may lie there for a while before it is yielded, so that many small ones can be digested
    together. Where the next one's place is not behind it, it is yielded before that is written.

    Args:
        memory: Writable.
        spans: Name -> bytes of the tensor. Asked for in the order of the metadata, each when all
            before it have been copied.
    """

    def __init__(self, memory: ByteArray, spans: Spans) -> None:
        self.memory = memory
        self.spans = spans
        self._view = memory.data

    def __call__(self, meta: ParamMeta) -> memoryview:
        """Return the place of a tensor."""
        return self._view[self.spans[meta.name]]


class DigestingSource:
    """Wraps a source for one trainer engine, round after round.

    Args:
        source: The user's.
        algorithm: How pieces are digested.
    """

    def __init__(self, source: WeightSource, algorithm: Algorithm = "xxh3-128") -> None:
        self.version = ""
        """Label of the round."""
        self.nonfinite: dict[str, int] = {}
        self.moved_at = time.monotonic()
        self.reading = False
        """Whether the user's source is at work: what does not move then, waits for it."""
        self.on_packed: Callable[[], None] | None = None
        """Called when every tensor has been copied: the trainer may change its weights."""
        self._own = source
        self._source = source
        self._algorithm = algorithm
        self._metadata: Sequence[ParamMeta] = ()
        self._manifest = Manifest(())
        self._digests: dict[str, str] = {}
        self._stopped: str | None = None

    def plan(self, version: str = "", instead: WeightSource | None = None) -> Manifest:
        """Begin a round: read the source's metadata, forget the digests of the round before.

        Args:
            version: Label of the round.
            instead: What this round sends, where that is not the user's source.

        Raises:
            ManifestError: The source names something that no update can hold.
            SourceError: It cannot say what it has.
        """
        self.version = version
        self._source = instead or self._own
        with _blaming_source("metadata"):
            metadata = tuple(map(_in_our_form, self._source.metadata))
            if not same_metadata(metadata, self._metadata):
                self._manifest = self._checked_manifest(metadata)
                self._metadata = metadata
        self._digests = {}
        self.nonfinite = {}
        self._stopped = None
        self.moved_at = time.monotonic()
        return self._manifest

    def _checked_manifest(self, metadata: Sequence[ParamMeta]) -> Manifest:
        pieces = tuple(Piece(m.name, dtype_name(m.dtype), tuple(m.shape)) for m in metadata)
        manifest = Manifest(pieces, algorithm=self._algorithm)
        manifest.check()
        return manifest

    def stop(self, reason: str) -> None:
        """Let every further step of an iteration raise."""
        self._stopped = reason
        # One step may be to wait for other ranks of the trainer.
        stop_waiting = getattr(self._source, "stop_waiting", None)
        if stop_waiting is not None:
            stop_waiting()

    def note_progress(self) -> None:
        """Note that the engine is at work, though it reads no tensor just now.

        Raises:
            RoundAbortedError: The round has ended.
        """
        if self._stopped is not None:
            raise RoundAbortedError(f"the round was ended: {self._stopped}")
        self.moved_at = time.monotonic()

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
    def manifest(self) -> Manifest:
        """The pieces of this round."""
        return self._manifest

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        """Every tensor of this round, in order."""
        return self._metadata

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors, digested."""
        for meta, tensor in self._checked():
            self._note(meta, digest(tensor, self._algorithm), count_nonfinite(tensor))
            # An object of its own: what an engine does to that is not done to the trainer's.
            yield meta.name, tensor.detach()

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what this rank holds. Sources are not sharded yet, so this is the whole."""
        return self.iter_full()

    def iter_into(self, allocate: Allocate | Places) -> Iterator[tuple[ParamMeta, Memory]]:
        """Copy every tensor to where `allocate` says, and digest it in the same pass."""
        if isinstance(allocate, Places) and self._algorithm == "xxh3-128":
            yield from self._packed(allocate)
        else:
            yield from self._copied(allocate)
        # Not so for `iter_full`: there an engine may go on reading the tensors themselves.
        if self.on_packed is not None:
            self.on_packed()

    def _copied(self, allocate: Allocate) -> Iterator[tuple[ParamMeta, Memory]]:
        for meta, tensor in self._checked():
            yield self._copy_one(meta, tensor, allocate(meta))

    def _copy_one(
        self, meta: ParamMeta, tensor: torch.Tensor, memory: Memory
    ) -> tuple[ParamMeta, Memory]:
        found = _copy_digest(memory, tensor, self._algorithm)
        self._note(meta, found.hexdigest, found.nonfinite)
        return meta, memory

    def _packed(self, places: Places) -> Iterator[tuple[ParamMeta, Memory]]:
        """Do the same, with small tensors that follow each other digested in one go."""
        run = Run(places.memory)
        metas: list[ParamMeta] = []
        for meta, tensor in self._checked():
            span = places.spans[meta.name]
            added = run.add(tensor, span)
            if metas and not added:
                yield from self._finish(run, metas, places)
                metas, added = [], run.add(tensor, span)
            if added:
                metas.append(meta)
            else:
                yield self._copy_one(meta, tensor, places(meta))
        yield from self._finish(run, metas, places)

    def _finish(
        self, run: Run, metas: list[ParamMeta], places: Places
    ) -> Iterator[tuple[ParamMeta, Memory]]:
        digests, nonfinite = run.finish()
        for meta, hexdigest, count in zip(metas, digests, nonfinite, strict=True):
            self._note(meta, hexdigest, count)
        for meta in metas:
            yield meta, places(meta)

    def _checked(self) -> Iterator[tuple[ParamMeta, torch.Tensor]]:
        """Hold the iteration against the metadata, and name the first divergence."""
        expected = iter(self._metadata)
        # Nobody throws into this generator: what is raised in here and not ours is the source's.
        with _blaming_source("iter_full"), self._reading():
            for name, tensor in self._source.iter_full():
                self.reading = False
                if self._stopped is not None:
                    raise RoundAbortedError(f"the round was ended: {self._stopped}")
                meta = next(expected, None)
                if not _is_same(meta, name, tensor):
                    _check_same(meta, name, tensor)
                assert meta is not None
                if lacks_memory(tensor):
                    raise _freed(name)
                yield meta, tensor.detach() if tensor.requires_grad else tensor
                self.moved_at = time.monotonic()
                self.reading = True
        left = next(expected, None)
        if left is not None:
            raise SourceError(
                f"the source ended before {left.name!r}, which its metadata has", piece=left.name
            )

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        self.reading = True
        try:
            yield
        finally:
            self.reading = False

    def _note(self, meta: ParamMeta, hexdigest: str, nonfinite: int) -> None:
        # Entered in one step, since any thread may read; what was there before is returned.
        before = self._digests.setdefault(meta.name, hexdigest)
        if before is not hexdigest or meta.digest is not None:
            self._compare(meta, hexdigest, before)
        if nonfinite:
            self.nonfinite[meta.name] = nonfinite

    def _compare(self, meta: ParamMeta, hexdigest: str, before: str) -> None:
        if meta.digest is not None and meta.digest != hexdigest and self._algorithm == "xxh3-128":
            raise SourceError(
                f"{meta.name!r} has other bytes than when its digest was written: it has "
                f"{hexdigest}, its manifest says {meta.digest}",
                piece=meta.name,
            )
        if before != hexdigest:
            raise SourceError(
                f"{meta.name!r} had other bytes in a second pass of the same round; do not change "
                "weights until the round is packed",
                piece=meta.name,
            )


def _copy_digest(memory: Memory, tensor: torch.Tensor, algorithm: Algorithm) -> Digested:
    import numpy as np
    import torch

    if not isinstance(memory, torch.Tensor):
        return copy_digest(np.frombuffer(memory, np.uint8), tensor, algorithm, screen=True)
    # What is digested is the copy, as in host memory: those are the bytes that travel.
    copied = memory.view(tensor.dtype).view(tensor.shape)
    copied.copy_(tensor)
    return Digested(digest(memory, algorithm), count_nonfinite(copied))


def _freed(name: str) -> SourceError:
    return SourceError(
        f"{name!r} has less memory than its shape needs: its storage was freed or cut (sharding "
        "frameworks do so between steps); publish while the weights are gathered",
        piece=name,
    )


def same_metadata(some: Sequence[ParamMeta], others: Sequence[ParamMeta]) -> bool:
    """Whether two readings of a source's metadata are known to be equal.

    That is where they hold the same objects, and none that could have changed in between.
    """
    return (
        len(some) == len(others)
        and all(map(operator.is_, some, others))
        and all(type(meta) is ParamMeta and isinstance(meta.shape, tuple) for meta in some)
    )


def _in_our_form(meta: ParamMeta) -> ParamMeta:
    """Return metadata as engines may expect it: a source may have a class of its own for it."""
    if type(meta) is ParamMeta:
        return meta
    optional = ("owners", "mesh", "placements", "digest")
    known = {name: getattr(meta, name, None) for name in optional}
    return ParamMeta(meta.name, meta.dtype, tuple(meta.shape), **known)


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


def _is_same(meta: ParamMeta | None, name: str, tensor: torch.Tensor) -> bool:
    """Whether all is well beyond doubt; if not, `_check_same` knows what to say."""
    return (
        meta is not None
        and type(tensor) in PLAIN_TYPES
        and name == meta.name
        and tensor.dtype is meta.dtype
        and tensor.shape == meta.shape
    )


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
