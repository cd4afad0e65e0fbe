"""The policy ``arc``: adapts itself between blocks used lately and blocks used often.

Blocks used once since they came are *recent*, others *frequent*. Of either kind, those that gave
way are remembered for a while, as ghosts: keys without bytes. Where one of them comes back, its
kind was given too little room, and gets more.

Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003; T1 and
T2 there are `recent` and `frequent` here, B1 and B2 their ghosts, p the target. What differs: a
block in flight cannot give way, so the other kind does where one has no candidate left; and slots
may be empty, so the number of ghosts is bounded by twice the capacity less the blocks kept.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

from wtransfer.specs.policies.interface import CachePolicy

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from wtransfer.blocks import OffloadKey


class _Kind:
    """Blocks of one kind: the candidates in order, those in flight, and those remembered."""

    def __init__(self) -> None:
        self.order: OrderedDict[OffloadKey, None] = OrderedDict()
        self.in_flight: set[OffloadKey] = set()
        self.ghosts: OrderedDict[OffloadKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.order) + len(self.in_flight)

    def candidates(self, protected: Collection[OffloadKey]) -> Iterator[OffloadKey]:
        if not protected:
            return iter(self.order)
        return (key for key in self.order if key not in protected)

    def forget(self, key: OffloadKey) -> None:
        self.in_flight.discard(key)
        self.order.pop(key, None)

    def give_way(self, key: OffloadKey) -> OffloadKey:
        del self.order[key]
        self.ghosts[key] = None
        return key

    def forget_ghosts(self, count: int) -> None:
        for _ in range(min(count, len(self.ghosts))):
            self.ghosts.popitem(last=False)


class ARCCachePolicy(CachePolicy):
    """Two orders, and a target for how many blocks the first may have."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._recent = _Kind()
        self._frequent = _Kind()
        self._target = 0.0
        # Ghosts that evict() has learned from already; they are frequent when they are inserted.
        self._returned: set[OffloadKey] = set()

    @property
    def target(self) -> float:
        """How many blocks used once there should be."""
        return self._target

    @property
    def num_ghosts(self) -> int:
        """How many keys are remembered of blocks that gave way."""
        return len(self._recent.ghosts) + len(self._frequent.ghosts)

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        """Take in blocks: as frequent where they are remembered, else as recent."""
        for key in keys:
            returned = self._learn(key) is not None or key in self._returned
            (self._frequent if returned else self._recent).in_flight.add(key)
        self._returned.clear()
        self._trim()

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Make blocks the ones used last of their kind."""
        recent, frequent = self._recent, self._frequent
        for key in keys:
            kind = frequent if key in frequent.in_flight else recent
            kind.in_flight.remove(key)
            kind.order[key] = None

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Make blocks frequent, and no candidates."""
        recent, frequent = self._recent.order, self._frequent.order
        for key in keys:
            del (frequent if key in frequent else recent)[key]
        self._frequent.in_flight.update(keys)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Make candidates frequent, and the ones used last."""
        recent, frequent = self._recent.order, self._frequent.order
        for key in keys:
            del (frequent if key in frequent else recent)[key]
            frequent[key] = None

    def reorder(self, keys: Sequence[OffloadKey]) -> None:
        """Make candidates the ones used last of their kind."""
        recent, frequent = self._recent.order, self._frequent.order
        for key in keys:
            (frequent if key in frequent else recent).move_to_end(key)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget blocks, and do not remember them."""
        for key in keys:
            self._recent.forget(key)
            self._frequent.forget(key)

    def evict(
        self, count: int, protected: Collection[OffloadKey], incoming: Sequence[OffloadKey]
    ) -> list[OffloadKey] | None:
        """Let the kind give way that has more than its share, block by block."""
        recent = list(islice(self._recent.candidates(protected), count))
        frequent = list(islice(self._frequent.candidates(protected), count))
        if len(recent) + len(frequent) < count:
            return None
        recent.reverse()
        frequent.reverse()
        # The first ones find room; each of the others replaces a block.
        num_recent = len(self._recent) + sum(self._learn(key) is None for key in incoming[:-count])
        evicted = []
        for coming in incoming[-count:]:
            returned = self._learn(coming)
            at_target = returned is self._frequent and num_recent == self._target
            if recent and (num_recent > self._target or at_target or not frequent):
                evicted.append(self._recent.give_way(recent.pop()))
                num_recent -= 1
            else:
                evicted.append(self._frequent.give_way(frequent.pop()))
            num_recent += returned is None
        return evicted

    def _learn(self, key: OffloadKey) -> _Kind | None:
        """Give more room to the kind that a block was of, if it is remembered; return that kind."""
        recent, frequent = self._recent.ghosts, self._frequent.ghosts
        if key in recent:
            self._target = min(self.capacity, self._target + max(len(frequent) / len(recent), 1.0))
            kind = self._recent
        elif key in frequent:
            self._target = max(0.0, self._target - max(len(recent) / len(frequent), 1.0))
            kind = self._frequent
        else:
            return None
        del kind.ghosts[key]
        self._returned.add(key)
        return kind

    def _trim(self) -> None:
        """Remember no more than the published directory holds."""
        recent, frequent = self._recent, self._frequent
        recent.forget_ghosts(len(recent) + len(recent.ghosts) - self.capacity)
        num_known = len(recent) + len(frequent) + self.num_ghosts
        frequent.forget_ghosts(num_known - 2 * self.capacity)
