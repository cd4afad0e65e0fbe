"""Calls that may hang in foreign code, on a thread that can be left behind.

A collective of the trainer's own group cannot be called off from here: that group is not ours to
abort. What can be done is to stop waiting, and to say so.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from typing import TYPE_CHECKING, Any, TypeVar

from wtransfer.deadline import Deadline
from wtransfer.errors import ClosedError, StallError

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class _Task:
    """A call and what came of it."""

    def __init__(self, call: Callable[[], Any], stream: Any) -> None:
        self.call = call
        self.stream = stream
        self.done = threading.Event()
        self.result: Any = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with _on_stream(self.stream):
                self.result = self.call()
        except BaseException as error:
            self.error = error
        finally:
            self.done.set()


class LeavableThread:
    """One daemon thread that makes one call after the other, for callers that wait within bounds.

    While a call that was given up still runs, further ones are refused: collectives that overtake
    each other are worse than none. (`MoverThread` replaces a thread that hangs, since there each
    round begins anew.) Calls use the caller's device and stream.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._left: tuple[threading.Event, str] | None = None
        self._closed = False
        self._closing = threading.Lock()

    def call(self, call: Callable[[], T], what: str, deadline_s: float) -> T:
        """Make a call and wait for it.

        Args:
            call: The call.
            what: What it does, as it shall stand in errors.
            deadline_s: Longest wait, in seconds.

        Raises:
            StallError: It has not returned in time, or an earlier one has not returned yet.
            ClosedError: This was closed before.
        """
        self._check_open(what)
        deadline = Deadline(deadline_s)
        self._check_free(what, deadline)
        task = _Task(call, _present_stream())
        with self._closing:
            self._check_open(what)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._tasks.put(task)
        # Until it has returned: also where an interruption ends the wait. What it returns is not
        # kept for longer than that: it may be a tensor.
        self._left = (task.done, what)
        if not task.done.wait(deadline.remaining()):
            raise StallError(
                f"no progress on {what} within {deadline_s:g} s; the call is left behind, and what "
                "it waits for may be gone",
                seconds=deadline_s,
            )
        self._left = None
        if task.error is not None:
            raise task.error
        result: T = task.result
        return result

    def close(self) -> None:
        """Let the thread end after what it is at."""
        with self._closing:
            self._closed = True
            self._tasks.put(None)

    def _check_open(self, what: str) -> None:
        if self._closed:
            raise ClosedError(f"cannot begin {what}: this was closed")

    def _check_free(self, what: str, deadline: Deadline) -> None:
        if self._left is None:
            return
        done, earlier = self._left
        if not done.wait(deadline.remaining()):
            raise StallError(
                f"cannot begin {what}: {earlier} was given up and has not returned yet",
                seconds=deadline.seconds,
            )
        self._left = None

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()
            # It may hold a tensor: let go of it before the next wait.
            del task


def _present_stream() -> Any:
    """Return the caller's stream on its device; None where there is none."""
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.current_stream()


def _on_stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """Make the caller's stream, and its device, this thread's.

    Each thread begins with the first device and its default stream, which waits for no other: what
    is gathered there would be read by the caller before it is there.
    """
    import torch

    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)
