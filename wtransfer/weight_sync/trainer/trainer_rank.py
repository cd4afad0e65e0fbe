"""What every rank of a sharded trainer has but the one that publishes."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
from typing import TYPE_CHECKING, Any

from wtransfer.calls import SerialThread, on_callers_stream
from wtransfer.deadline import Deadline
from wtransfer.errors import (
    ClosedError,
    EngineError,
    ForkedError,
    PeerError,
    PeerLostError,
    ProtocolError,
    RoundAbortedError,
    RoundBusyError,
    SourceError,
    StallError,
    WTransferError,
)
from wtransfer.transport.channel import Dialer
from wtransfer.weight_sync.close_at_exit import close_at_exit
from wtransfer.weight_sync.messages import ErrorInfo
from wtransfer.weight_sync.trainer.rank_messages import (
    RANK_CODEC,
    Arrive,
    Begin,
    Describe,
    Description,
    End,
    Failed,
    Gather,
    Packed,
    Pass,
    Ready,
)
from wtransfer.weight_sync.trainer.shards import (
    digest_of,
    gathered,
    is_sharded,
    iter_shards,
    layout_between,
    ranks_of,
)
from wtransfer.weight_sync.trainer.source import as_source
from wtransfer.weight_sync.trainer.whereabouts import Whereabouts, own_rank

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import msgspec
    import torch
    from torch import nn
    from typing_extensions import Self

    from wtransfer.engines.interface import ParamMeta, WeightSource
    from wtransfer.transport.channel import Connection
    from wtransfer.weight_sync.trainer.whereabouts import Note

logger = logging.getLogger(__name__)

SILENT_DEADLINES = 4
"""Deadlines that the publishing rank may say nothing in its round: it waits for its workers, one
deadline at most for each of the prepare phase, the commit, and ranks that go back."""
LOOK_S = 0.1
"""Time between two looks for the publishing rank."""


class TrainerRank:
    """Takes part in publishing a sharded model, on the ranks that do not publish themselves.

    One rank makes a `Publisher` of its part of the model, every other one a `TrainerRank` of its
    own; then all call ``publish(version)`` for the same versions in turn::

        if torch.distributed.get_rank() == 0:
            publisher = wtransfer.Publisher(model)
        else:
            publisher = wtransfer.TrainerRank(model)
        publisher.publish(f"step-{step}")

    Ranks agree over a channel of their own before each collective, and enter one only when all have
    said that they are ready. So where the round fails before, beside or between the gathers, all
    ranks return with its error, and the trainer's own process group is as good as before. The
    gathers are those of the model's own mesh, on a thread of their own: do not use its groups
    meanwhile.

    Why a class of its own: a second `Publisher` would be a second one for workers to join, and a
    plain function would have to find the publishing rank anew in each round, and could not show
    that a rank is gone between two rounds.

    Args:
        model_or_source: As for `Publisher`: this rank's module, mapping or source.
        name: Tells several publishers of one trainer apart; as in `ShardedSource`.
        store: A torch store that all ranks share. Default: the one of torch's default group, which
            is neither made nor destroyed here.
        deadline_s: Longest wait for the publishing rank to begin, counted from the end of its round
            before, and for a collective to end. The same as the publisher's: a publishing rank that
            says nothing in its round for four times as long is given up.
    """

    def __init__(
        self,
        model_or_source: nn.Module | Mapping[str, torch.Tensor] | WeightSource,
        *,
        name: str = "default",
        store: Any = None,
        deadline_s: float = 30.0,
    ) -> None:
        self._source = as_source(model_or_source)
        self._deadline_s = deadline_s
        self._pid = os.getpid()
        self._closed = False
        self._busy = threading.Lock()
        self._calls = itertools.count(1)
        self._thread = SerialThread("wtransfer-gather")
        self._link = _RankLink(Whereabouts(name, store), self._thread)
        close_at_exit(self)

    def publish(self, version: str, *, wait: bool = True) -> str:
        """Take part in the publishing rank's ``publish`` of the same version.

        Args:
            version: Label; the publishing rank's.
            wait: Whether to wait for the end. Without, it returns when this rank may change its
                weights again; what becomes of the round is then told to the publishing rank only,
                and the next call waits for that first.

        Returns:
            Fingerprint of what was published; empty if the end was not waited for, or if this rank
            has tensors, but no part of one that the publishing rank gathers.

        Raises:
            StallError: The publishing rank did not begin in time, or a collective hangs.
            PeerLostError: The publishing rank is gone.
            SourceError: The ranks do not have the same tensors; the first that differs is named.
            ClosedError: `close` was called meanwhile.
            WTransferError: The round was aborted; the error is the publishing rank's.
        """
        self._check_usable()
        if not self._busy.acquire(blocking=False):
            raise RoundBusyError("this rank is publishing already; wait for the other call")
        try:
            return self._publish(version, wait=wait)
        finally:
            self._busy.release()

    def close(self) -> None:
        """Let go of the publishing rank; a second call does nothing."""
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        self._link.close()
        self._thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _publish(self, version: str, *, wait: bool) -> str:
        # Who failed and came again at once would be taken into the round that fails; and who left
        # early would lose from its deadline what the others take for the end.
        self._link.await_end(Deadline(SILENT_DEADLINES * self._deadline_s))
        deadline = Deadline(self._deadline_s)
        metadata = tuple(self._source.metadata)
        note = self._link.connect(deadline)
        rank = own_rank()
        mine = layout_between(metadata, rank, note.rank)
        if metadata and not any(note.rank in ranks_of(meta) for meta in metadata):
            # In no group with the publishing rank: nothing that this one holds is asked for.
            return ""
        call = next(self._calls)
        self._link.begin_call(call)
        part = _Part(self._source, metadata, note.rank, self._thread, self._deadline_s)
        self._link.send(Arrive(call, rank, version, digest_of(mine)))
        try:
            end = self._obey(call, part, mine, deadline, wait=wait)
        except BaseException as error:
            # Also a KeyboardInterrupt: the others must not wait for this rank.
            self._link.tell_failed(call, error)
            raise
        if end.error is not None:
            raise end.error.rebuild()
        return end.fingerprint

    def _obey(
        self,
        call: int,
        part: _Part,
        layout: list[tuple[str, str]],
        deadline: Deadline,
        *,
        wait: bool,
    ) -> End:
        """Do as the publishing rank says, up to the end; of one not waited for nothing is known."""
        while True:
            order = self._link.next_order(call, deadline)
            if not isinstance(order, End):
                # From here on it is the publishing rank's round that has deadlines; this one is for
                # a round that is never ended.
                deadline = Deadline(SILENT_DEADLINES * self._deadline_s)
            if isinstance(order, End):
                return order
            if isinstance(order, Begin):
                continue
            if isinstance(order, Describe):
                self._link.send(Description(call, layout))
            elif isinstance(order, Packed):
                if not wait:
                    return End(call)
            elif isinstance(order, (Pass, Gather)):
                self._follow(call, part, order)
            else:
                raise ProtocolError(f"the publishing rank does not send {type(order).__name__}")

    def _follow(self, call: int, part: _Part, order: Pass | Gather) -> None:
        if isinstance(order, Pass):
            part.restart(order.number)
        else:
            part.gather(order)
        if (index := part.advance()) is not None:
            self._link.send(Ready(call, order.number, index))

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                "this TrainerRank belongs to the parent process; after fork() make a new one"
            )
        if self._closed:
            raise ClosedError("this TrainerRank is closed")


class _Part:
    """One rank's part in the passes of a round.

    Args:
        source: This rank's.
        metadata: As it was when the round began.
        publishing: Rank that publishes; what is not gathered with it is passed over.
        thread: Makes the collectives.
        deadline_s: Longest time for one, in seconds.
    """

    def __init__(
        self,
        source: WeightSource,
        metadata: Sequence[ParamMeta],
        publishing: int,
        thread: SerialThread,
        deadline_s: float,
    ) -> None:
        self._source = source
        self._metadata = metadata
        self._publishing = publishing
        self._thread = thread
        self._deadline_s = deadline_s
        self._number = 0
        self._shards: Iterator[tuple[int, ParamMeta, torch.Tensor]] = iter(())
        self._next: tuple[int, ParamMeta, torch.Tensor] | None = None

    def restart(self, number: int) -> None:
        """Begin a pass."""
        self._number = number
        self._shards = iter_shards(self._source, self._metadata)

    def advance(self) -> int | None:
        """Go on to the next shard that is gathered; return its index, None after the last."""
        self._next = None
        try:
            for each in self._shards:
                if is_sharded(each[1]) and self._publishing in ranks_of(each[1]):
                    self._next = each
                    return each[0]
        except WTransferError:
            raise
        except Exception as error:
            raise SourceError(
                f"the source's iter_local raised {type(error).__name__}: {error}"
            ) from error
        return None

    def gather(self, order: Gather) -> None:
        """Take part in gathering the shard in hand; what comes of it is the publishing rank's."""
        if self._next is None or (order.number, order.index) != (self._number, self._next[0]):
            raise ProtocolError(f"the publishing rank gathers tensor {order.index} out of turn")
        _, meta, shard = self._next
        try:
            call = on_callers_stream(lambda: _gather_and_drop(meta, shard))
            self._thread.call(call, f"gathering {meta.name!r}", self._deadline_s)
        except WTransferError:
            raise
        except Exception as error:
            raise EngineError(
                f"gathering {meta.name!r} failed on {type(error).__name__}: {error}",
                piece=meta.name,
            ) from error


def _gather_and_drop(meta: ParamMeta, shard: torch.Tensor) -> None:
    gathered(meta, shard)


class _RankLink:
    """The connection to the publishing rank, found anew when that one was restarted.

    Args:
        whereabouts: Where to look for it.
        thread: Looks there, since a store whose host is stopped never answers.
    """

    def __init__(self, whereabouts: Whereabouts, thread: SerialThread) -> None:
        self._whereabouts = whereabouts
        self._thread = thread
        self._changed = threading.Condition()
        self._note: Note | None = None
        self._dialer: Dialer | None = None
        self._connection: Connection | None = None
        self._refusal: WTransferError | None = None
        self._orders: queue.SimpleQueue[msgspec.Struct | WTransferError] = queue.SimpleQueue()
        self._call = 0
        self._in_round = False
        self._closed = False

    def connect(self, deadline: Deadline) -> Note:
        """Return the note of the publishing rank, once it is connected to.

        Raises:
            StallError: It is not there in time.
            ClosedError: `close` was called.
        """
        while True:
            with self._changed:
                self._check_open()
                if self._connection is not None and self._note is not None:
                    return self._note
            self._look(deadline)
            with self._changed:
                self._changed.wait_for(
                    lambda: self._connection is not None, min(LOOK_S, deadline.remaining())
                )
                if self._connection is None and deadline.expired:
                    raise self._absent(deadline.seconds)

    def await_end(self, deadline: Deadline) -> None:
        """Wait until the round of the last call is over, whoever has left that call.

        Raises:
            StallError: It is not over in time.
            ClosedError: `close` was called.
        """
        with self._changed:
            over = self._changed.wait_for(lambda: not self._in_round, deadline.remaining())
            self._check_open()
        if not over:
            raise StallError(
                f"the publishing rank has not ended its last round within {deadline.seconds:g} s",
                seconds=deadline.seconds,
            )

    def begin_call(self, call: int) -> None:
        """Take orders for this call only."""
        with self._changed:
            self._check_open()
            # The last call's round may have begun just now, when this rank had given it up: its end
            # would not be heard any more, and is not waited for.
            self._call, self._in_round = call, False
            self._orders = queue.SimpleQueue()

    def next_order(self, call: int, deadline: Deadline) -> msgspec.Struct:
        """Return the next order of a call.

        Raises:
            StallError: None came in time.
            PeerLostError: The publishing rank is gone.
            ClosedError: `close` was called.
        """
        try:
            order = self._orders.get(timeout=deadline.remaining())
        except queue.Empty:
            if self._in_round:
                raise StallError(
                    "the publishing rank is connected and has begun its round, but has neither "
                    f"gone on nor ended it within {deadline.seconds:g} s",
                    seconds=deadline.seconds,
                ) from None
            raise StallError(
                f"the publishing rank is connected, but did not call publish() for this version "
                f"within {deadline.seconds:g} s (call {call} of this rank); every rank must",
                seconds=deadline.seconds,
            ) from None
        if isinstance(order, WTransferError):
            raise order
        return order

    def send(self, message: msgspec.Struct) -> None:
        """Send to the publishing rank.

        Raises:
            PeerLostError: It is gone.
            ClosedError: `close` was called.
        """
        with self._changed:
            self._check_open()
            connection = self._connection
        if connection is None:
            raise PeerLostError("the publishing rank of this trainer is gone")
        try:
            connection.send(message)
        except PeerLostError:
            self._check_open()
            raise

    def tell_failed(self, call: int, error: BaseException) -> None:
        """Let the publishing rank know that this one cannot go on, if it is still there."""
        if not isinstance(error, WTransferError):
            error = RoundAbortedError(f"interrupted by {type(error).__name__}: {error}")
        try:
            self.send(Failed(call, ErrorInfo.of(error)))
        except (PeerError, ClosedError) as lost:
            logger.info("the publishing rank was not told: %s", lost)

    def close(self) -> None:
        """Hang up for good: whoever waits for orders is told."""
        with self._changed:
            self._closed = True
            self._orders.put(ClosedError("this TrainerRank was closed"))
        self._hang_up()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this TrainerRank was closed")

    def _hang_up(self) -> None:
        with self._changed:
            dialer, self._dialer = self._dialer, None
            self._connection, self._in_round = None, False
            self._changed.notify_all()
        if dialer is not None:
            dialer.close()

    def _look(self, deadline: Deadline) -> None:
        within_s = max(LOOK_S, deadline.remaining())
        what = "looking for the publishing rank in the trainer's store"
        note = self._thread.call(self._whereabouts.look, what, within_s)
        if note is None or note == self._note:
            return
        self._hang_up()
        with self._changed:
            self._check_open()
            self._note = note
            self._refusal = None
            self._dialer = Dialer(
                RANK_CODEC,
                address=note.address,
                token=note.secret,
                on_open=self._on_open,
                on_message=self._on_message,
                on_close=self._on_close,
                on_refused=self._on_refused,
            )

    def _absent(self, seconds: float) -> StallError:
        if self._note is None:
            return StallError(
                f"no rank of this trainer has published a sharded model within {seconds:g} s: one "
                "must make a Publisher and call publish() when the others call theirs",
                seconds=seconds,
            )
        refusal = f" ({self._refusal})" if self._refusal is not None else ""
        absent = StallError(
            f"trainer rank {self._note.rank} does not answer at {self._note.address} within "
            f"{seconds:g} s{refusal}; if it is on another host, let it listen there: "
            "Publisher(ShardedSource(model, listen='tcp:HOST:0'))",
            seconds=seconds,
        )
        absent.__cause__ = self._refusal
        return absent

    # -- on the channel's thread

    def _on_open(self, connection: Connection) -> None:
        with self._changed:
            self._connection = connection
            self._changed.notify_all()

    def _on_close(self, connection: Connection, error: WTransferError | None) -> None:
        with self._changed:
            if connection is not self._connection:
                return
            self._connection, self._in_round = None, False
            self._changed.notify_all()
            lost = PeerLostError(f"the publishing rank of this trainer was lost: {error}")
            lost.__cause__ = error
            self._orders.put(lost)

    def _on_message(self, _connection: Connection, message: msgspec.Struct) -> None:
        with self._changed:
            # What belongs to an earlier call has lost its meaning.
            if getattr(message, "call", None) != self._call:
                return
            if isinstance(message, (Begin, End)):
                self._in_round = isinstance(message, Begin)
                self._changed.notify_all()
            self._orders.put(message)

    def _on_refused(self, error: WTransferError) -> None:
        self._refusal = error
