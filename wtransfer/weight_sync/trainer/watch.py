"""The waits of a round: each ends on an answer, a fault, a lost peer, an abort, or the deadline.

Engines whose workers form a group need a second look at who is to blame. One rank that is killed
makes the others say that their group broke, and often before the killed one is known to be gone;
one that is stopped leaves the others waiting for bytes as it does itself. What tells them apart is
the control channel: whoever lives answers there, whatever its engine waits for.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from wtransfer.errors import GroupError, StallError, WTransferError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from wtransfer.weight_sync.trainer.origin import Origin
    from wtransfer.weight_sync.trainer.roster import Exchange, Worker
    from wtransfer.weight_sync.trainer.rules import Rules
    from wtransfer.weight_sync.trainer.seating import Seat, Seating
    from wtransfer.weight_sync.trainer.sender import Running, Sender

TICK_S = 0.25
"""Longest wait between two looks at the deadline."""
CAUSE_GRACE_S = 0.3
"""Time in which the cause of a broken group must show, before the break itself counts as one."""


class Watch:
    """Waits for workers and for the trainer's engine, on whatever thread asks.

    What it waits for is written by the channel's thread under `changed`, which also wakes it.

    Args:
        changed: The roster's lock.
        seating: Who takes part.
        sender: The trainer's engine.
        origin: The engine that workers must have.
        rules: Deadline, and what a lost worker means.
    """

    def __init__(
        self,
        changed: threading.Condition,
        seating: Seating,
        sender: Sender,
        origin: Origin,
        rules: Rules,
    ) -> None:
        self.ended: WTransferError | None = None
        """Set once the round shall end; every wait then raises it."""
        self.transferred = False
        """Whether every byte has arrived, so that no group is needed any more."""
        self._changed = changed
        self._seating = seating
        self._sender = sender
        self._origin = origin
        self._rules = rules
        self._num_waiting = 0
        self._waited_at = 0.0
        self._broken_at: float | None = None

    def until(self, done: Callable[[Exchange], bool], what: str) -> None:
        """Wait until every worker of the round has done something; raise what ends the round."""
        with self._changed:
            self._num_waiting += 1
            try:
                self._wait(done, what)
            finally:
                self._num_waiting -= 1
                # Whoever was waited for, the engine is not late before it had time of its own.
                self._waited_at = time.monotonic()

    def supervise(self, running: Running, what: str) -> None:
        """Wait for a call into the trainer's engine; raise what ends the round."""
        begun = time.monotonic()
        with self._changed:
            while not running.done:
                self.check()
                # An engine that waits for workers is not the one that stalls.
                if not self._num_waiting:
                    self._check_engine(begun, what)
                self._changed.wait(TICK_S)
            # A worker's fault is the cause of what the engine then raises, not the other way round.
            self.check()
        if running.error is not None:
            raise running.error

    def check(self) -> None:
        """Raise what ends the round, if anything has; called under the lock."""
        if self.ended is not None:
            raise self.ended
        symptom = None
        for seat in self._seating.live():
            for exchange in seat.exchanges:
                error = exchange.error or _refusal(exchange.worker, self._origin)
                if error is None or self._drops(seat, exchange):
                    continue
                error.add_facts(worker=exchange.worker.name)
                if not isinstance(error, GroupError):
                    raise error
                symptom = symptom or error
        if symptom is not None and self._cause_is_late():
            raise symptom

    def _wait(self, done: Callable[[Exchange], bool], what: str) -> None:
        begun = time.monotonic()
        while True:
            self.check()
            waiting = [each for each in self._seating.exchanges() if not done(each)]
            if not waiting:
                return
            self._check_stall(waiting, begun, what)
            self._changed.wait(TICK_S)

    def _drops(self, seat: Seat, exchange: Exchange) -> bool:
        """Go on without a lost worker's instance, where the rules allow it."""
        if not exchange.lost or self._rules.on_lost_worker != "drop":
            return False
        if self._origin.needs_generation and not self.transferred:
            # The rest have lost their group as well; the next round gives them another.
            return False
        if len(self._seating.live()) <= self._rules.min_workers:
            return False
        if not seat.dropped:
            self._seating.drop(seat, f"{exchange.worker.name} was lost")
        return True

    def _cause_is_late(self) -> bool:
        """Whether nothing else explains a broken group, though there was time to hear of it."""
        if self._broken_at is None:
            self._broken_at = time.monotonic()
        return self._idle_s(self._broken_at) > CAUSE_GRACE_S

    def _check_stall(self, waiting: list[Exchange], begun: float, what: str) -> None:
        """Call a worker stalled that neither moves nor is still being fed by a moving trainer."""
        fed_at = max(begun, self._sender.source.moved_at)
        stalled = [
            each for each in waiting if self._idle_s(each.moved_at, fed_at) > self._rules.deadline_s
        ]
        if stalled and self._origin.needs_generation and not self.transferred:
            self._give_up(*self._culprit(stalled, waiting), what)
            return
        for exchange in stalled:
            self._give_up(exchange, exchange.worker.name, what)

    def _give_up(self, exchange: Exchange, who: str, what: str) -> None:
        exchange.lost = True
        exchange.error = self._stall(who, what, worker=exchange.worker.name)
        self.check()

    def _culprit(self, stalled: list[Exchange], waiting: list[Exchange]) -> tuple[Exchange, str]:
        """Return, of a group in which some do not move, who holds up the rest, in words as well.

        That is whoever does not answer on the control channel, though it may have moved last. Where
        all answer, the engine of one hangs; it is not one that is ahead, but which cannot be told
        for certain, so all of them are named.
        """
        if self._sender.source.reading:
            # For every wait: the engine's own ends with it, and would be taken for the cause.
            self.ended = self._stall("the trainer's source", "the next tensor")
            raise self.ended
        quietest = max(waiting, key=lambda each: each.worker.connection.last_heard_s)
        # A peer that lives breaks its silence several times in this span.
        if quietest.worker.connection.last_heard_s > self._rules.deadline_s / 2:
            return quietest, quietest.worker.name
        stalled.sort(key=lambda each: (each.num_received, each.nbytes, each.moved_at))
        names = ", ".join(each.worker.name for each in stalled)
        hint = " (all of them answer: the engine of one hangs)" if len(stalled) > 1 else ""
        return stalled[0], f"{names}{hint}"

    def _check_engine(self, begun: float, what: str) -> None:
        moved = max((each.moved_at for each in self._seating.exchanges()), default=begun)
        last = max(begun, moved, self._sender.source.moved_at, self._waited_at)
        if self._idle_s(last) > self._rules.deadline_s:
            engine = f"the trainer's engine {self._sender.name!r}"
            raise self._stall(engine, what, plugin=self._sender.plugin)

    def _idle_s(self, *moments: float) -> float:
        return time.monotonic() - max(moments)

    def _stall(self, who: str, what: str, **facts: str) -> StallError:
        deadline_s = self._rules.deadline_s
        return StallError(
            f"{who} made no progress on {what} for {deadline_s:g} s", seconds=deadline_s, **facts
        )


def _refusal(worker: Worker, origin: Origin) -> WTransferError | None:
    return worker.refusal if worker.epoch == origin.epoch else None
