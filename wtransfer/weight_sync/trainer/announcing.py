"""Tell workers of one bucket while the next is filled."""

from __future__ import annotations

import contextvars
from concurrent.futures import Future, ThreadPoolExecutor
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
        self._pool = ThreadPoolExecutor(num_under_way, "wtransfer-announce")
        self._under_way: list[Future[None]] = []

    def announce(self, info: dict[str, Any]) -> None:
        """Announce a bucket, and stop if an announcement has failed already."""
        # With it goes the round: an announcement that is late must not reach the next one.
        context = contextvars.copy_context()
        self._under_way.append(self._pool.submit(context.run, self._tell, info))
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
        self._pool.shutdown(wait=kind is None, cancel_futures=kind is not None)
        if kind is None:
            self.check()
