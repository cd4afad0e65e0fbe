"""The order in which kept blocks give way: those of earlier weights first, then as a policy says.

Blocks that were stored under the same weights are a *generation*, and each has a policy of its own.
When the weights change, a new one begins. Nothing is moved for it, however many blocks there are:
the earlier generations stand in a queue, and whoever needs room takes from its head.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from wtransfer.specs.policies.lru import LRUCachePolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from wtransfer.blocks import OffloadKey
    from wtransfer.specs.policies.interface import CachePolicy

logger = logging.getLogger(__name__)

STORING = -1
"""Number of loads of a block that cannot be loaded yet."""


class Generation:
    """Blocks that were stored under the same weights."""

    __slots__ = ("num_idle", "policy")

    def __init__(self, policy: CachePolicy) -> None:
        self.policy = policy
        """Orders them."""
        self.num_idle = 0
        """How many of them may give way."""


class Block:
    """One block that is kept, or on its way."""

    __slots__ = ("forgotten", "generation", "num_loads", "slot")

    def __init__(self, slot: int, generation: Generation) -> None:
        self.slot = slot
        """Where it is."""
        self.generation = generation
        """Which weights it is of."""
        self.num_loads = STORING
        """How many loads are under way; 0: it is idle and may give way."""
        self.forgotten = False
        """Whether it goes as soon as no job holds it."""


class Generations:
    """All generations of one cache.

    Args:
        policy_cls: Orders the blocks of each. One that raises or names other blocks than it may,
            when blocks have to give way, is replaced: its answers decide whose slots are written
            to.
        capacity: Number of slots.
        blocks: What is kept, as the manager knows it; read only.
    """

    def __init__(
        self,
        policy_cls: type[CachePolicy],
        capacity: int,
        blocks: Mapping[OffloadKey, Block],
    ) -> None:
        self._policy_cls = policy_cls
        self._capacity = capacity
        self._blocks = blocks
        # Earlier ones that have candidates.
        self._queue: OrderedDict[Generation, None] = OrderedDict()
        self._current = self._new()
        self.num_idle = 0
        """How many blocks may give way."""

    def begin(self) -> None:
        """Begin a new generation: whatever there is gives way before it."""
        if self._current.num_idle:
            self._queue[self._current] = None
        self._current = self._new()

    def insert(self, keys: Sequence[OffloadKey]) -> Generation:
        """Take in blocks that are being stored; return their generation."""
        self._current.policy.insert(keys)
        return self._current

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Let blocks be candidates, each in its generation."""
        for generation, some in self._by_generation(keys):
            generation.policy.release(some)
            generation.num_idle += len(some)
            self.num_idle += len(some)
            if generation is not self._current:
                self._queue[generation] = None

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Let candidates be none, and belong to the newest generation: they are asked for there.

        Now, not when they are released: the weights may have changed by then.
        """
        for generation, some in self._by_generation(keys):
            generation.policy.pin(some)
            self._lose(len(some), generation)
            if generation is not self._current:
                self._adopt(some, generation)

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Note that candidates are in use, and let them belong to the newest generation."""
        earlier = [key for key in keys if self._blocks[key].generation is not self._current]
        if earlier:
            self.pin(earlier)
            self.release(earlier)
        self._current.policy.touch(keys)

    def reorder(self, keys: Sequence[OffloadKey]) -> None:
        """Make candidates the ones used last, each in its generation."""
        for generation, some in self._by_generation(keys):
            generation.policy.reorder(some)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget blocks that are no candidates."""
        for generation, some in self._by_generation(keys):
            generation.policy.remove(some)

    def evict(
        self, count: int, protected: AbstractSet[OffloadKey], incoming: Sequence[OffloadKey]
    ) -> list[OffloadKey] | None:
        """Let so many candidates give way, or none.

        Args:
            count: How many.
            protected: Candidates that must stay.
            incoming: The blocks that they give way to.

        Returns:
            Who they are; None where too few may, and then nothing has changed.
        """
        if count > self.num_idle - len(protected):
            return None
        taken: list[tuple[Generation, list[OffloadKey]]] = []
        for generation, share in self._shares(count, protected):
            keys = self._evict_from(generation, share, protected, incoming)
            taken.append((generation, keys))
        for generation, keys in taken:
            self._lose(len(keys), generation)
        return [key for _, keys in taken for key in keys]

    def _evict_from(
        self,
        generation: Generation,
        count: int,
        protected: AbstractSet[OffloadKey],
        incoming: Sequence[OffloadKey],
    ) -> list[OffloadKey]:
        """Ask the policy of one generation, or ours if it has no answer that can be relied on."""
        failure = None
        try:
            keys = generation.policy.evict(count, protected, incoming)
            if keys is not None and self._are_candidates(keys, count, generation, protected):
                return keys
            did = "None" if keys is None else f"{len(keys)} keys, not all of them candidates"
            did = f"returned {did}"
        except Exception as error:  # somebody else's code
            did, failure = f"raised {error!r}", error
        self._replace_policy(generation, count, did, failure)
        keys = generation.policy.evict(count, protected, incoming)
        assert keys is not None
        return keys

    def _shares(
        self, count: int, protected: AbstractSet[OffloadKey]
    ) -> Iterator[tuple[Generation, int]]:
        """Yield from which generation how many give way, the oldest first."""
        staying = Counter(self._blocks[key].generation for key in protected)
        for generation in (*self._queue, self._current) if self._queue else (self._current,):
            share = min(count, generation.num_idle - staying[generation])
            if share > 0:
                yield generation, share
                count -= share
            if not count:
                return

    def _are_candidates(
        self,
        keys: Sequence[OffloadKey],
        count: int,
        generation: Generation,
        protected: AbstractSet[OffloadKey],
    ) -> bool:
        """Whether a policy did what it promises: what it names loses its slot."""
        found = [self._blocks.get(key) for key in keys]
        idle = all(b and b.generation is generation and b.num_loads == 0 for b in found)
        return idle and len(set(keys)) == count == len(keys) and protected.isdisjoint(keys)

    def _replace_policy(
        self, generation: Generation, count: int, did: str, error: Exception | None = None
    ) -> None:
        """Go on with a policy of ours: the one that was chosen has broken its word."""
        if generation.policy.__class__ is self._policy_cls:
            logger.error(
                "The eviction policy %s.%s was asked for %d candidates to give way and %s. "
                "It cannot be relied on: lru takes its place.",
                self._policy_cls.__module__,
                self._policy_cls.__qualname__,
                count,
                did,
                exc_info=error,
            )
        self._policy_cls = LRUCachePolicy
        generation.policy = self._new().policy
        members = [key for key, block in self._blocks.items() if block.generation is generation]
        generation.policy.insert(members)
        generation.policy.release([key for key in members if self._blocks[key].num_loads == 0])

    def _adopt(self, keys: Sequence[OffloadKey], earlier: Generation) -> None:
        """Let pinned blocks belong to the newest generation."""
        earlier.policy.remove(keys)
        self._current.policy.insert(keys)
        for key in keys:
            self._blocks[key].generation = self._current

    def _new(self) -> Generation:
        return Generation(self._policy_cls(self._capacity))

    def _by_generation(
        self, keys: Sequence[OffloadKey]
    ) -> Iterable[tuple[Generation, Sequence[OffloadKey]]]:
        blocks = self._blocks
        generations = {blocks[key].generation for key in keys}
        if len(generations) == 1:
            return [(generations.pop(), keys)]
        found: dict[Generation, list[OffloadKey]] = {}
        for key in keys:
            found.setdefault(blocks[key].generation, []).append(key)
        return found.items()

    def _lose(self, count: int, generation: Generation) -> None:
        generation.num_idle -= count
        self.num_idle -= count
        if not generation.num_idle:
            self._queue.pop(generation, None)
