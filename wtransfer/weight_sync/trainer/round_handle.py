"""The caller's handle of a round: its progress, its end, its report. It decides nothing."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from wtransfer.calls import INTERRUPT_GRACE_S, check_process
from wtransfer.deadline import checked_timeout
from wtransfer.errors import RoundBusyError, StallError

if TYPE_CHECKING:
    from wtransfer.weight_sync.report import Report
    from wtransfer.weight_sync.trainer.coordinator import Coordinator


class Round:
    """A round under way: wait for it with `packed` and `result`, end it with `abort`.

    Args:
        coordinator: Takes the steps of the round.
    """

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._changed = coordinator.changed

    @property
    def version(self) -> str:
        """Label of the update."""
        return self._coordinator.version

    @property
    def round_id(self) -> str:
        """Identity of the round, as in reports, errors, hooks and logs."""
        return self._coordinator.round_id

    @property
    def phase(self) -> str:
        """``init``, ``plan``, ``transfer``, ``prepare``, ``commit`` or ``over``."""
        return self._coordinator.phase

    @property
    def nbytes(self) -> int:
        """Bytes of the update; 0 until it is planned."""
        return self._coordinator.nbytes

    @property
    def committing(self) -> bool:
        """True if commits have been sent: from here the round only goes forward."""
        return self._coordinator.committing

    @property
    def done(self) -> bool:
        """True if the round is over."""
        return self._coordinator.done

    @property
    def failed(self) -> bool:
        """True if the round was ended before its commit."""
        return self._coordinator.failed

    def progress(self) -> dict[str, int]:
        """Return the bytes that each worker of the round has staged, by its name.

        They are those of its last message. It sends one at most every 0.1 s, as it stages, and one
        when it has all: a worker whose trainer pauses may have staged more.
        """
        return self._coordinator.progress()

    @property
    def host_by_worker(self) -> dict[str, str]:
        """Host as the user named it, by the worker's name; of workers that hosts let join."""
        return self._coordinator.host_by_worker

    def packed(self, timeout_s: float | None = None) -> None:
        """Wait until the trainer may change its weights again.

        Raises:
            WTransferError: The round failed before that; the trainer may go on as well.
            StallError: `timeout_s` seconds have passed; None: no limit.
            ValueError: `timeout_s` is neither None nor a number of at least 0.
        """
        timeout_s = checked_timeout(timeout_s, endless=True)
        self._check_caller("packed")
        round_ = self._coordinator

        def over() -> bool:
            return round_.packed_s is not None or round_.done

        if not self._changed.wait_for(over, timeout_s):
            raise StallError(f"not packed within {timeout_s} s", round_id=round_.round_id)
        if round_.packed_s is None and round_.failure is not None:
            raise round_.failure.with_traceback(None)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the round is over, whatever has become of it; an interrupt aborts it.

        Args:
            timeout_s: Longest wait, in seconds; None: no limit.

        Returns:
            True if it is over.

        Raises:
            ValueError: `timeout_s` is neither None nor a number of at least 0.
        """
        timeout_s = checked_timeout(timeout_s, endless=True)
        self._check_caller("wait")
        return self._ends_within(timeout_s)

    def result(self, timeout_s: float | None = None) -> Report:
        """Wait for the end and return the report.

        Raises:
            WTransferError: The round was aborted; every worker is on its old version.
            CommitError: No worker holds the version after the commit; the error's `report` says
                why, worker by worker. Or the publisher itself failed then, and there is no report.
            StallError: `timeout_s` seconds have passed; None: no limit. The round goes on.
            ValueError: `timeout_s` is neither None nor a number of at least 0.
        """
        timeout_s = checked_timeout(timeout_s, endless=True)
        self._check_caller("result")
        round_ = self._coordinator
        if not self._ends_within(timeout_s):
            raise StallError(f"the round has not ended in {timeout_s} s", round_id=round_.round_id)
        if round_.failure is not None:
            # Without traceback: it would grow with every call, and keep the callers' variables.
            raise round_.failure.with_traceback(None)
        assert round_.report is not None
        return round_.report

    def abort(self, reason: str = "aborted by the caller") -> None:
        """End the round before its commit. Later, or a second time, do nothing."""
        self._coordinator.abort(reason)

    def _ends_within(self, timeout_s: float | None) -> bool:
        round_ = self._coordinator
        try:
            return self._changed.wait_for(lambda: round_.done, timeout_s)
        except BaseException as interruption:
            round_.abort(f"interrupted by {type(interruption).__name__}")
            self._changed.wait_for(lambda: round_.done, INTERRUPT_GRACE_S)
            raise

    def _check_caller(self, method: str) -> None:
        round_ = self._coordinator
        check_process(round_.pid, "Round")
        if round_.runs_on(threading.current_thread()):
            raise RoundBusyError(
                f"{method}() was called by an observer on the round's own thread, which would wait "
                "for itself; call it from another thread",
                round_id=round_.round_id,
                version=round_.version,
                phase=round_.phase,
            )
