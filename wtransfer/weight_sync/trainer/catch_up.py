"""How late workers get the current version between rounds, and when a round goes on without one.

A worker is late that has joined since the last commit, has lost its weights, or had to go back to
an older version.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from wtransfer.errors import WTransferError
from wtransfer.weight_sync.trainer.round_handle import Round

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.weight_sync.trainer.coordinator import Coordinator, ProvenUpdate
    from wtransfer.weight_sync.trainer.membership import Membership
    from wtransfer.weight_sync.trainer.workers import Worker

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Attempts in a row before a worker stays behind until the next round."""
RETRY_S = 0.2
"""Wait after a failed attempt, times the number of failures, in seconds."""


class CatchUp:
    """Brings instances that are behind the current version, one after the other, between rounds.

    Args:
        membership: The joined workers, and the publisher's lock.
        min_workers: Fewest instances of a publisher's round.
        current: Returns the update to bring; None while no round may bring it. Called under the
            lock.
        begin: Begins a round that brings an update to some instances. Called under the lock.
    """

    def __init__(
        self,
        membership: Membership,
        min_workers: int,
        current: Callable[[], ProvenUpdate | None],
        begin: Callable[[ProvenUpdate, dict[str, list[Worker]]], Coordinator],
    ) -> None:
        self._membership = membership
        self._lock = self._changed = membership.changed
        self._min_workers = min_workers
        self._current = current
        self._begin = begin
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="wtransfer-catchup", daemon=True)

    def start(self) -> None:
        """Begin, on a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Bring no further instance up to date; called under the lock."""
        self._stopped = True
        self._changed.notify_all()

    def join(self, caller: threading.Thread, timeout_s: float) -> None:
        """Wait for the end of the thread, unless the caller is on it."""
        if self._thread.is_alive() and self._thread is not caller:
            self._thread.join(timeout_s)

    # -- asked by a new round, under the lock

    def taking_part(self) -> dict[str, list[Worker]]:
        """Return the instances of a new round: without workers set aside, if enough remain."""
        joined = self._membership.instances()
        ready = {n: ranks for n, ranks in joined.items() if not any(w.set_aside for w in ranks)}
        return ready if len(ready) >= self._min_workers else joined

    def gives_way(self, resend: Coordinator, *, is_patient: bool) -> bool:
        """Return True if a new round may begin now, beside a round that brings a late worker along.

        Until its commit is sent, such a round is called off: its worker can wait. After that its
        worker is waited for while the new round `is_patient`; then it is set aside, if enough
        others remain. It holds a verified set and has yet to apply it, which takes no trainer; it
        sends an ack whenever it does. Other workers must not wait for a joiner that is slow to
        start.
        """
        late = resend.committing and not is_patient
        if not (late and self._enough_without(resend.members)):
            resend.abort("a new round begins")
            return False
        proven = resend.proven
        for worker in resend.members:
            if proven is None or worker.fingerprint != proven.fingerprint:
                worker.holds(worker.version, worker.fingerprint, "pending")
                worker.set_aside = True
        return True

    def ended(self, resend: Coordinator) -> None:
        """Set those workers aside that have not applied the update by the end of its round."""
        for worker in resend.members:
            worker.set_aside = worker.state == "pending"

    def _enough_without(self, members: frozenset[Worker]) -> bool:
        others = [r for r in self.taking_part().values() if not members.intersection(r)]
        return len(others) >= self._min_workers

    # -- on the thread

    def _run(self) -> None:
        def begun() -> tuple[str, list[Worker], Coordinator | None] | bool:
            if self._stopped or (found := self._next_behind()) is None:
                return self._stopped
            name, ranks, proven = found
            try:
                return name, ranks, self._begin(proven, {name: ranks})
            except WTransferError as error:
                ranks[0].log_once(f"catch-up of {name} could not begin", error)
                return name, ranks, None

        while not isinstance(found := self._changed.wait_for(begun), bool):
            name, ranks, resend = found
            del found
            if resend is not None and self._was_brought(name, ranks, resend):
                continue
            with self._lock:
                for worker in ranks:
                    worker.num_failed += 1
                delay_s = RETRY_S * max(worker.num_failed for worker in ranks)
            self._changed.wait_for(lambda: self._stopped, delay_s)

    def _was_brought(self, name: str, ranks: list[Worker], resend: Coordinator) -> bool:
        """Wait for the end of a round; return True if it committed or was called off."""
        try:
            report = Round(resend).result()
        except WTransferError as error:
            if not resend.called_off:
                ranks[0].log_once(f"catch-up of {name} failed", error)
            return resend.called_off
        own = [each for each in report.workers if each.instance == name]
        return all(each.outcome == "committed" for each in own)

    def _next_behind(self) -> tuple[str, list[Worker], ProvenUpdate] | None:
        """Return an instance that lacks the current version and can be brought up to date now."""
        current = self._current()
        if current is None:
            return None
        for name, ranks in self._membership.instances().items():
            if any(worker.fingerprint != current.fingerprint for worker in ranks) and all(
                worker.state != "pending" and worker.num_failed < MAX_ATTEMPTS for worker in ranks
            ):
                return name, ranks, current
        return None
