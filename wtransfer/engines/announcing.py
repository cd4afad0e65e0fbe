"""Tell workers of one bucket while the next is filled."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from typing_extensions import Self

    from wtransfer.engines.interface import WeightSyncClient


class Announcer:
    """Announces buckets on threads of its own, so that worker and trainer overlap.

    A context manager: leaving it waits for every announcement, and raises what one has failed with.
    Leaving it on an error waits for none, for workers may be waiting for what will not come now.

    Args:
        client: Reaches the workers.
        num_under_way: Announcements that workers may have in their hands.
        prepare: Called with each bucket, on the same thread, before workers hear of it.
    """

    def __init__(
        self,
        client: WeightSyncClient,
        num_under_way: int = 1,
        prepare: Callable[[dict[str, Any]], object] | None = None,
    ) -> None:
        # An announcement that is late, as its round has failed, must not reach the next one.
        bind = getattr(client, "of_this_round", lambda: client)
        self._client: WeightSyncClient = bind()
        self._prepare = prepare
        self._pool = ThreadPoolExecutor(num_under_way, "wtransfer-announce")
        self._under_way: list[Future[None]] = []

    def announce(self, info: dict[str, Any]) -> None:
        """Announce a bucket, and stop if an announcement has failed already."""
        self._under_way.append(self._pool.submit(self._tell, info))
        self.check()

    def _tell(self, info: dict[str, Any]) -> None:
        if self._prepare is not None:
            self._prepare(info)
        self._client.update_weights(info)

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
