"""Threads that copy: few, because memory is soon busy, and one copy of a block needs no more."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.deadline import Deadline

NICENESS = 10
"""Priority of threads for whose work nobody waits: on busy processors they get about a tenth."""


class CopyThreads:
    """Daemon threads that run what is submitted, in the order of submission.

    Args:
        name: Their name.
        number: How many.
        niceness: How far they step back behind the rest of the process.
    """

    def __init__(self, name: str, number: int, niceness: int = 0) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._niceness = niceness
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Run something that does not raise."""
        self._tasks.put(call)

    def stop(self) -> None:
        """Let the threads end after what was submitted."""
        for _ in self._threads:
            self._tasks.put(None)

    def join(self, deadline: Deadline) -> bool:
        """Wait for the threads to end.

        Returns:
            Whether they have. One that hangs is left behind, and dies with the process.
        """
        for thread in self._threads:
            thread.join(deadline.remaining())
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        _step_back(self._niceness)
        while (call := self._tasks.get()) is not None:
            call()
            # A closure may hold a cache: let go of it before the next wait.
            del call


def _step_back(niceness: int) -> None:
    # Only there do threads have priorities of their own, under the numbers of processes.
    if sys.platform == "linux" and niceness:
        thread = threading.get_native_id()
        present = os.getpriority(os.PRIO_PROCESS, thread)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(present, niceness))
