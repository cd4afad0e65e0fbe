"""Threads that copy: few, because memory is soon busy, and one copy of a block needs no more."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING

from wtransfer.transport.niceness import step_back

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.deadline import Deadline


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
        step_back(self._niceness)
        while (call := self._tasks.get()) is not None:
            call()
            # A closure may hold a cache: let go of it before the next wait.
            del call
