"""Publishing from a trainer whose weights are sharded over ranks.

One rank publishes: its `ShardedSource` gathers bucket by bucket. Every other rank takes part in the
gathers by a `TrainerRank`. The agreement before each gather is that of `gather_state.py`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import secrets
import threading
import zlib
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec
import xxhash

from wtransfer.calls import (
    SerialThread,
    call_apart,
    check_process,
    close_at_exit,
    on_callers_stream,
)
from wtransfer.deadline import LONGEST_S, Deadline
from wtransfer.errors import (
    ClosedError,
    EngineError,
    PeerLostError,
    RoundAbortedError,
    RoundBusyError,
    SourceError,
    StallError,
    WTransferError,
)
from wtransfer.manifest import check_label
from wtransfer.transport.tensors import dtype_name, lacks_memory
from wtransfer.weight_sync.messages import ErrorInfo
from wtransfer.weight_sync.trainer.gather_group import (
    LAYOUT,
    PUBLISHER,
    SILENT_S,
    Ended,
    GatherGroup,
    GatherRound,
    LayoutState,
    own_rank,
)
from wtransfer.weight_sync.trainer.gather_state import GatherFollower, GatherLeader
from wtransfer.weight_sync.trainer.source import as_source

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    import torch
    from torch import nn
    from typing_extensions import Self

    from wtransfer.weight_sync.checkpoint_form import Form
    from wtransfer.weights import ParamMeta, WeightSource

logger = logging.getLogger(__name__)

Shard: TypeAlias = "tuple[ParamMeta, torch.Tensor]"
"""A tensor's metadata, and this rank's part of it."""
Layout: TypeAlias = "list[tuple[str, str, tuple[int, ...]]]"
"""Name, description and ranks of every tensor, in order."""

DEADLINE_S = 30.0
"""The deadline where no publisher has set another, in seconds."""
OWN_SHARE = 0.9
"""Part of the deadline after which a wait for ranks ends: the round's own watch, which ends the
round at the whole deadline, could only say that the engine hangs."""
SILENT_DEADLINES = 4
"""Deadlines that the publishing rank may take for a step of its round: it waits for its workers,
one deadline at most for each of the prepare phase, the commit, and ranks that go back."""
BUCKET_NBYTES = 64 << 20
"""Bytes of whole tensors that are gathered between two agreements; the same on all ranks."""
REBUILD = (
    "; the process group of that mesh is no longer in step: rebuild it, and with it Publisher and "
    "TrainerRank"
)
"""Advice after an error inside a gather."""
FLUSH_S = 1.0
"""Seconds for a rank that fails to write its error."""
GRACE_S = 0.4
"""Seconds that a gather may go on when one of its ranks was lost, or has failed there."""


class ShardedSource:
    """Gathers the parts of a trainer's ranks, for the publishing rank.

    `Publisher` makes one where a tensor is sharded; make it yourself for another `name` or `store`.
    Tensors that are not sharded pass through as they are. DTensors (FSDP2, tensor parallelism) are
    gathered over their own mesh, a bucket at a time, while every other rank of the mesh is in
    `TrainerRank.publish`. A custom source describes by `mesh` and `placements` of its `ParamMeta`
    how tensors lie, and yields this rank's parts from `iter_local`.

    Args:
        model_or_source: A torch module, a mapping of names to tensors, or a `WeightSource`.
        form: As of `Publisher`; the same on every rank.
        name: Tells several publishers of one trainer apart; as in `TrainerRank`.
        store: A torch store that all ranks share. Default: the one of torch's default group.
        deadline_s: Longest wait for the other ranks and for a gather, in seconds. Default: the
            publisher's.
    """

    def __init__(
        self,
        model_or_source: nn.Module | Mapping[str, torch.Tensor] | WeightSource,
        *,
        form: Form | None = None,
        name: str = "default",
        store: Any = None,
        deadline_s: float | None = None,
    ) -> None:
        self._source = as_source(model_or_source, form)
        self.deadline_s = DEADLINE_S if deadline_s is None else deadline_s
        """Longest wait for the other ranks and for a gather, in seconds."""
        self._group = GatherGroup(
            name, store, publishing=True, deadline_s=self.deadline_s * OWN_SHARE
        )
        self._has_own_deadline = deadline_s is not None
        self._lock = self._group.lock
        self._thread = GatherThread(self._group)
        self._lead = GatherLeader(secrets.token_hex(8), self._group, self._thread.check_in_step)
        self._layout = ""
        self._metadata: Sequence[ParamMeta] | None = None
        self.known: Sequence[ParamMeta] = ()
        """The metadata as last read: names the ranks to tell of a round that met none."""

    def take_deadline(self, deadline_s: float) -> None:
        """Take the publisher's deadline, in seconds, unless this source has one of its own."""
        if not self._has_own_deadline:
            self.deadline_s = deadline_s
            self._group.deadline_s = deadline_s * OWN_SHARE

    @property
    def tied_names(self) -> Sequence[str]:
        """Further names of tensors that travel."""
        return getattr(self._source, "tied_names", ())

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Configuration of the model in training."""
        return getattr(self._source, "config", None)

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        """Metadata of the source; moves no data and asks no other rank."""
        # Kept for the pass that follows: reading it costs something per tensor.
        self._metadata = self.known = self._source.metadata
        return self._metadata

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's parts."""
        return self._source.iter_local()

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors.

        Raises:
            SourceError: The ranks do not agree, or this rank's source contradicts its metadata.
            StallError: A rank does not take part in time.
            PeerLostError: A rank is gone.
        """
        return self._iter("iter_full")

    def iter_unread(self) -> Iterator[tuple[str, Any]]:
        """Yield as `iter_full`, unread tensors where the source has them. Raises alike."""
        return self._iter("iter_unread")

    def _iter(self, method: str) -> Iterator[tuple[str, Any]]:
        metadata, self._metadata = self._metadata or self._source.metadata, None
        others = self._others(metadata)
        if any(meta.placements for meta in metadata):
            return self._iter_gathered(metadata, others)
        # The iterator itself, not its pairs: it may show that all of its tensors are there.
        pairs: Iterator[tuple[str, Any]]
        pairs = getattr(self._source, method, self._source.iter_full)()
        return pairs

    def _iter_gathered(
        self, metadata: Sequence[ParamMeta], others: frozenset[int]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        begun = self._begin_pass(metadata, others) if others else self._lead.state
        num_gathered = 0
        for bucket in iter_buckets(iter_shards(self._source, metadata)):
            tensors = bucket
            if any(is_sharded(meta) for meta, _ in bucket):
                num_gathered += 1
                if others:
                    self._agree(begun, num_gathered, _first_name(bucket))
                else:
                    self._thread.check_in_step()
                # A round that is ended meanwhile waits for the gather, as for every engine call.
                try:
                    timeout_s = self.deadline_s * OWN_SHARE
                    tensors = self._thread.gather(bucket, timeout_s, self._lead.broken, self._cause)
                except BaseException:
                    with self._lock:
                        self._lead.tear(begun)
                    raise
            while tensors:
                meta, tensor = tensors.pop(0)
                yield meta.name, tensor
                # Freed before the next is made: a gathered tensor may be large.
                del tensor

    # -- for the publisher

    def begin(self, version: str) -> None:
        """Begin a round, which the other ranks may join; a second call does nothing."""
        with self._lock:
            if not self._lead.in_round:
                self._metadata = None
                if self._lead.others:
                    self._group.start(_keys(self._lead.others))
                self._lead.begin(version)

    def stop_waiting(self) -> None:
        """End a pass that waits for other ranks: its round has failed."""
        # Also ends a pass that is only about to wait.
        self._lead.stop()
        self._group.wake()

    def packed(self) -> None:
        """Let the other ranks change their weights again."""
        with self._lock:
            self._lead.packed()

    def end(self, error: BaseException | None, fingerprint: str = "") -> None:
        """End the round, and tell the other ranks."""
        if self._lead.in_round:
            info = None if error is None else ErrorInfo.of(error)
            with self._lock:
                self._lead.end(info, fingerprint)
            self._let_go(error)

    def refuse(self, version: str, error: BaseException, *, is_busy: bool = True) -> None:
        """Tell the other ranks that a round did not begin.

        Args:
            version: Its label.
            error: Why.
            is_busy: True if another round is under way, which goes on. Else a round that `begin`
                has begun ends: it has waited for absent hosts.
        """
        if not is_busy and self._lead.in_round:
            self.end(error)
            return
        info = ErrorInfo.of(error)
        with self._lock:
            self._lead.refuse(version, info)
            in_round = self._lead.in_round
        if not in_round:
            self._let_go(error)

    def close(self) -> None:
        """Let the other ranks go."""
        self._thread.stop()
        # The others still read the end of the last round, from a store that this process may host.
        if keys := self._lead.staying():
            self._group.start(keys)
            with contextlib.suppress(WTransferError):
                self._group.until(
                    lambda: self._lead.have_left(keys),
                    Deadline(min(SILENT_S, self.deadline_s)),
                    "the other ranks' leaving",
                )
        self._group.close()

    def _let_go(self, error: BaseException | None) -> None:
        """Ask the store for nothing more until the next round, once it has the end of this one."""
        try:
            if error is not None:
                # The round may have failed before it met any other rank. The source is not asked:
                # it may be the one that hangs.
                self._meet(self._lead.others or self._others(self.known))
        except Exception as unmet:
            # Logged only: the round has an error of its own.
            logger.info("the other ranks cannot be told: %s", unmet)
        if self._lead.others:
            self._group.pause()

    def _meet(self, others: Collection[int]) -> None:
        """Begin to hear of the other ranks, if there are any."""
        with self._lock:
            if others and not self._group.polling:
                self._group.start()
            self._lead.meet(own_rank(), others)
            self._group.add(_keys(others))

    # -- one pass

    def _others(self, metadata: Sequence[ParamMeta]) -> frozenset[int]:
        """Return the other ranks that hold a part of the weights."""
        spread = [meta for meta in metadata if meta.owners or meta.placements]
        found = frozenset(rank for meta in spread for rank in ranks_of(meta))
        own = own_rank()
        strange = [meta.name for meta in spread if is_sharded(meta) and own not in ranks_of(meta)]
        if strange:
            raise SourceError(
                f"rank {own} publishes, but is not in the mesh of {len(strange)} tensors, first "
                f"{strange[0]!r}; publish from a rank that takes part in gathering all of them",
                piece=strange[0],
            )
        return found - {own}

    def _begin_pass(self, metadata: Sequence[ParamMeta], others: frozenset[int]) -> GatherRound:
        self._meet(others)
        lines = msgspec.msgpack.encode(layout_of(metadata))
        digest = xxhash.xxh3_128_hexdigest(lines)
        if digest != self._layout:
            self._layout = digest
            self._group.post(LayoutState(digest, zlib.compress(lines, 1)), LAYOUT)
        with self._lock:
            return self._lead.begin_pass(digest)

    def _agree(self, begun: GatherRound, count: int, name: str) -> None:
        """Wait until every rank has its part of a bucket in hand, and let all gather it."""
        self._group.until(
            lambda: self._lead.may_gather(begun, count),
            Deadline(self.deadline_s * OWN_SHARE),
            lambda: self._lead.awaited(begun, count, repr(name)),
        )
        # Enter only when `go` is written: alone in a gather, this rank could only be left behind.
        try:
            self._group.flush(Deadline(self.deadline_s * OWN_SHARE))
        except StallError as error:
            # The ranks may have read `go` and wait in the gather.
            error.message += REBUILD
            raise

    def _cause(self, failed: WTransferError) -> WTransferError:
        """Return why a gather has failed: a lost rank breaks it for all, and is detected later."""
        if not self._lead.others:
            return failed
        patience_s = SILENT_S + GRACE_S if isinstance(failed, EngineError) else 0
        lost = self._thread.found_within(patience_s, self._lead.lost)
        return lost or self._lead.failed() or failed


class Interrupted(BaseException):
    """The caller of this call was interrupted, and waits for it no longer."""


class TrainerRank:
    """Takes part in publishing a sharded model, on the ranks that do not publish themselves.

    One rank makes a `Publisher` of its part of the model, every other rank a `TrainerRank` of its
    own part; then all call ``publish(version)`` for the same versions in turn::

        if torch.distributed.get_rank() == 0:
            publisher = wtransfer.Publisher(model)
        else:
            publisher = wtransfer.TrainerRank(model)
        publisher.publish(f"step-{step}")

    Ranks agree through the trainer's store before each bucket of gathers, and begin one only when
    all have written that they are ready. So if the round fails before, beside or between the
    gathers, all ranks return with its error, and the trainer's own process group is as good as
    before. A rank that is lost inside a gather leaves a group that has to be made anew; the error
    says so. The gathers use the groups of the model's own mesh, on a thread of their own: do not
    use these groups meanwhile.

    Why a class of its own: workers would have to join a second `Publisher` as well, and a plain
    function could not tell a round that it has taken part in from the next one.

    Args:
        model_or_source: As for `Publisher`: this rank's module, mapping or source.
        form: As of `Publisher`; the same on every rank.
        name: Tells several publishers of one trainer apart; as in `ShardedSource`.
        store: A torch store that all ranks share. Default: the one of torch's default group, which
            is neither made nor destroyed here.
        deadline_s: Longest wait for the publishing rank to begin, counted from the end of its last
            round, and for a gather to end, in seconds. Must be the publisher's: a publishing rank
            whose round makes no progress for four times as long is given up.
    """

    def __init__(
        self,
        model_or_source: nn.Module | Mapping[str, torch.Tensor] | WeightSource,
        *,
        form: Form | None = None,
        name: str = "default",
        store: Any = None,
        deadline_s: float = 30.0,
    ) -> None:
        self._source = as_source(model_or_source, form)
        self._group = GatherGroup(name, store, publishing=False, deadline_s=deadline_s)
        self._deadline_s = deadline_s
        self._pid = os.getpid()
        self._closed = self._is_shut = False
        self._busy = threading.Lock()
        self._thread = GatherThread(self._group)
        self._follow = GatherFollower(self._group, self._thread.check_in_step)
        self._agreed = ("", "")
        """Digests of the publishing rank's layout and of this rank's, found to fit."""
        close_at_exit(self)

    def publish(self, version: str, *, wait: bool = True) -> str:
        """Take part in the publishing rank's ``publish`` of the same version.

        Args:
            version: Label; the publishing rank's.
            wait: True to wait for the end. False: return when this rank may change its weights
                again; only the publishing rank then gets the outcome of the round, and the next
                call waits for its end first.

        Returns:
            Fingerprint of the published weights; empty if the end was not waited for, or if this
            rank has tensors, but no part of one that the publishing rank gathers.

        Raises:
            StallError: The publishing rank did not begin in time, or a gather hangs.
            PeerLostError: The publishing rank is gone.
            SourceError: The ranks do not have the same tensors; the first that differs is named.
            ClosedError: `close` was called meanwhile.
            WTransferError: The round was aborted; the error is the publishing rank's.
        """
        check_process(self._pid, "TrainerRank")
        check_label(version)
        interruptions: list[BaseException] = []

        def check() -> None:
            if interruptions:
                # Once: telling the other ranks, which follows, is a wait as well.
                error = interruptions.pop()
                raise Interrupted(f"{type(error).__name__}: {error}")

        def publish() -> str:
            if not self._busy.acquire(blocking=False):
                raise RoundBusyError("this rank is publishing already; wait for the other call")
            try:
                if self._closed:
                    raise ClosedError("this TrainerRank is closed")
                self._group.check = check
                self._group.start((PUBLISHER, str(own_rank())))
                return self._publish(version, wait=wait)
            finally:
                self._group.pause()
                self._busy.release()

        return call_apart(on_callers_stream(publish), "wtransfer-publish", interruptions.append)

    def close(self) -> None:
        """Let go of the publishing rank; a second call does nothing."""
        if self._is_shut or os.getpid() != self._pid:
            return
        call_apart(self._close, "wtransfer-close")

    def _close(self) -> None:
        self._closed = True
        self._group.close()
        self._thread.stop()
        self._is_shut = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _publish(self, version: str, *, wait: bool) -> str:
        group, follow = self._group, self._follow
        # Before the deadline starts: a rank that left its last round early would lose the time
        # that the others take for the end.
        group.until(
            follow.is_last_over,
            Deadline(SILENT_DEADLINES * self._deadline_s),
            "the last round, which the publishing rank has not ended,",
        )
        deadline = Deadline(self._deadline_s)
        metadata = tuple(self._source.metadata)
        state = group.until(lambda: group.heard(PUBLISHER), deadline, follow.awaited)
        if metadata and not any(state.rank in ranks_of(meta) for meta in metadata):
            # In no group with the publishing rank, which needs no part of this one.
            return ""
        end = group.until(lambda: follow.turn(version), deadline, follow.awaited)
        if isinstance(end, Ended):
            # Before this returns: the next object of this rank must read that the end was told.
            with contextlib.suppress(WTransferError):
                group.flush(Deadline(FLUSH_S))
        else:
            end = self._take_part(metadata, wait=wait)
        if end is not None and end.error is not None:
            raise end.error.rebuild()
        return "" if end is None else end.fingerprint

    def _take_part(self, metadata: Sequence[ParamMeta], *, wait: bool) -> Ended | None:
        """Gather with the publishing rank, up to the end; None if the end is not waited for."""
        group, follow = self._group, self._follow
        buckets: Iterator[list[Shard]] = iter(())
        bucket: list[Shard] = []
        try:
            while True:
                # The publishing rank may wait for absent hosts before the first pass; a publisher
                # that lives ends every round that it has begun.
                waits = follow.is_to_begin
                limit_s = LONGEST_S if waits else SILENT_DEADLINES * self._deadline_s
                step = group.until(
                    lambda: follow.next(wait=wait),
                    Deadline(limit_s),
                    "the round that the publishing rank has begun and not ended",
                )
                if step == "pass":
                    self._compare(metadata)
                    buckets = self._iter_buckets(metadata)
                    follow.begin_pass()
                elif step == "gather":
                    # Only the publishing rank keeps the whole tensors.
                    side = follow.broken, self._cause, follow.round.rank
                    self._thread.gather(bucket, self._deadline_s, *side)
                    follow.gathered()
                else:
                    break
                bucket = next(buckets, [])
                follow.ready(in_hand=bool(bucket))
        except BaseException as error:
            # Also when the caller was interrupted: the others must not wait for this rank.
            name = "" if isinstance(error, Interrupted) else f"{type(error).__name__}: "
            interrupted = RoundAbortedError(f"interrupted by {name}{error}")
            follow.fail(error if isinstance(error, WTransferError) else interrupted)
            with contextlib.suppress(WTransferError):
                group.flush(Deadline(FLUSH_S))
            raise
        follow.leave()
        return step if isinstance(step, Ended) else None

    def _iter_buckets(self, metadata: Sequence[ParamMeta]) -> Iterator[list[Shard]]:
        """Yield the buckets in which a tensor is gathered, by whichever ranks."""
        try:
            for bucket in iter_buckets(iter_shards(self._source, metadata)):
                if any(is_sharded(meta) for meta, _ in bucket):
                    yield bucket
        except WTransferError:
            raise
        except Exception as error:
            raise SourceError(
                f"the source's iter_local raised {type(error).__name__}: {error}"
            ) from error

    def _compare(self, metadata: Sequence[ParamMeta]) -> None:
        """Check that this rank's tensors lie as the publishing rank's do."""
        state = self._follow.round
        mine = layout_of(metadata)
        digests = state.layout, xxhash.xxh3_128_hexdigest(msgspec.msgpack.encode(mine))
        if digests == self._agreed:
            return
        self._group.add((LAYOUT,))
        deadline = Deadline(self._deadline_s)
        layout: LayoutState = self._group.until(
            self._follow.layout, deadline, "the publishing rank's layout"
        )
        theirs = msgspec.msgpack.decode(
            zlib.decompress(layout.lines), type=list[tuple[str, str, tuple[int, ...]]]
        )
        check_equal(theirs, mine, state.rank, own_rank())
        self._agreed = digests

    def _cause(self, failed: WTransferError) -> WTransferError:
        """Return why a gather has failed: the publishing rank finds a lost rank and tells all."""
        self._follow.fail(failed, left=False)
        return self._thread.found_within(SILENT_S + FLUSH_S, self._follow.over) or failed


# -- layout of a tensor over the ranks, and its gather


def is_sharded(meta: ParamMeta) -> bool:
    """Return True if a tensor must be gathered to be whole."""
    return bool(meta.placements)


def ranks_of(meta: ParamMeta) -> tuple[int, ...]:
    """Return the ranks that must take part in gathering a tensor; none for a whole tensor.

    Raises:
        SourceError: The metadata says that several ranks own it, but not how.
    """
    if not is_sharded(meta) and len(meta.owners or ()) <= 1:
        return ()
    if not is_sharded(meta) or meta.mesh is None:
        raise SourceError(
            f"{meta.name!r} has owners, ranks {list(meta.owners or ())}, but no mesh and no "
            "placements that say which part each of them holds; give all three in its ParamMeta, "
            "or none",
            piece=meta.name,
        )
    return tuple(meta.mesh.mesh.flatten().tolist())


def layout_of(metadata: Sequence[ParamMeta]) -> Layout:
    """Describe how tensors lie, for the other ranks."""
    layout: Layout = []
    for meta in metadata:
        text, ranks = f"{dtype_name(meta.dtype)} {list(meta.shape)}", ranks_of(meta)
        if is_sharded(meta):
            grid = "x".join(map(str, meta.mesh.mesh.shape))
            placements = ", ".join(map(str, meta.placements or ()))
            text = f"{text} as ({placements}) over {grid} ranks"
        layout.append((meta.name, text, ranks))
    return layout


def check_equal(theirs: Layout, mine: Layout, publishing: int, own: int) -> None:
    """Name the first tensor in which the layouts of two ranks differ.

    The ranks of a mesh count only where both are in it: in a grid of ranks, a tensor that lies
    along one axis has other ranks in every row.

    Raises:
        SourceError: The layouts differ.
    """

    def shown(layout: Layout, index: int) -> str:
        if index >= len(layout):
            return "none"
        name, text, ranks = layout[index]
        shared = f" on ranks {list(ranks)}" if publishing in ranks and own in ranks else ""
        return f"{name!r}: {text}{shared}"

    for index in range(max(len(theirs), len(mine))):
        there, here = shown(theirs, index), shown(mine, index)
        if there != here:
            raise SourceError(
                f"the trainer's ranks differ at tensor {index}: rank {publishing} has {there}, "
                f"rank {own} has {here}; every rank must have the same tensors in the same order",
                piece=(theirs[index:] or mine[index:])[0][0],
            )


def iter_shards(source: WeightSource, metadata: Sequence[ParamMeta]) -> Iterator[Shard]:
    """Yield this rank's parts, each checked against the metadata before any gather.

    Raises:
        SourceError: The iteration differs from the metadata; the first tensor is named.
    """
    expected = iter(metadata)
    for name, tensor in source.iter_local():
        meta = next(expected, None)
        if meta is None:
            raise SourceError(
                f"the source yields {name!r} after the last tensor of its metadata", piece=name
            )
        _check_shard(meta, name, tensor)
        yield meta, tensor
    left = next(expected, None)
    if left is not None:
        raise SourceError(
            f"the source ended before {left.name!r}, which its metadata has", piece=left.name
        )


def iter_buckets(shards: Iterable[Shard]) -> Iterator[list[Shard]]:
    """Cut a pass into buckets by the sizes of whole tensors, which are the same on all ranks."""
    bucket: list[Shard] = []
    nbytes = 0
    for meta, shard in shards:
        size = meta.dtype.itemsize * math.prod(meta.shape)
        if bucket and nbytes + size > BUCKET_NBYTES:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append((meta, shard))
        nbytes += size
    if bucket:
        yield bucket


class GatherThread:
    """Makes the gathers of one rank, on a thread of their own, one bucket after the other.

    Args:
        group: The ranks.
    """

    def __init__(self, group: GatherGroup) -> None:
        self._group = group
        self._thread = SerialThread("wtransfer-gather")

    def check_in_step(self) -> None:
        """Check that this rank hangs in no earlier gather, which another's next gather would end.

        The other rank would get this rank's part of an earlier version.

        Raises:
            StallError: This rank hangs in an earlier gather.
        """
        if (what := self._thread.given_up()) is not None:
            raise StallError(
                f"trainer rank {own_rank()} still hangs in {what}, which was given up{REBUILD}"
            )

    def gather(
        self,
        bucket: list[Shard],
        timeout_s: float,
        broken: Callable[[], WTransferError | None],
        cause: Callable[[WTransferError], WTransferError],
        publishing: int | None = None,
    ) -> list[Shard]:
        """Make the tensors of a bucket whole; all ranks do so at the same time, in the same order.

        Args:
            bucket: This rank's parts.
            timeout_s: Longest time for the bucket, in seconds.
            broken: Returns why the collectives may never end: a rank was lost, or has failed there.
                Any other end of the round waits for its gathers.
            cause: Returns why the collectives have failed, given the error raised here.
            publishing: The publishing rank; None: this one. Any other rank gathers the tensors that
                lie on the publishing rank as well, and keeps none of them.
        """
        name = _first_name(bucket)
        gather = on_callers_stream(functools.partial(gathered_bucket, bucket, publishing))
        broken_since: Deadline | None = None

        def check() -> None:
            nonlocal broken_since
            self._group.check()
            if (error := broken()) is not None:
                broken_since = broken_since or Deadline(GRACE_S)
                if broken_since.expired:
                    raise error

        try:
            return self._thread.call(gather, f"gathering {name!r}", timeout_s, check)
        except ClosedError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            text = f"gathering {name!r} failed on trainer rank {own_rank()}: {what}"
            ours = error if isinstance(error, WTransferError) else EngineError(text, piece=name)
            found = cause(ours)
            if isinstance(found, PeerLostError) and REBUILD not in found.message:
                found.message += f", while it gathered {name!r}"
            if REBUILD not in found.message:
                found.message += REBUILD
            raise found from (None if found is error else error)

    def found_within(
        self, timeout_s: float, find: Callable[[], WTransferError | None]
    ) -> WTransferError | None:
        """Return the error that is found in time, or that the store is gone; None: neither."""
        try:
            error: WTransferError = self._group.until(find, Deadline(timeout_s), "the cause")
        except PeerLostError as gone:
            error = gone
        except StallError:
            return None
        return error

    def stop(self) -> None:
        """Let the thread end after its gather."""
        self._thread.stop()


def gathered_bucket(bucket: list[Shard], publishing: int | None) -> list[Shard]:
    """Return the tensors of a bucket whole, on the publishing rank; see `gather_bucket`."""
    whole = []
    for meta, shard in bucket:
        if publishing is None:
            whole.append((meta, gathered(meta, shard) if is_sharded(meta) else shard))
        elif is_sharded(meta) and publishing in ranks_of(meta):
            gathered(meta, shard)
    return whole


def gathered(meta: ParamMeta, shard: torch.Tensor) -> torch.Tensor:
    """Return a tensor whole. A collective: every rank of its mesh calls it at the same time."""
    import torch
    from torch.distributed.tensor import DTensor

    # Grad mode is per thread: by default, autograd would record operations on parameters.
    with torch.no_grad():
        whole = DTensor.from_local(
            shard.detach(),
            meta.mesh,
            meta.placements,
            run_check=False,
            shape=torch.Size(meta.shape),
            stride=torch.empty(meta.shape, device="meta").stride(),
        )
        return whole.full_tensor()


def _check_shard(meta: ParamMeta, name: str, tensor: torch.Tensor) -> None:
    shape = _shard_shape(meta) if is_sharded(meta) else tuple(meta.shape)
    got = (name, getattr(tensor, "dtype", type(tensor)), tuple(getattr(tensor, "shape", ())))
    expected = (meta.name, meta.dtype, got[2] if shape is None else shape)
    if got != expected:
        raise SourceError(
            f"this rank's pass over the source yields {got}, its metadata says {expected} at this "
            "place; every pass must follow the order of `metadata`",
            piece=meta.name,
        )
    if lacks_memory(tensor):
        raise SourceError(
            f"this rank's part of {name!r} has less memory than its shape needs: its storage was "
            "freed or cut; publish between two steps, while every rank holds its shards",
            piece=name,
        )


def _shard_shape(meta: ParamMeta) -> tuple[int, ...] | None:
    """Return the shape of this rank's part; None where a placement has rules of its own."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    place: Any = meta.mesh.get_coordinate()
    if place is None:
        return None
    shape = list(meta.shape)
    for axis, placement in enumerate(meta.placements or ()):
        if type(placement) is Shard:
            num_parts = int(meta.mesh.mesh.shape[axis])
            # As torch cuts: equal parts, rounded up, so that the last ranks may have less or none.
            part = -(-shape[placement.dim] // num_parts)
            start = min(part * place[axis], shape[placement.dim])
            shape[placement.dim] = min(part, shape[placement.dim] - start)
        elif not isinstance(placement, (Replicate, Partial)):
            return None
    return tuple(shape)


def _keys(ranks: Iterable[int]) -> list[str]:
    return [str(rank) for rank in sorted(ranks)]


def _first_name(shards: list[Shard]) -> str:
    return next(meta.name for meta, _ in shards if is_sharded(meta))
