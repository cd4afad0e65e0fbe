"""The policy ``lru``: what was not used for longest gives way."""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

from wtransfer.specs.policies.interface import CachePolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from wtransfer.blocks import OffloadKey


class LRUCachePolicy(CachePolicy):
    """Candidates in the order of their last use; a block that is pinned has no place in it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        # No plain dict: finding its first entry takes longer with every entry deleted before it.
        self._order: OrderedDict[OffloadKey, None] = OrderedDict()

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        """Do nothing: blocks get a place when they are candidates."""

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Make blocks the ones used last."""
        for key in keys:
            self._order[key] = None

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Take candidates out of the order."""
        for key in keys:
            del self._order[key]

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Make candidates the ones used last."""
        for key in keys:
            self._order.move_to_end(key)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget blocks."""
        for key in keys:
            self._order.pop(key, None)

    def evict(
        self,
        count: int,
        protected: Collection[OffloadKey],
        incoming: Sequence[OffloadKey],  # noqa: ARG002  # what comes does not matter here
    ) -> list[OffloadKey] | None:
        """Let those give way that were not used for longest."""
        evicted = list(islice((key for key in self._order if key not in protected), count))
        if len(evicted) < count:
            return None
        for key in evicted:
            del self._order[key]
        return evicted
