"""Brings late joiners, and workers that had to go back, to the current version between rounds."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, ClassVar

from wtransfer.errors import WTransferError

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.weight_sync.report import Report
    from wtransfer.weight_sync.trainer.roster import Worker

logger = logging.getLogger(__name__)


class CatchUp:
    """One thread that serves instances which are behind, one after the other.

    Args:
        find: Returns the next instance that is behind and can be served now, or None.
        serve: Sends it the current version; returns None if something else came first, or in
            between.
    """

    MAX_ATTEMPTS: ClassVar[int] = 3
    """Attempts in a row before a worker stays behind until the next round."""
    RETRY_S: ClassVar[float] = 0.2
    """Wait after a failure, times the number of failures, in seconds."""

    def __init__(
        self,
        find: Callable[[], tuple[str, list[Worker]] | None],
        serve: Callable[[str, list[Worker]], Report | None],
    ) -> None:
        self._find = find
        self._serve = serve
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="wtransfer-catchup", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Look again: a worker has joined, or a round is over."""
        self._wake.set()

    def close(self) -> None:
        """End the thread; a round that it waits for must be aborted by the caller."""
        self._closed.set()
        self._wake.set()
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait()
            # Cleared before looking: what happens from here on sets it again.
            self._wake.clear()
            while not self._closed.is_set() and (found := self._find()) is not None:
                self._attempt(*found)

    def _attempt(self, instance: str, ranks: list[Worker]) -> None:
        try:
            report = self._serve(instance, ranks)
        except WTransferError as error:
            logger.warning("catch-up of %s failed: %s", instance, error)
            self._failed(ranks)
            return
        if report is None:
            return
        if all(each.outcome == "committed" for each in report.workers if each.instance == instance):
            for worker in ranks:
                worker.num_failed = 0
        else:
            self._failed(ranks)

    def _failed(self, ranks: list[Worker]) -> None:
        for worker in ranks:
            worker.num_failed += 1
        self._closed.wait(self.RETRY_S * max(worker.num_failed for worker in ranks))
