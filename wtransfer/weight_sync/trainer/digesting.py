"""The source as an engine gets it: it digests what it yields, so that engines need not."""

from __future__ import annotations

import contextlib
import itertools
import operator
import threading
import time
from typing import TYPE_CHECKING, TypeAlias

from wtransfer.engines.interface import ParamMeta
from wtransfer.engines.places import Places
from wtransfer.errors import RoundAbortedError, SourceError, WTransferError
from wtransfer.manifest import Algorithm, Manifest, Piece
from wtransfer.transport.digests import Digested, copy_digest, digest
from wtransfer.transport.nonfinite import count_nonfinite
from wtransfer.transport.packing import RUN_NBYTES, Run, pack
from wtransfer.transport.tensors import (
    PLAIN_TYPES,
    dtype_name,
    flat_memory,
    lacks_memory,
)
from wtransfer.weight_sync.planned import Planned
from wtransfer.weight_sync.trainer.source import look_at
from wtransfer.weight_sync.worker.staging import is_out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    import torch

    from wtransfer.engines.interface import WeightSource
    from wtransfer.engines.outline import Part
    from wtransfer.transport.tensors import FlatMemory
    from wtransfer.weight_sync.trainer.source import Seen

    Pairs: TypeAlias = Iterable[tuple[str, torch.Tensor]]
    Memory: TypeAlias = memoryview | np.ndarray | torch.Tensor
    Allocate: TypeAlias = Callable[[ParamMeta], Memory]

DictItems: type = type(iter(dict[str, object]().items()))
"""What a source returns by `iter_full` whose tensors are all there at once, and stay: whoever has
them in a dictionary has them all. Of others each may be gone, or changed, when the next is yielded.
"""


_shape = operator.attrgetter("shape")


class DigestingSource:
    """Wraps a source for one trainer engine, round after round.

    Args:
        source: The user's.
        algorithm: How pieces are digested.
        screen: Whether to count NaN and infinity.
    """

    def __init__(
        self, source: WeightSource, algorithm: Algorithm = "xxh3-128", *, screen: bool = True
    ) -> None:
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
        self._screen = screen
        self._metadata: Sequence[ParamMeta] = ()
        self._known_digests = False
        self._planned = Planned(Manifest(()))
        self._digests: list[str | None] = []
        self._seen: Seen | None = None
        self._noting = threading.Lock()
        self._stopped: str | None = None

    def plan(self, version: str = "", instead: WeightSource | None = None) -> Planned:
        """Begin a round, and read what there is: `begin` and `read`."""
        self.begin(version, instead)
        return self.read()

    def begin(self, version: str, instead: WeightSource | None = None) -> None:
        """Begin a round, which `stop` may end from now on.

        Args:
            version: Label of the round.
            instead: What this round sends, where that is not the user's source.
        """
        self.version = version
        self._source = instead or self._own
        self.nonfinite = {}
        self._seen = None
        self._stopped = None
        self.moved_at = time.monotonic()

    def read(self) -> Planned:
        """Read the source's metadata, and forget the digests of the round before.

        Raises:
            ManifestError: The source names something that no update can hold.
            SourceError: It cannot say what it has.
            RoundAbortedError: The round has ended meanwhile.
        """
        with _blaming_source("metadata"):
            said, seen = look_at(self._source)
            # Those of the round before are in our form already.
            if not same_metadata(said, self._metadata):
                metadata = _in_our_form(said)
                self._planned = Planned(self._checked_manifest(metadata))
                self._metadata = metadata
                self._known_digests = any(meta.digest is not None for meta in metadata)
        self._digests = [None] * len(self._metadata)
        assert seen is None or len(seen.tensors) == len(self._metadata)
        with self._noting:
            # After a stop nothing is kept: it may have come while this was read.
            self._check_stopped()
            self._seen = seen
        self.moved_at = time.monotonic()
        return self._planned

    def _checked_manifest(self, metadata: Sequence[ParamMeta]) -> Manifest:
        pieces = tuple(Piece(m.name, dtype_name(m.dtype), tuple(m.shape)) for m in metadata)
        manifest = Manifest(pieces, algorithm=self._algorithm)
        manifest.check()
        return manifest

    def stop(self, reason: str) -> None:
        """Let every further step of an iteration raise."""
        with self._noting:
            self._stopped = reason
            self._seen = None
        # One step may be to wait for other ranks of the trainer.
        stop_waiting = getattr(self._source, "stop_waiting", None)
        if stop_waiting is not None:
            stop_waiting()

    def note_progress(self) -> None:
        """Note that the engine is at work, though it reads no tensor just now.

        Raises:
            RoundAbortedError: The round has ended.
        """
        self._check_stopped()
        self.moved_at = time.monotonic()

    def digests(self) -> list[str]:
        """Return the digests in plan order.

        Raises:
            SourceError: The engine did not read every tensor.
        """
        found = [each for each in self._digests if each is not None]
        if len(found) != len(self._digests):
            rows = zip(self._planned.outline.names, self._digests, strict=True)
            missing = [name for name, each in rows if each is None]
            raise SourceError(
                f"the engine sent without reading {len(missing)} tensors of the source, first "
                f"{missing[0]!r}",
                piece=missing[0],
            )
        return found

    # -- for the engine

    @property
    def manifest(self) -> Manifest:
        """The pieces of this round."""
        return self._planned.manifest

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        """Every tensor of this round, in order."""
        return self._metadata

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors, digested."""
        for meta, tensor in self._checked(self._begin_pass()):
            nonfinite = count_nonfinite(tensor) if self._screen else 0
            self._note(meta, digest(tensor, self._algorithm), nonfinite)
            # An object of its own: what an engine does to that is not done to the trainer's.
            yield meta.name, tensor.detach()

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same: what several ranks hold, the user's source has gathered."""
        return self.iter_full()

    def iter_into(self, allocate: Allocate | Places) -> Iterator[tuple[ParamMeta, Memory]]:
        """Copy every tensor to where `allocate` says, and digest it in the same pass."""
        if isinstance(allocate, Places):
            first = 0
            for stop in self.copy_into(allocate):
                yield from zip(self._metadata[first:stop], allocate.parts(first, stop), strict=True)
                first = stop
            return
        for meta, tensor in self._checked(self._begin_pass()):
            memory = allocate(meta)
            self._copy_one(meta, tensor, memory)
            yield meta, memory
        self._tell_packed()

    def copy_into(self, places: Places) -> Iterator[int]:
        """Do the same for who does not look at tensors one by one: yield how many are there."""
        yield from self._copies(places)
        self._tell_packed()

    def _copies(self, places: Places) -> Iterator[int]:
        seen, self._seen = self._seen, None
        if seen is not None and self._algorithm == "xxh3-128":
            return self._packed_as_seen(places, seen)
        pairs = self._begin_pass()
        if self._algorithm != "xxh3-128":
            return self._copied(places, pairs)
        if isinstance(pairs, DictItems):
            return self._packed_run_by_run(places, pairs)
        return self._packed_one_by_one(places, pairs)

    def _tell_packed(self) -> None:
        self._check_stopped()
        # Not so for `iter_full`: there an engine may go on reading the tensors themselves.
        if self.on_packed is not None:
            self.on_packed()

    def _copied(self, places: Places, pairs: Pairs) -> Iterator[int]:
        for stop, (meta, tensor) in enumerate(self._checked(pairs), 1):
            self._copy_one(meta, tensor, places(meta))
            yield stop

    def _copy_one(self, meta: ParamMeta, tensor: torch.Tensor, memory: Memory) -> None:
        found = _copy_digest(memory, tensor, self._algorithm, screen=self._screen)
        self._note(meta, found.hexdigest, found.nonfinite)

    def _packed_as_seen(self, places: Places, seen: Seen) -> Iterator[int]:
        """Do it for tensors that were looked at with the metadata, and need no second look."""
        for part, stop in self._runs(places):
            memory = seen.memory.part(part.own)
            # Meanwhile it may have been freed, or taken anew elsewhere.
            if not memory.is_there(part.sizes) or not self._pack(places, part, memory):
                run = zip(part.names, seen.tensors[part.own], strict=True)
                self._copy_each(places, run, part)
            yield stop

    def _packed_run_by_run(self, places: Places, pairs: Pairs) -> Iterator[int]:
        """Do it for tensors that are all there: every question is put to many of them at once."""
        pairs = iter(pairs)
        for part, stop in self._runs(places):
            run = self._take(pairs, len(part.names))
            names, tensors = [name for name, _ in run], [tensor for _, tensor in run]
            memory = flat_memory(tensors, part.forms, part.sizes) if names == part.names else None
            if memory is None or not self._pack(places, part, memory):
                self._copy_each(places, run, part)
            yield stop
        for name, tensor in self._take(pairs, 1):
            _check_same(None, name, tensor)

    def _runs(self, places: Places) -> Iterator[tuple[Part, int]]:
        """Yield one part of the update after the other, and the number behind it."""
        first = 0
        while first < len(self._metadata):
            self._check_stopped()
            stop = places.run_from(first, RUN_NBYTES)
            yield self._planned.outline.part(first, stop), stop
            first = stop
            self.moved_at = time.monotonic()

    def _take(self, pairs: Pairs, number: int) -> list[tuple[str, torch.Tensor]]:
        with _blaming_source("iter_full"), self._reading():
            run = list(itertools.islice(pairs, number))
        self._check_stopped()
        return run

    def _check_stopped(self) -> None:
        if self._stopped is not None:
            raise RoundAbortedError(f"the round was ended: {self._stopped}")

    def _pack(self, places: Places, part: Part, memory: FlatMemory) -> bool:
        """Copy a part of the update, whose memory is there, to its places if it is small enough.

        Returns:
            Whether it is, and was copied.
        """
        starts, stops = places.starts[part.own], places.stops[part.own]
        if stops[-1] - starts[0] > RUN_NBYTES:
            return False
        at = memory.addresses
        found = pack(places.memory, starts, stops, at, part.dtypes, screen=self._screen)
        self._note_all(part, *found)
        return True

    def _copy_each(self, places: Places, run: Pairs, part: Part) -> None:
        """Copy a part of the update one by one, which also says what is wrong with it."""
        for meta, tensor in self._checked(run, self._metadata[part.own]):
            self._copy_one(meta, tensor, places(meta))

    def _packed_one_by_one(self, places: Places, pairs: Pairs) -> Iterator[int]:
        """Do it for tensors that come one by one: digested in one go are those that can wait."""
        run, first = Run(places.memory, screen=self._screen), 0
        for number, (meta, tensor) in enumerate(self._checked(pairs)):
            span = places[meta.name]
            added = run.add(tensor, span)
            if first < number and not added:
                self._finish(run, first, number)
                yield number
                first, added = number, run.add(tensor, span)
            if not added:
                self._copy_one(meta, tensor, places(meta))
                first = number + 1
                yield first
        self._finish(run, first, len(self._metadata))
        yield len(self._metadata)

    def _finish(self, run: Run, first: int, stop: int) -> None:
        self._note_all(self._planned.outline.part(first, stop), *run.finish())

    def _begin_pass(self) -> Pairs:
        self._seen = None
        with _blaming_source("iter_full"), self._reading():
            return self._source.iter_full()

    def _checked(
        self, pairs: Pairs, metadata: Sequence[ParamMeta] | None = None
    ) -> Iterator[tuple[ParamMeta, torch.Tensor]]:
        """Hold an iteration against the metadata, and name the first divergence."""
        expected = iter(self._metadata if metadata is None else metadata)
        # Nobody throws into this generator: what is raised in here and not ours is the source's.
        with _blaming_source("iter_full"), self._reading():
            for name, tensor in pairs:
                self.reading = False
                self._check_stopped()
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
        number = self._planned.outline.numbers[meta.name]
        self._note_all(self._planned.outline.part(number, number + 1), [hexdigest], [nonfinite])

    def _note_all(self, part: Part, digests: list[str], nonfinite: list[int]) -> None:
        own = slice(part.first, part.first + len(digests))
        # Looked up and entered in one step, since any thread may read.
        with self._noting:
            before = self._digests[own]
            # In a second pass those of the first one stay.
            self._digests[own] = [a or b for a, b in zip(before, digests, strict=True)]
        if self._known_digests or any(before):
            for meta, hexdigest, other in zip(self._metadata[own], digests, before, strict=True):
                self._compare(meta, hexdigest, other)
        if any(nonfinite):
            found = zip(part.names, nonfinite, strict=True)
            self.nonfinite.update({name: count for name, count in found if count})

    def _compare(self, meta: ParamMeta, hexdigest: str, before: str | None) -> None:
        if meta.digest is not None and meta.digest != hexdigest and self._algorithm == "xxh3-128":
            raise SourceError(
                f"{meta.name!r} has other bytes than when its digest was written: it has "
                f"{hexdigest}, its manifest says {meta.digest}",
                piece=meta.name,
            )
        if before not in (None, hexdigest):
            raise SourceError(
                f"{meta.name!r} had other bytes in a second pass of the same round; do not change "
                "weights until the round is packed",
                piece=meta.name,
            )


def _copy_digest(
    memory: Memory, tensor: torch.Tensor, algorithm: Algorithm, *, screen: bool
) -> Digested:
    import numpy as np
    import torch

    if not isinstance(memory, torch.Tensor):
        return copy_digest(np.frombuffer(memory, np.uint8), tensor, algorithm, screen=screen)
    # What is digested is the copy, as in host memory: those are the bytes that travel.
    copied = memory.view(tensor.dtype).view(tensor.shape)
    copied.copy_(tensor)
    return Digested(digest(memory, algorithm), count_nonfinite(copied) if screen else 0)


def _freed(name: str) -> SourceError:
    return SourceError(
        f"{name!r} has less memory than its shape needs: its storage was freed or cut (sharding "
        "frameworks do so between steps); publish while the weights are gathered",
        piece=name,
    )


def same_metadata(some: Sequence[ParamMeta], others: Sequence[ParamMeta]) -> bool:
    """Whether two readings of a source's metadata are known to be equal.

    That is where they hold the same objects; ours, which cannot change (`_in_our_form`).
    """
    return len(some) == len(others) and all(map(operator.is_, some, others))


def _in_our_form(metadata: Sequence[ParamMeta]) -> tuple[ParamMeta, ...]:
    """Return metadata as engines may expect it: a source may have a class of its own for it."""
    found = tuple(metadata)
    return found if _are_ours(found) else tuple(map(_as_ours, found))


def _are_ours(metadata: Sequence[ParamMeta]) -> bool:
    return all(map(operator.is_, map(type, metadata), itertools.repeat(ParamMeta))) and all(
        map(isinstance, map(_shape, metadata), itertools.repeat(tuple))
    )


def _as_ours(meta: ParamMeta) -> ParamMeta:
    if type(meta) is ParamMeta and isinstance(meta.shape, tuple):
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
