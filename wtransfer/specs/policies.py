"""Eviction of kept blocks when room is needed: the contract of a policy, ``lru``, ``arc``.

A policy knows keys and nothing else: neither slots nor bytes. The manager calls it, on one thread,
and every key passes through it in this order::

    insert -> release -> [touch]* -> [pin -> release]* -> evict, or remove at any point

A block is a *candidate* from `release` to `pin`: only candidates may be evicted. Lists of keys are
in the order of their use, the one used last at the end; the manager orders them so that the head of
a sequence counts as used after its tail, for a tail is worth nothing without its head.

Users choose a policy by name, ``lru`` or ``arc``, or by place, ``my_package.policy:MyPolicy``.

Blocks of earlier weights are evicted before those of the present ones, whatever the policy:
`EvictionOrder` keeps one policy for each *cohort*, the blocks between two changes of the weights.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from wtransfer.errors import EvictionPolicyError, OffloadingOptionError

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    from wtransfer.kv.keys import OffloadKey


class CachePolicy(ABC):
    """Orders the blocks of one cache. A method's cost must not grow with their number.

    Args:
        capacity: Most blocks that are kept at a time.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        """Most blocks that are kept at a time."""

    @abstractmethod
    def insert(self, keys: Sequence[OffloadKey]) -> None:
        """Add blocks that are being stored; they are no candidates until `release`.

        Where room had to be made for them, `evict` was called right before.
        """

    @abstractmethod
    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Make inserted or pinned blocks candidates."""

    @abstractmethod
    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Take candidates out until `release`: they are being loaded, which is a use."""

    @abstractmethod
    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Record a use of candidates."""

    def reorder(self, keys: Sequence[OffloadKey]) -> None:
        """Make candidates the ones used last, the last of `keys` last of all.

        Reordering does not count as a use: blocks of one request, stored over several steps, get
        the order of their places in it. A policy that counts uses has a method of its own for this.
        """
        self.touch(keys)

    @abstractmethod
    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget blocks, candidates or not, that are gone for another reason than `evict`."""

    @abstractmethod
    def evict(
        self, count: int, protected: Collection[OffloadKey], incoming: Sequence[OffloadKey]
    ) -> list[OffloadKey] | None:
        """Choose candidates and forget them: exactly `count`, or none at all.

        A policy that names other keys, or another number, fails the store with
        `EvictionPolicyError`: its answer decides whose slots are written to.

        Args:
            count: Number of candidates to evict, at least one.
            protected: Candidates that must stay. Looking one up takes constant time.
            incoming: The blocks that will be inserted next, at least `count`. A policy may learn
                from them that it evicted one too early.

        Returns:
            The evicted keys; None if fewer candidates than `count` are unprotected, and then
            nothing has changed.
        """


class LRUCachePolicy(CachePolicy):
    """Evicts the blocks unused for longest; a pinned block has no place in the order."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        # No plain dict: finding its first entry takes longer with every entry deleted before it.
        self._order: OrderedDict[OffloadKey, None] = OrderedDict()

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        """Do nothing: blocks enter the order when they become candidates."""

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
        incoming: Sequence[OffloadKey],  # noqa: ARG002  # of no account here
    ) -> list[OffloadKey] | None:
        """Evict the candidates unused for longest."""
        evicted = list(islice((key for key in self._order if key not in protected), count))
        if len(evicted) < count:
            return None
        for key in evicted:
            del self._order[key]
        return evicted


class _ARCList:
    """Blocks used once, or more often: candidates in order, blocks in flight, evicted keys."""

    def __init__(self) -> None:
        self.order: OrderedDict[OffloadKey, None] = OrderedDict()
        self.in_flight: set[OffloadKey] = set()
        self.ghosts: OrderedDict[OffloadKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.order) + len(self.in_flight)

    def first(self, count: int, protected: Collection[OffloadKey]) -> list[OffloadKey]:
        return list(islice((key for key in self.order if key not in protected), count))

    def evict(self, key: OffloadKey) -> OffloadKey:
        del self.order[key]
        self.ghosts[key] = None
        return key

    def drop_ghosts(self, count: int) -> None:
        for _ in range(min(count, len(self.ghosts))):
            self.ghosts.popitem(last=False)


class ARCCachePolicy(CachePolicy):
    """Balances blocks used lately against blocks used often, and adapts that balance.

    Blocks used once since they came are *recent*, others *frequent*. Evicted keys of either kind
    are remembered for a while, as ghosts. Where a ghost comes back, its kind had too little room,
    and gets more.

    Source: Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003; T1
    and T2 there are `recent` and `frequent` here, B1 and B2 their ghosts, p the target. Different
    here: a block in flight cannot be evicted, so the other kind is where one has no candidate
    left; and slots may be empty, so the number of ghosts is bounded by twice the capacity less the
    blocks kept.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._recent = _ARCList()
        self._frequent = _ARCList()
        self.target = 0.0
        """Wanted number of blocks used once."""
        # Ghosts that evict() has learned from already; they are frequent when they are inserted.
        self._returned: set[OffloadKey] = set()

    @property
    def num_ghosts(self) -> int:
        """Number of evicted keys that are remembered."""
        return len(self._recent.ghosts) + len(self._frequent.ghosts)

    def insert(self, keys: Sequence[OffloadKey]) -> None:
        """Add blocks: as frequent where they are remembered, else as recent."""
        recent, frequent = self._recent, self._frequent
        for key in keys:
            returned = self._learn(key) is not None or key in self._returned
            (frequent if returned else recent).in_flight.add(key)
        self._returned.clear()
        # No more ghosts than the published directory holds.
        recent.drop_ghosts(len(recent) + len(recent.ghosts) - self.capacity)
        frequent.drop_ghosts(len(recent) + len(frequent) + self.num_ghosts - 2 * self.capacity)

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Make blocks the ones used last of their kind."""
        recent, frequent = self._recent, self._frequent
        for key in keys:
            kind = frequent if key in frequent.in_flight else recent
            kind.in_flight.remove(key)
            kind.order[key] = None

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Make candidates frequent, and take them out of the order."""
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
        """Forget blocks, and keep no ghost of them."""
        for key in keys:
            for kind in (self._recent, self._frequent):
                kind.in_flight.discard(key)
                kind.order.pop(key, None)

    def evict(
        self, count: int, protected: Collection[OffloadKey], incoming: Sequence[OffloadKey]
    ) -> list[OffloadKey] | None:
        """Evict from the kind that has more than its share, block by block."""
        recent = self._recent.first(count, protected)
        frequent = self._frequent.first(count, protected)
        if len(recent) + len(frequent) < count:
            return None
        recent.reverse()
        frequent.reverse()
        # The first incoming blocks find room; each of the others replaces a block.
        num_recent = len(self._recent) + sum(self._learn(key) is None for key in incoming[:-count])
        evicted = []
        for key in incoming[-count:]:
            returned = self._learn(key)
            at_target = returned is self._frequent and num_recent == self.target
            if recent and (num_recent > self.target or at_target or not frequent):
                evicted.append(self._recent.evict(recent.pop()))
                num_recent -= 1
            else:
                evicted.append(self._frequent.evict(frequent.pop()))
            num_recent += returned is None
        return evicted

    def _learn(self, key: OffloadKey) -> _ARCList | None:
        """Give more room to the kind that a ghost was of; return that kind, None for no ghost."""
        recent, frequent = self._recent.ghosts, self._frequent.ghosts
        if key in recent:
            self.target = min(self.capacity, self.target + max(len(frequent) / len(recent), 1.0))
            kind = self._recent
        elif key in frequent:
            self.target = max(0.0, self.target - max(len(recent) / len(frequent), 1.0))
            kind = self._frequent
        else:
            return None
        del kind.ghosts[key]
        self._returned.add(key)
        return kind


# -- by name ------------------------------------------------------------------------------------

POLICIES: dict[str, type[CachePolicy]] = {"lru": LRUCachePolicy, "arc": ARCCachePolicy}
"""The built-in policies by name."""


def policy_class(name: str) -> type[CachePolicy]:
    """Return the class that an option ``eviction_policy`` names.

    Args:
        name: ``lru``, ``arc``, or the place of another class, ``module:Class``.

    Raises:
        OffloadingOptionError: There is no such class, or it is no policy.
    """
    if name in POLICIES:
        return POLICIES[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        close = difflib.get_close_matches(name.lower(), POLICIES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise OffloadingOptionError(
            f"Unknown eviction policy {name!r}; expected one of {sorted(POLICIES)}, or "
            f"'module:Class'.{hint}"
        )
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise OffloadingOptionError(
            f"The eviction policy {name!r} cannot be loaded: {type(error).__name__}: {error}."
        ) from error
    if not (isinstance(found, type) and issubclass(found, CachePolicy)):
        raise OffloadingOptionError(
            f"The eviction policy {name!r} is {found!r}; expected a subclass of "
            f"{CachePolicy.__module__}.{CachePolicy.__qualname__}."
        )
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise OffloadingOptionError(
            f"The eviction policy {name!r} has abstract methods left: {missing}."
        )
    return found


# -- blocks of several weights --------------------------------------------------------------------

STORING = -1
"""`Block.num_loads` of a block that cannot be loaded yet."""


@dataclass(slots=True, eq=False)
class Cohort:
    """Blocks between two changes of the weights, and the policy that orders them."""

    policy: CachePolicy
    num_idle: int = 0
    """Number of the blocks that are candidates."""


@dataclass(slots=True, eq=False)
class Block:
    """One block that is kept or being stored."""

    slot: int
    cohort: Cohort
    num_loads: int = STORING
    """Number of loads under way; 0: the block is idle, a candidate."""
    forgotten: bool = False
    """True if the block is removed as soon as no job holds it."""


class EvictionOrder:
    """The order in which the blocks of one cache are evicted: earlier cohorts first.

    Nothing is moved when the weights change, however many blocks there are: earlier cohorts
    stand in a queue, and room is made from its head.

    Args:
        policy_cls: Orders the blocks of each cohort.
        capacity: Number of slots.
        blocks: The manager's blocks; only read here.
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
        # Earlier cohorts that have candidates.
        self._queue: OrderedDict[Cohort, None] = OrderedDict()
        self._current = Cohort(policy_cls(capacity))
        self.num_idle = 0
        """Number of candidates of all cohorts."""

    def begin_cohort(self) -> None:
        """Evict all present blocks before those that are inserted from now on."""
        if self._current.num_idle:
            self._queue[self._current] = None
        self._current = Cohort(self._policy_cls(self._capacity))

    def insert(self, keys: Sequence[OffloadKey]) -> Cohort:
        """Add blocks that are being stored; return their cohort."""
        self._current.policy.insert(keys)
        return self._current

    def release(self, keys: Sequence[OffloadKey]) -> None:
        """Make blocks candidates, each in its cohort."""
        for cohort, own in self._by_cohort(keys):
            cohort.policy.release(own)
            cohort.num_idle += len(own)
            self.num_idle += len(own)
            if cohort is not self._current:
                self._queue[cohort] = None

    def pin(self, keys: Sequence[OffloadKey]) -> None:
        """Take candidates out, and move them to the present cohort, in which they are used.

        Moved now, not when they are released: the weights may have changed by then.
        """
        for cohort, own in self._by_cohort(keys):
            cohort.policy.pin(own)
            self._subtract_idle(cohort, len(own))
            if cohort is not self._current:
                cohort.policy.remove(own)
                self._current.policy.insert(own)
                for key in own:
                    self._blocks[key].cohort = self._current

    def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Record a use of candidates, and move them to the present cohort."""
        earlier = [key for key in keys if self._blocks[key].cohort is not self._current]
        if earlier:
            self.pin(earlier)
            self.release(earlier)
        self._current.policy.touch(keys)

    def reorder(self, keys: Sequence[OffloadKey]) -> None:
        """Make candidates the ones used last, each in its cohort."""
        for cohort, own in self._by_cohort(keys):
            cohort.policy.reorder(own)

    def remove(self, keys: Sequence[OffloadKey]) -> None:
        """Forget blocks that are no candidates."""
        for cohort, own in self._by_cohort(keys):
            cohort.policy.remove(own)

    def evict(
        self, count: int, protected: AbstractSet[OffloadKey], incoming: Sequence[OffloadKey]
    ) -> list[OffloadKey] | None:
        """Evict candidates: exactly `count`, or none.

        Args:
            count: Number of candidates.
            protected: Candidates that must stay.
            incoming: The blocks that room is made for.

        Returns:
            The evicted keys; None where there are too few candidates, and then nothing has changed.

        Raises:
            EvictionPolicyError: A policy raised, or named other blocks than it may; nothing is
                evicted then.
        """
        if count > self.num_idle - len(protected):
            return None
        evicted: list[tuple[Cohort, list[OffloadKey]]] = []
        try:
            for cohort, share in self._shares(count, protected):
                evicted.append((cohort, self._evict_from(cohort, share, protected, incoming)))
        except EvictionPolicyError:
            # Their slots are not given away, so these blocks are candidates as before.
            for cohort, keys in evicted:
                cohort.policy.insert(keys)
                cohort.policy.release(keys)
            raise
        for cohort, keys in evicted:
            self._subtract_idle(cohort, len(keys))
        return [key for _, keys in evicted for key in keys]

    def _shares(
        self, count: int, protected: AbstractSet[OffloadKey]
    ) -> Iterator[tuple[Cohort, int]]:
        """Yield how many blocks are evicted from which cohort, the oldest first."""
        staying = Counter(self._blocks[key].cohort for key in protected)
        for cohort in (*self._queue, self._current):
            share = min(count, cohort.num_idle - staying[cohort])
            if share > 0:
                yield cohort, share
                count -= share
            if not count:
                return

    def _evict_from(
        self,
        cohort: Cohort,
        count: int,
        protected: AbstractSet[OffloadKey],
        incoming: Sequence[OffloadKey],
    ) -> list[OffloadKey]:
        """Ask the policy of a cohort, and check its answer: the named blocks lose their slots."""
        try:
            keys = cohort.policy.evict(count, protected, incoming)
        except Exception as error:
            raise self._failure(count, f"raised {error!r}") from error
        blocks = [self._blocks.get(key) for key in keys or ()]
        if (
            keys is not None
            and len(set(keys)) == count == len(keys)
            and protected.isdisjoint(keys)
            and all(block and block.cohort is cohort and not block.num_loads for block in blocks)
        ):
            return keys
        named = "None" if keys is None else f"{len(keys)} keys, not all of them candidates"
        raise self._failure(count, f"returned {named}")

    def _failure(self, count: int, what: str) -> EvictionPolicyError:
        policy_cls = self._policy_cls
        return EvictionPolicyError(
            f"The eviction policy {policy_cls.__module__}.{policy_cls.__qualname__} was asked for "
            f"{count} candidates and {what}; nothing was evicted. Test the policy with "
            "wtransfer.testing.policy.PolicyConformance, or choose another eviction_policy."
        )

    def _by_cohort(
        self, keys: Sequence[OffloadKey]
    ) -> Iterable[tuple[Cohort, Sequence[OffloadKey]]]:
        found: dict[Cohort, list[OffloadKey]] = {}
        for key in keys:
            found.setdefault(self._blocks[key].cohort, []).append(key)
        return found.items()

    def _subtract_idle(self, cohort: Cohort, count: int) -> None:
        cohort.num_idle -= count
        self.num_idle -= count
        if not cohort.num_idle:
            self._queue.pop(cohort, None)
