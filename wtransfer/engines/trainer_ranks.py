"""The other ranks of a trainer, as the rank that publishes sees them."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from wtransfer.deadline import Deadline
from wtransfer.engines.messages import ErrorInfo
from wtransfer.engines.rank_messages import (
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
from wtransfer.engines.shards import check_equal, digest_of
from wtransfer.engines.whereabouts import token_of_link
from wtransfer.errors import (
    PeerError,
    PeerLostError,
    ProtocolError,
    RoundAbortedError,
    StallError,
    WTransferError,
)
from wtransfer.transport.channel import Listener

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    import msgspec

    from wtransfer.engines.shards import Layout
    from wtransfer.engines.whereabouts import Whereabouts
    from wtransfer.transport.channel import Connection

logger = logging.getLogger(__name__)

MAX_UNHEARD = 1024
"""Errors that are kept for ranks that have yet to come."""


class Visit:
    """One call of `TrainerRank.publish` in another process.

    Args:
        connection: To that process.
        arrive: What it said.
    """

    def __init__(self, connection: Connection, arrive: Arrive) -> None:
        self.connection = connection
        self.arrive = arrive
        self.ready: tuple[int, int] | None = None
        """Pass and tensor that it is ready to gather."""
        self.layout: Layout | None = None
        """How its tensors lie, once it was asked."""
        self.error: WTransferError | None = None
        """Why it cannot go on."""
        self.over = False
        """Whether it was told the end."""

    def send(self, message: msgspec.Struct) -> None:
        """Send; a process that is gone shows on its connection, which is where it is looked for."""
        try:
            self.connection.send(message)
        except PeerError as error:
            logger.info("%s was not sent: %s", type(message).__name__, error)

    def end(self, error: ErrorInfo | None, fingerprint: str = "") -> None:
        """Tell it the end, once."""
        if not self.over:
            self.over = True
            self.send(End(self.arrive.call, error, fingerprint))


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
        self._visits: dict[int, Visit] = {}
        self._version: str | None = None
        self._stopped = False
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
        """State that a round is under way; ranks that come for another one are sent away."""
        with self._changed:
            self._version, self._stopped = version, False
            self._unheard = {key: e for key, e in self._unheard.items() if key[1] != version}
            for visit in self._visits.values():
                self._greet(visit)

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
            if self._visit(rank).arrive.layout != digest_of(mine):
                self._compare(rank, mine)

    def begin_pass(self, ranks: Collection[int]) -> int:
        """Let every rank begin to iterate; return the number of the pass."""
        with self._changed:
            self._check_round()
            self._num_passes += 1
            for rank in ranks:
                visit = self._visit(rank)
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
            lambda rank: self._visit(rank).ready == (number, index),
            lambda missing: f"trainer ranks {missing} on the way to gather {name!r}",
        )
        with self._changed:
            self._check_round()
            for rank in ranks:
                visit = self._visit(rank)
                visit.send(Gather(visit.arrive.call, number, index))

    def lost(self, ranks: Collection[int], within_s: float) -> WTransferError | None:
        """Return why one of these ranks is gone, if that shows within a time."""
        with self._changed:
            self._changed.wait_for(lambda: self._first_error(ranks) is not None, within_s)
            return self._first_error(ranks)

    def stop_waiting(self) -> None:
        """Let every wait of this round raise; `end` is still to come."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def packed(self) -> None:
        """Tell every rank of the round that it may change its weights again."""
        with self._changed:
            for visit in self._current():
                visit.send(Packed(visit.arrive.call))

    def end(
        self,
        version: str,
        error: BaseException | None,
        *,
        ranks: Collection[int] = (),
        fingerprint: str = "",
    ) -> None:
        """End the round of `version`, and tell all that have come for it or will.

        Args:
            version: Label of the round.
            error: Why it failed.
            ranks: Who was expected: those that come later are told the error then.
            fingerprint: Identity of what was published.
        """
        with self._changed:
            self._version = None
            if error is None:
                # All took part, so none is behind.
                self._unheard.clear()
                self._dismiss(version, None, fingerprint)
            else:
                self._fail(version, error, ranks)
            self._changed.notify_all()

    def refuse(self, version: str, error: BaseException, ranks: Collection[int]) -> None:
        """Tell those that have come or will for a round that has not begun.

        Another one may be under way, and goes on.
        """
        with self._changed:
            if self._version != version:
                self._fail(version, error, ranks)

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
            for rank, visit in self._visits.items():
                if visit.connection is connection and not visit.over and visit.error is None:
                    # Silence is no proof of death: the process may be stopped.
                    cls = StallError if isinstance(error, StallError) else PeerLostError
                    visit.error = cls(f"trainer rank {rank} was lost: {error}")
                    visit.error.__cause__ = error
            self._changed.notify_all()

    def _arrived(self, visit: Visit) -> None:
        rank = visit.arrive.rank
        visit.connection.peer = f"trainer rank {rank}"
        self._visits[rank] = visit
        # Once: whoever comes again, comes for another attempt.
        error = self._unheard.pop((rank, visit.arrive.version), None)
        if error is not None:
            visit.end(error)
        else:
            self._greet(visit)

    def _greet(self, visit: Visit) -> None:
        """Let a rank take part in the round that is under way, if it came for that one."""
        if self._version is None or visit.over:
            return
        theirs = visit.arrive.version
        if theirs == self._version:
            visit.send(Begin(visit.arrive.call))
            return
        error = RoundAbortedError(
            f"trainer rank {self.rank} publishes {self._version!r}, rank {visit.arrive.rank} "
            f"called publish({theirs!r}); all must call it for the same versions in turn"
        )
        visit.end(ErrorInfo.of(error))

    def _answered(self, connection: Connection, message: msgspec.Struct) -> None:
        call = getattr(message, "call", None)
        for visit in self._visits.values():
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
                self._check_round()
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

    def _check_round(self) -> None:
        if self._version is None or self._stopped:
            raise RoundAbortedError("the round is over; its weights are not gathered any further")

    def _first_error(self, ranks: Collection[int]) -> WTransferError | None:
        visits = (self._visits.get(rank) for rank in sorted(ranks))
        errors = (v.error for v in visits if v and v.arrive.version == self._version)
        return next((error for error in errors if error is not None), None)

    def _has_come(self, rank: int) -> bool:
        visit = self._visits.get(rank)
        return visit is not None and not visit.over and visit.arrive.version == self._version

    def _late_text(self, missing: list[int]) -> str:
        seen = {
            rank: visit.arrive.version
            for rank in missing
            if (visit := self._visits.get(rank)) is not None
        }
        others = "".join(f"; rank {r} was last here for {v!r}" for r, v in seen.items())
        return (
            f"the arrival of trainer ranks {missing}, which hold parts of the weights: each must "
            f"call TrainerRank.publish({self._version!r}) when rank {self.rank} publishes{others};"
        )

    def _compare(self, rank: int, mine: Layout) -> None:
        visit = self._visit(rank)
        visit.send(Describe(visit.arrive.call))
        self._until(
            [rank],
            lambda _rank: visit.layout is not None,
            lambda missing: f"the layout of trainer ranks {missing}",
        )
        assert visit.layout is not None
        check_equal(mine, visit.layout, f"rank {self.rank}", f"rank {rank}")
        raise ProtocolError(f"trainer rank {rank} has the same layout under another digest")

    def _visit(self, rank: int) -> Visit:
        return self._visits[rank]

    def _current(self) -> list[Visit]:
        version = self._version
        return [v for v in self._visits.values() if not v.over and v.arrive.version == version]

    def _fail(self, version: str, error: BaseException, ranks: Collection[int]) -> None:
        info = ErrorInfo.of(error)
        told = self._dismiss(version, info, "")
        self._unheard |= {(rank, version): info for rank in ranks if rank not in told}
        while len(self._unheard) > MAX_UNHEARD:
            del self._unheard[next(iter(self._unheard))]

    def _dismiss(self, version: str, error: ErrorInfo | None, fingerprint: str) -> set[int]:
        """Tell the end to all that have come for a version; return who they are."""
        told = set()
        for rank, visit in self._visits.items():
            if visit.arrive.version == version and not visit.over:
                visit.end(error, fingerprint)
                told.add(rank)
        return told
