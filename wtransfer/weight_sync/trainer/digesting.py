"""The source that a trainer engine gets: every tensor is checked and digested as it is read."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from wtransfer.checkpoint.model_config import canonical_config
from wtransfer.errors import RoundAbortedError, SourceError, WTransferError
from wtransfer.manifest import MAX_CONFIG_LENGTH, Algorithm, KeptPiece, Manifest, Piece
from wtransfer.transport.digests import Digested, copy_digest, digest
from wtransfer.transport.layout import TensorLayout
from wtransfer.transport.memory import is_out_of_memory
from wtransfer.transport.nonfinite import count_nonfinite
from wtransfer.transport.tensors import dtype_name, lacks_memory
from wtransfer.weights import ParamMeta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from wtransfer.checkpoint.base_checkpoint import BaseCheckpoint
    from wtransfer.transport.digests import Unread
    from wtransfer.transport.layout import Bucket
    from wtransfer.transport.tensors import ByteArray
    from wtransfer.weights import WeightSource

    Memory: TypeAlias = memoryview | np.ndarray | torch.Tensor

logger = logging.getLogger(__name__)


class DigestingSource:
    """Wraps the user's source for one trainer engine, round after round.

    Args:
        source: The user's.
        algorithm: How tensors are digested.
        screen: True to count NaN and infinity.
        base: Checkpoint of which the tensors stay that the source does not have.
    """

    def __init__(
        self,
        source: WeightSource,
        algorithm: Algorithm = "xxh3-128",
        *,
        screen: bool = True,
        base: BaseCheckpoint | None = None,
    ) -> None:
        self.version = ""
        """Label of the round."""
        self.metadata: tuple[ParamMeta, ...] = ()
        """Every tensor of the round, in order."""
        self.layout = TensorLayout(Manifest((), algorithm=algorithm))
        """The same, with offsets."""
        self.nonfinite: dict[str, int] = {}
        self.moved_at = time.monotonic()
        self.reading = False
        """True while the user's source is at work: a round that stalls meanwhile waits for it."""
        self.on_packed: Callable[[], None] | None = None
        """Called when every tensor has been copied: the trainer may change its weights."""
        self._base = base
        self._own = source
        self._source = source
        self._screen = screen
        self._digests: list[str | None] = []
        self._stopped: str | None = None

    # -- for the round

    def plan(self, version: str = "", instead: WeightSource | None = None) -> TensorLayout:
        """Begin a round and read the metadata."""
        self.begin(version, instead)
        return self.read()

    def begin(self, version: str, instead: WeightSource | None = None) -> None:
        """Begin a round, which `stop` may end from now on.

        Args:
            version: Label of the round.
            instead: Source of this round; None: the user's.
        """
        self.version = version
        self._source = instead or self._own
        self.nonfinite = {}
        self._stopped = None
        self.moved_at = time.monotonic()

    def read(self) -> TensorLayout:
        """Read the source's metadata.

        Raises:
            ManifestError: The source names a tensor that no update can hold.
            SourceError: The source failed.
            RoundAbortedError: The round has ended meanwhile.
        """
        with _blaming_source("metadata"):
            # A source may have a metadata class of its own, written for another release.
            metadata = tuple(map(_as_param_meta, self._source.metadata))
            rows = [(m.name, m.dtype, m.shape) for m in metadata]
            known = zip(self.layout.names, self.layout.dtypes, self.layout.shapes, strict=True)
            scheme = getattr(self._source, "scheme", "")
            kept = self._kept(metadata)
            config = self._config()
            told = (self.manifest.scheme, self.manifest.kept, self.manifest.config)
            if rows != list(known) or (scheme, kept, config) != told:
                pieces = tuple(Piece(name, dtype_name(dtype), shape) for name, dtype, shape in rows)
                manifest = Manifest(
                    pieces, self._algorithm, scheme=scheme, kept=kept, config=config
                )
                manifest.check()
                self.layout = TensorLayout(manifest)
                if kept:
                    nbytes = sum(each.piece.nbytes for each in kept)
                    logger.info(
                        "%d of %d tensors stay as the workers have them (%s bytes, first %r)",
                        *(len(kept), len(manifest.whole), f"{nbytes:,}", kept[0].piece.name),
                    )
        self.metadata = metadata
        self._digests = [None] * len(metadata)
        self._check_stopped()
        self.moved_at = time.monotonic()
        return self.layout

    def _kept(self, metadata: Sequence[ParamMeta]) -> tuple[KeptPiece, ...]:
        """Return the tensors of the set that stay: of the base, or as a version states them."""
        if self._base is None or self._source is not self._own:
            states = getattr(self._source, "kept", None)
            return () if states is None else tuple(states(self._algorithm))
        tied = getattr(self._source, "tied_names", ())
        return self._base.kept(metadata, tied, self._algorithm, self.note_progress)

    def _config(self) -> str:
        """Return the canonical configuration of the model; empty where none is known, or fits."""
        try:
            found = getattr(self._source, "config", None)
            if self._base is not None and self._source is self._own:
                found = self._base.config(found)
            text = canonical_config(found) if found else ""
        except SourceError:
            raise
        except Exception as error:
            # It is made by a class of another library, and no update depends on it.
            logger.warning("the model's configuration is not sent: %s", error)
            return ""
        if len(text) > MAX_CONFIG_LENGTH:
            logger.warning("the model's configuration is not sent: it has %d characters", len(text))
            return ""
        return text

    def read_from(self, source: WeightSource) -> None:
        """Read the user's weights by way of another source, in this round and from then on."""
        self._own = self._source = source

    def stop(self, reason: str) -> None:
        """Make every further step of an iteration raise."""
        self._stopped = reason
        # A source over several trainer ranks may be waiting for the others.
        stop_waiting = getattr(self._source, "stop_waiting", None)
        if stop_waiting is not None:
            stop_waiting()

    def digests(self) -> list[str]:
        """Return the digests in plan order.

        Raises:
            SourceError: The engine did not read every tensor.
        """
        missing = [
            name
            for name, found in zip(self.layout.names, self._digests, strict=True)
            if found is None
        ]
        if missing:
            raise SourceError(
                f"the engine sent without reading {len(missing)} tensors of the source, first "
                f"{missing[0]!r}",
                piece=missing[0],
            )
        return [found for found in self._digests if found is not None]

    # -- for the engine (`RoundSource`)

    @property
    def manifest(self) -> Manifest:
        """The pieces of the round."""
        return self.layout.manifest

    def note_progress(self) -> None:
        """Report progress of an engine that reads no tensor just now.

        Raises:
            RoundAbortedError: The round has ended.
        """
        self._check_stopped()
        self.moved_at = time.monotonic()

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors, digested."""
        for number, read in self._read_all():
            # Detached: an engine's changes to the object do not reach the trainer's.
            tensor = read.detach()
            nonfinite = count_nonfinite(tensor) if self._screen else 0
            self._note(number, Digested(digest(tensor, self._algorithm), nonfinite))
            yield self.layout.names[number], tensor

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same as `iter_full`: the user's source has gathered the parts of all ranks."""
        return self.iter_full()

    def iter_into(
        self, allocate: Callable[[ParamMeta], Memory]
    ) -> Iterator[tuple[ParamMeta, Memory]]:
        """Copy each tensor into the memory that `allocate` returns, digested in the same pass."""
        for number, tensor in self._read_all("iter_unread"):
            meta = self.metadata[number]
            memory = allocate(meta)
            self._note(number, self._copy(tensor, _as_bytes(memory)))
            yield meta, memory
        self._mark_packed()

    def iter_buckets(self, nbytes: int, allocate: Callable[[Bucket], Memory]) -> Iterator[Bucket]:
        """Copy bucket by bucket into the memory that `allocate` returns, digested alike."""
        layout, tensors = self.layout, self._read_all("iter_unread")
        for bucket in layout.buckets(nbytes):
            memory = _as_bytes(allocate(bucket))
            for number in range(bucket.first, bucket.last):
                start = layout.starts[number] - bucket.start
                place = memory[start : start + layout.sizes[number]]
                self._note(number, self._copy(next(tensors)[1], place))
            yield bucket
        # Raises if the source yields more than its metadata says.
        next(tensors, None)
        self._mark_packed()

    # -- one pass

    def _read_all(self, method: str = "iter_full") -> Iterator[tuple[int, Any]]:
        """Yield every tensor with its number, each compared with the metadata.

        Args:
            method: The source's. A source without ``iter_unread``, which yields tensors that read
                themselves into memory of the engine, is read by ``iter_full``.
        """
        number = -1
        # No caller throws into this generator: an error of another type is the source's.
        with _blaming_source("iter_full"):
            iterate = getattr(self._source, method, self._source.iter_full)
            self.reading = True
            try:
                for number, (name, tensor) in enumerate(iterate()):
                    self.reading = False
                    self._check_stopped()
                    self._check_same(number, name, tensor)
                    yield number, tensor
                    self.moved_at = time.monotonic()
                    self.reading = True
            finally:
                self.reading = False
        if number + 1 < len(self.metadata):
            name = self.metadata[number + 1].name
            raise SourceError(
                f"the source ended before {name!r}, which its metadata has", piece=name
            )

    def _check_same(self, number: int, name: str, tensor: torch.Tensor) -> None:
        if number >= len(self.metadata):
            raise SourceError(
                f"the source yields {name!r} after the last tensor of its metadata", piece=str(name)
            )
        meta = self.metadata[number]
        shape, dtype = getattr(tensor, "shape", ()), getattr(tensor, "dtype", type(tensor).__name__)
        if name != meta.name or dtype != meta.dtype or shape != meta.shape:
            # A source may yield any object, and the error text must show it all the same.
            got = (name if isinstance(name, str) else type(name).__name__, dtype, tuple(shape))
            raise SourceError(
                f"the source yields {got}, its metadata says {(meta.name, meta.dtype, meta.shape)} "
                "at this place; every pass must follow the order of `metadata`",
                piece=meta.name,
            )
        if isinstance(tensor, torch.Tensor) and lacks_memory(tensor):
            raise SourceError(
                f"{name!r} has less memory than its shape needs: its storage was freed or cut "
                "(sharding frameworks do so between steps); publish while the weights are gathered",
                piece=name,
            )

    def _copy(self, tensor: torch.Tensor | Unread, memory: ByteArray | torch.Tensor) -> Digested:
        if isinstance(tensor, torch.Tensor):
            return self._copy_digest(tensor, memory)
        # The source is at work, though the engine has asked for no further tensor.
        with _blaming_source("iter_unread"):
            self.reading = True
            try:
                on_host = not isinstance(memory, torch.Tensor)
                return self._copy_digest(tensor if on_host else tensor.load(), memory)
            finally:
                self.reading = False

    def _copy_digest(self, tensor: Any, memory: ByteArray | torch.Tensor) -> Digested:
        if not isinstance(memory, torch.Tensor):
            return copy_digest(memory, tensor, self._algorithm, screen=self._screen)
        # Digest the copy: its bytes are sent.
        copied = memory.view(tensor.dtype).view(tensor.shape)
        copied.copy_(tensor.detach())
        nonfinite = count_nonfinite(copied) if self._screen else 0
        return Digested(digest(memory, self._algorithm), nonfinite)

    def _note(self, number: int, found: Digested) -> None:
        meta, before = self.metadata[number], self._digests[number]
        if meta.digest not in (None, found.hexdigest) and self._algorithm == "xxh3-128":
            raise SourceError(
                f"{meta.name!r} has other bytes than when its digest was written: it has "
                f"{found.hexdigest}, its manifest says {meta.digest}",
                piece=meta.name,
            )
        if before not in (None, found.hexdigest):
            raise SourceError(
                f"{meta.name!r} had other bytes in a second pass of the same round; do not change "
                "weights until the round is packed",
                piece=meta.name,
            )
        self._digests[number] = found.hexdigest
        if found.nonfinite:
            self.nonfinite[meta.name] = found.nonfinite

    def _mark_packed(self) -> None:
        self._check_stopped()
        # Not after `iter_full`, where an engine may still read the tensors themselves.
        if self.on_packed is not None:
            self.on_packed()

    def _check_stopped(self) -> None:
        if self._stopped is not None:
            raise RoundAbortedError(f"the round was ended: {self._stopped}")

    @property
    def _algorithm(self) -> Algorithm:
        return self.layout.manifest.algorithm


def _as_bytes(memory: Memory) -> ByteArray | torch.Tensor:
    return memory if isinstance(memory, torch.Tensor) else np.frombuffer(memory, np.uint8)


def _as_param_meta(meta: ParamMeta) -> ParamMeta:
    if type(meta) is ParamMeta and isinstance(meta.shape, tuple):
        return meta
    optional = ("owners", "mesh", "placements", "digest")
    known = {name: getattr(meta, name, None) for name in optional}
    return ParamMeta(meta.name, meta.dtype, tuple(meta.shape), **known)


@contextlib.contextmanager
def _blaming_source(what: str) -> Iterator[None]:
    """Turn an error of the user's source into a `SourceError`."""
    try:
        yield
    except (WTransferError, GeneratorExit):
        raise
    except BaseException as error:
        if is_out_of_memory(error):
            raise
        raise SourceError(f"the source's {what} raised {type(error).__name__}: {error}") from error
