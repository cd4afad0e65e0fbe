"""The waits of a round: each ends on an answer, a fault, a lost peer, an abort, or the deadline."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from wtransfer.errors import StallError, WTransferError

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from wtransfer.engines.origin import Origin
    from wtransfer.engines.roster import Exchange, Worker
    from wtransfer.engines.rules import Rules
    from wtransfer.engines.seating import Seat, Seating
    from wtransfer.engines.sender import Running, Sender

TICK_S = 0.25
"""Longest wait between two looks at the deadline."""


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
        self._changed = changed
        self._seating = seating
        self._sender = sender
        self._origin = origin
        self._rules = rules
        self._num_waiting = 0

    def until(self, done: Callable[[Exchange], bool], what: str) -> None:
        """Wait until every worker of the round has done something; raise what ends the round."""
        with self._changed:
            self._num_waiting += 1
            try:
                self._wait(done, what)
            finally:
                self._num_waiting -= 1

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
        for seat in self._seating.live():
            for exchange in seat.exchanges:
                error = exchange.error or _refusal(exchange.worker, self._origin)
                if error is not None and not self._drops(seat, exchange):
                    error.add_facts(worker=exchange.worker.name)
                    raise error

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
        if len(self._seating.live()) <= self._rules.min_workers:
            return False
        if not seat.dropped:
            self._seating.drop(seat, f"{exchange.worker.name} was lost")
        return True

    def _check_stall(self, waiting: list[Exchange], begun: float, what: str) -> None:
        """Call a worker stalled that neither moves nor is still being fed by a moving trainer."""
        fed_at = max(begun, self._sender.source.moved_at)
        for exchange in waiting:
            if self._idle_s(exchange.moved_at, fed_at) > self._rules.deadline_s:
                exchange.lost = True
                exchange.error = self._stall(
                    exchange.worker.name, what, worker=exchange.worker.name
                )
                self.check()

    def _check_engine(self, begun: float, what: str) -> None:
        moved = max((each.moved_at for each in self._seating.exchanges()), default=begun)
        if self._idle_s(begun, moved, self._sender.source.moved_at) > self._rules.deadline_s:
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
    return worker.refusal if worker.generation == origin.generation else None
