"""Calls on other threads: announcements beside a transfer, and errors that keep no tensors."""

from __future__ import annotations

import contextlib
import contextvars
import threading
import traceback
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from typing_extensions import Self


class Announcer:
    """Announces buckets on daemon threads, so that trainer and workers overlap.

    A context manager: leaving it waits for every announcement and raises the first error. Leaving
    it on an error waits for none: workers may be waiting for bytes that will not come now.

    Args:
        tell: Announces one bucket; returns when every worker has received it.
        num_under_way: Announcements under way at a time.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None], num_under_way: int = 1) -> None:
        self._tell = tell
        self._changed = threading.Condition()
        self._queue: deque[tuple[contextvars.Context, dict[str, Any]]] = deque()
        self._num_open = 0
        self._error: BaseException | None = None
        self._ended = False
        self._num_threads = num_under_way

    def announce(self, info: dict[str, Any]) -> None:
        """Queue an announcement; raise if an earlier one has failed.

        The caller's context goes with it: a late announcement cannot reach the next round.
        """
        self.check()
        with self._changed:
            self._queue.append((contextvars.copy_context(), info))
            self._num_open += 1
            self._changed.notify()
        if self._num_threads:
            self._num_threads -= 1
            # Daemon: at the interpreter's exit nothing waits for a worker that has stalled.
            threading.Thread(target=self._run, name="wtransfer-announce", daemon=True).start()

    def wait(self) -> None:
        """Wait for every announcement; raise the first error."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_open == 0 or self._error is not None)
        self.check()

    def check(self) -> None:
        """Raise the first error of an announcement, if there is one."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ended)
                if not self._queue:
                    return
                context, info = self._queue.popleft()
            error = None
            try:
                context.run(self._tell, info)
            except BaseException as raised:
                error = raised
            with self._changed:
                self._num_open -= 1
                self._error = self._error or error
                self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            with self._changed:
                self._ended = True
                self._num_open -= len(self._queue)
                self._queue.clear()
                self._changed.notify_all()


def forget_frames(error: BaseException | None) -> None:
    """Clear the frames that an error has passed through, so that keeping it keeps no tensors.

    Frames that still run keep their variables, so call this where none of them matters.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        if error.__traceback__ is not None:
            _clear_callers(error.__traceback__.tb_frame)
        error = error.__cause__ or error.__context__


def _clear_callers(frame: FrameType) -> None:
    # A frame keeps its caller, also after both have returned.
    with contextlib.suppress(RuntimeError):
        while (caller := frame.f_back) is not None:
            frame = caller
            frame.clear()
