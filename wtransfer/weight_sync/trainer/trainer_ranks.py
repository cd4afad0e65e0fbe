"""The other ranks of a trainer, as the rank that publishes sees them."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from wtransfer.deadline import Deadline
from wtransfer.errors import (
    PeerLostError,
    ProtocolError,
    RoundAbortedError,
    StallError,
    WTransferError,
)
from wtransfer.transport.channel import Listener
from wtransfer.weight_sync.messages import ErrorInfo
from wtransfer.weight_sync.trainer.rank_messages import (
    RANK_CODEC,
    Arrive,
    Describe,
    Description,
    Failed,
    Gather,
    Packed,
    Pass,
    Ready,
)
from wtransfer.weight_sync.trainer.rank_round import RankRound, Visit
from wtransfer.weight_sync.trainer.shards import check_equal, digest_of
from wtransfer.weight_sync.trainer.whereabouts import token_of_link

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import msgspec

    from wtransfer.transport.channel import Connection
    from wtransfer.weight_sync.trainer.shards import Layout
    from wtransfer.weight_sync.trainer.whereabouts import Whereabouts

MAX_UNHEARD = 1024
"""Errors that are kept for ranks that have yet to come."""


class TrainerRanks:
    """Waits for the other ranks, lets all gather at once, and tells them the end.

    The channel's thread writes under one lock what they say; whoever waits, waits on it.

    Args:
        whereabouts: Where they look for this rank.
        rank: This rank.
        listen: Address to listen at; None: an abstract Unix socket, for ranks on this host.
        deadline_s: Longest wait for any of them, in seconds.
    """

    def __init__(
        self, whereabouts: Whereabouts, rank: int, *, listen: str | None, deadline_s: float
    ) -> None:
        self.rank = rank
        self._deadline_s = deadline_s
        self._changed = threading.Condition()
        self._round: RankRound | None = None
        self._waiting: dict[int, Visit] = {}
        self._last_here: dict[int, str] = {}
        self._num_passes = 0
        self._unheard: dict[tuple[int, str], ErrorInfo] = {}
        self._listener = Listener(
            RANK_CODEC,
            address=listen,
            allow_remote=True,
            token=token_of_link(),
            on_open=lambda _connection: None,
            on_message=self._on_message,
            on_close=self._on_close,
            deadline_s=deadline_s,
        )
        try:
            whereabouts.leave(rank, self._listener.address, self._listener.token)
        except BaseException:
            self._listener.close()
            raise

    def begin(self, version: str) -> None:
        """State that a round is under way; ranks that have come for another one are sent away."""
        with self._changed:
            self._unheard = {key: e for key, e in self._unheard.items() if key[1] != version}
            self._round = RankRound(version, self._unheard)
            waiting, self._waiting = self._waiting, {}
            for visit in waiting.values():
                self._greet(self._round, visit)
            self._changed.notify_all()

    def gather_layouts(self, ranks: Collection[int], layout_for: Callable[[int], Layout]) -> None:
        """Wait until all ranks have come, and check that their tensors lie as ours do.

        Raises:
            SourceError: They do not; the first tensor that differs is named.
            StallError: Not all have come in time.
            PeerLostError: One was lost.
        """
        self._until(ranks, self._has_come, self._late_text)
        for rank in sorted(ranks):
            mine = layout_for(rank)
            with self._changed:
                visit = self._now().visits[rank]
            if visit.arrive.layout != digest_of(mine):
                self._compare(visit, mine)

    def begin_pass(self, ranks: Collection[int]) -> int:
        """Let every rank begin to iterate; return the number of the pass."""
        with self._changed:
            here = self._now().visits
            self._num_passes += 1
            for rank in ranks:
                visit = here[rank]
                visit.send(Pass(visit.arrive.call, self._num_passes))
            return self._num_passes

    def enter(self, ranks: Collection[int], number: int, index: int, name: str) -> None:
        """Wait until every rank is ready to gather a tensor, and let them; then enter as well.

        Raises:
            PeerLostError: A rank was lost; nobody was told to enter.
            StallError: One is not ready in time.
            WTransferError: One has failed.
        """
        self._until(
            ranks,
            lambda rank: self._now().visits[rank].ready == (number, index),
            lambda missing: f"trainer ranks {missing} on the way to gather {name!r}",
        )
        with self._changed:
            here = self._now().visits
            for rank in ranks:
                visit = here[rank]
                visit.send(Gather(visit.arrive.call, number, index))

    def lost(self, ranks: Collection[int], within_s: float) -> WTransferError | None:
        """Return why one of these ranks is gone, if that shows within a time."""
        with self._changed:
            self._changed.wait_for(lambda: self._first_error(ranks) is not None, within_s)
            return self._first_error(ranks)

    def stop_waiting(self) -> None:
        """Let every wait of this round raise; `end` is still to come."""
        with self._changed:
            if self._round is not None:
                self._round.stopped = True
            self._changed.notify_all()

    def packed(self) -> None:
        """Tell every rank of the round that it may change its weights again."""
        with self._changed:
            if self._round is not None:
                self._round.packed = True
                for visit in self._round.visits.values():
                    visit.send(Packed(visit.arrive.call))

    def end(
        self,
        version: str,
        error: BaseException | None,
        *,
        ranks: Collection[int] = (),
        fingerprint: str = "",
    ) -> None:
        """End the round of `version`, and tell all that take part, or will come for it.

        Args:
            version: Label of the round.
            error: Why it failed.
            ranks: Who was expected: those that come later are told the error then.
            fingerprint: Identity of what was published.
        """
        info = None if error is None else ErrorInfo.of(error)
        with self._changed:
            ended, self._round = self._round or RankRound(version, {}), None
            for visit in ended.visits.values():
                visit.end(info, fingerprint)
            if info is None:
                self._succeeded(ended, fingerprint)
            else:
                self._note_unheard(version, info, set(ranks) - ended.visits.keys())
            self._changed.notify_all()

    def refuse(self, version: str, error: BaseException, ranks: Collection[int]) -> None:
        """Tell those that have come or will for a round that has not begun.

        Another one may be under way, and goes on.
        """
        info = ErrorInfo.of(error)
        with self._changed:
            told = {r for r, visit in self._waiting.items() if visit.arrive.version == version}
            for rank in told:
                self._waiting.pop(rank).end(info)
            # Who has yet to come for one of the same label, has yet to come for that one.
            if self._round is None or self._round.version != version:
                self._note_unheard(version, info, set(ranks) - told)

    def close(self) -> None:
        """Stop listening; ranks that wait are told."""
        self._listener.close()

    # -- on the channel's thread

    def _on_message(self, connection: Connection, message: msgspec.Struct) -> None:
        with self._changed:
            if isinstance(message, Arrive):
                self._arrived(Visit(connection, message))
            else:
                self._answered(connection, message)
            self._changed.notify_all()

    def _on_close(self, connection: Connection, error: WTransferError | None) -> None:
        with self._changed:
            for rank, visit in self._here.items():
                if visit.connection is connection and visit.error is None:
                    # Silence is no proof of death: the process may be stopped.
                    cls = StallError if isinstance(error, StallError) else PeerLostError
                    visit.error = cls(f"trainer rank {rank} was lost: {error}")
                    visit.error.__cause__ = error
            # Who has only waited may come again.
            gone = [r for r, visit in self._waiting.items() if visit.connection is connection]
            for rank in gone:
                del self._waiting[rank]
            self._changed.notify_all()

    def _arrived(self, visit: Visit) -> None:
        rank, version = visit.arrive.rank, visit.arrive.version
        visit.connection.peer = f"trainer rank {rank}"
        self._last_here[rank] = version
        # Once: whoever comes again, comes for another attempt.
        error = self._unheard.pop((rank, version), None)
        if error is not None:
            visit.end(error)
        elif self._round is None or not self._is_for(self._round, visit):
            self._waiting[rank] = visit
        else:
            self._greet(self._round, visit)

    def _is_for(self, round_: RankRound, visit: Visit) -> bool:
        """Whether a rank is answered by the round under way; else it waits for a later one."""
        if visit.arrive.rank in round_.visits:
            # It has failed, was lost, or has done its part: how its part ended stands.
            return False
        return not round_.packed or visit.arrive.version == round_.version

    def _greet(self, round_: RankRound, visit: Visit) -> None:
        """Let a rank take part in a round, if it came for that one."""
        theirs = visit.arrive.version
        if theirs == round_.version:
            round_.take(visit)
            return
        error = RoundAbortedError(
            f"trainer rank {self.rank} publishes {round_.version!r}, rank {visit.arrive.rank} "
            f"called publish({theirs!r}); all must call it for the same versions in turn"
        )
        visit.end(ErrorInfo.of(error))

    def _answered(self, connection: Connection, message: msgspec.Struct) -> None:
        call = getattr(message, "call", None)
        for rank, visit in list(self._waiting.items()):
            if visit.connection is connection and visit.arrive.call == call:
                # It waits no longer, which is all that it can say; it may come again.
                del self._waiting[rank]
        for visit in self._here.values():
            if visit.connection is connection and visit.arrive.call == call:
                self._take(visit, message)

    def _take(self, visit: Visit, message: msgspec.Struct) -> None:
        if isinstance(message, Ready):
            visit.ready = (message.number, message.index)
        elif isinstance(message, Description):
            visit.layout = message.lines
        elif isinstance(message, Failed):
            visit.error = message.error.rebuild(worker=f"trainer rank {visit.arrive.rank}")
        else:
            raise ProtocolError(f"a rank of the trainer does not send {type(message).__name__}")

    def _succeeded(self, ended: RankRound, fingerprint: str) -> None:
        """Enter that a round is over in which all took part: of what failed before none is behind.

        Whoever was lost in it, and asks for it again, is told now.
        """
        for key, error in ended.unheard_before.items():
            if self._unheard.get(key) is error:
                del self._unheard[key]
        for rank, visit in list(self._waiting.items()):
            part = ended.visits.get(rank)
            is_same = visit.arrive.version == ended.version
            if is_same and part is not None and part.error is not None:
                self._waiting.pop(rank).end(None, fingerprint)

    # -- waiting

    def _until(
        self,
        ranks: Collection[int],
        done: Callable[[int], bool],
        what: Callable[[list[int]], str],
    ) -> None:
        """Wait until `done` holds of every rank; raise what ends the round."""
        deadline = Deadline(self._deadline_s)
        with self._changed:
            while True:
                self._now()
                if (error := self._first_error(ranks)) is not None:
                    raise error
                missing = sorted(rank for rank in ranks if not done(rank))
                if not missing:
                    return
                if deadline.expired:
                    raise StallError(
                        f"no progress on {what(missing)} within {self._deadline_s:g} s",
                        seconds=self._deadline_s,
                    )
                self._changed.wait(deadline.remaining())

    def _now(self) -> RankRound:
        """Return the round that is under way.

        Raises:
            RoundAbortedError: There is none, or it is to wait no more.
        """
        if self._round is None or self._round.stopped:
            raise RoundAbortedError("the round is over; its weights are not gathered any further")
        return self._round

    @property
    def _here(self) -> dict[int, Visit]:
        """Who takes part in the round that is under way, by rank."""
        return {} if self._round is None else self._round.visits

    def _first_error(self, ranks: Collection[int]) -> WTransferError | None:
        errors = (self._here[rank].error for rank in sorted(ranks) if rank in self._here)
        return next((error for error in errors if error is not None), None)

    def _has_come(self, rank: int) -> bool:
        return rank in self._here

    def _late_text(self, missing: list[int]) -> str:
        version = self._now().version
        seen = {rank: self._last_here[rank] for rank in missing if rank in self._last_here}
        others = "".join(f"; rank {r} was last here for {v!r}" for r, v in seen.items())
        return (
            f"the arrival of trainer ranks {missing}, which hold parts of the weights: each must "
            f"call TrainerRank.publish({version!r}) when rank {self.rank} publishes{others};"
        )

    def _compare(self, visit: Visit, mine: Layout) -> None:
        rank = visit.arrive.rank
        visit.send(Describe(visit.arrive.call))
        self._until(
            [rank],
            lambda _rank: visit.layout is not None,
            lambda missing: f"the layout of trainer ranks {missing}",
        )
        assert visit.layout is not None
        check_equal(mine, visit.layout, f"rank {self.rank}", f"rank {rank}")
        raise ProtocolError(f"trainer rank {rank} has the same layout under another digest")

    def _note_unheard(self, version: str, error: ErrorInfo, ranks: Collection[int]) -> None:
        self._unheard |= {(rank, version): error for rank in ranks}
        while len(self._unheard) > MAX_UNHEARD:
            del self._unheard[next(iter(self._unheard))]
