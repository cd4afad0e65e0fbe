"""Tell workers of one bucket while the next is filled."""

from __future__ import annotations

import contextvars
import queue
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self


class Announcer:
    """Announces buckets on threads of its own, so that worker and trainer overlap.

    A context manager: leaving it waits for every announcement, and raises what one has failed with.
    Leaving it on an error waits for none, for workers may be waiting for what will not come now.

    Args:
        tell: Announces one bucket; returns when every worker has received it.
        num_under_way: Announcements that workers may have in their hands.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None], num_under_way: int = 1) -> None:
        self._tell = tell
        self._waiting: queue.SimpleQueue[tuple[Future[None], contextvars.Context, Any] | None]
        self._waiting = queue.SimpleQueue()
        self._under_way: list[Future[None]] = []
        # Daemons, not a pool: the interpreter joins a pool's threads before anything is closed at
        # exit, so a trainer that ends would wait for workers that stall.
        self._threads = [
            threading.Thread(target=self._run, name="wtransfer-announce", daemon=True)
            for _ in range(num_under_way)
        ]
        for thread in self._threads:
            thread.start()

    def announce(self, info: dict[str, Any]) -> None:
        """Announce a bucket, and stop if an announcement has failed already."""
        # With it goes the round: an announcement that is late must not reach the next one.
        context = contextvars.copy_context()
        future: Future[None] = Future()
        self._under_way.append(future)
        self._waiting.put((future, context, info))
        self.check()

    def wait(self) -> None:
        """Wait for every announcement, and raise what one has failed with."""
        for each in self._under_way:
            each.result()

    def check(self) -> None:
        """Raise what an announcement has failed with, if one has."""
        done = [each for each in self._under_way if each.done()]
        self._under_way = [each for each in self._under_way if each not in done]
        for each in done:
            each.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            for each in self._under_way:
                each.cancel()
            for _thread in self._threads:
                self._waiting.put(None)

    def _run(self) -> None:
        while (task := self._waiting.get()) is not None:
            future, context, info = task
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(context.run(self._tell, info))
                except BaseException as error:
                    future.set_exception(error)
            del task, future, context, info
