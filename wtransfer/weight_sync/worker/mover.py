"""The thread on which a session calls an engine, so that the model's thread never waits for one."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)


class Task(NamedTuple):
    """Something to run, and whom to tell."""

    call: Callable[[], None]
    """Should not raise: an error is only logged."""
    done: threading.Event
    """Set when it has run."""


class MoverThread:
    """One daemon thread that runs what is submitted, in order.

    A thread cannot be killed. One that hangs in foreign code is abandoned: it gets nothing more to
    do, ends when that code returns, and dies with the process at the latest.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def runs_here(self) -> bool:
        """Return whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def submit(self, call: Callable[[], None]) -> threading.Event:
        """Run `call` after those submitted before; its errors are only logged."""
        task = Task(call, threading.Event())
        self._tasks.put(task)
        return task.done

    def resubmit(self, task: Task) -> None:
        """Take over a task that another thread did not get to."""
        self._tasks.put(task)

    def abandon(self) -> list[Task]:
        """Give the thread up, which hangs in its present task; return the tasks behind it."""
        waiting = []
        with contextlib.suppress(queue.Empty):
            # Safe against the thread itself: each entry is taken by one of us.
            while (task := self._tasks.get_nowait()) is not None:
                waiting.append(task)
        self.stop()
        return waiting

    def stop(self) -> None:
        """Let the thread end after what was submitted."""
        self._tasks.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, for at most `timeout_s` seconds."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task.call()
            except BaseException:
                # It should not have; but whoever waits for it, or comes after it, must not hang.
                logger.exception("%s: a task failed; the thread goes on", self._thread.name)
            finally:
                task.done.set()
            # A closure may hold staged tensors: let go of it before the next wait.
            del task
