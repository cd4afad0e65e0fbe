"""The conformance kit of eviction policies; the built-in policies pass it.

Subclass it in a test module of your own::

    from wtransfer.testing.policy import PolicyConformance


    class TestMine(PolicyConformance):
        policy = "my_package.policy:MyPolicy"

The policy decides the order of eviction; the kit checks that evicted blocks are candidates, and as
many as were asked for, or none. Tests cannot be overridden; state the tests that the policy may
fail, each with its reason::

        expected_failures = {"test_lookups_do_not_grow_with_capacity": "it looks at all blocks"}
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from wtransfer.specs.policies import policy_class
from wtransfer.testing.kit import ConformanceKit, usually

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from typing_extensions import Self

    from wtransfer.specs.policies import CachePolicy

    MakePolicy = Callable[[int], CachePolicy]

CAPACITY = 16
"""Blocks of a small cache."""
MANY = 4096
"""Blocks of a large one."""
NUM_STEPS = 3000
"""Calls of the long test."""


class _Key(bytes):
    """A key that counts the keys alive, and the look-ups of all keys."""

    alive = 0
    lookups = 0

    def __new__(cls, number: int) -> Self:
        cls.alive += 1
        return super().__new__(cls, number.to_bytes(8, "big"))

    def __del__(self) -> None:
        type(self).alive -= 1

    def __hash__(self) -> int:
        type(self).lookups += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


class PolicyConformance(ConformanceKit):
    """Subclass it with a name that starts with ``Test``, and state the policy.

    Attributes:
        policy: Name or place of the policy, as a user would write it.
        policy_cls: Instead of a name: the class.
    """

    policy: ClassVar[str] = ""
    policy_cls: ClassVar[type[CachePolicy] | None] = None

    @pytest.fixture
    def make(self) -> MakePolicy:
        """Make policies of the class that is tested, for a number of blocks."""
        return self._backend()

    def _backend(self) -> type[CachePolicy]:
        return self.policy_cls or policy_class(self.policy)

    # -- candidates for eviction

    @usually("release() or insert() loses a block, or that an evicted one stays in a list")
    def test_every_candidate_is_evicted_once(self, make: MakePolicy) -> None:
        """Every candidate is evicted once; then none is left."""
        cache = make(CAPACITY)
        keys = _kept(cache, CAPACITY)
        evicted = [_evict(cache, 1)[0] for _ in keys]
        assert sorted(evicted) == sorted(keys)
        _check_refused(cache, 1)

    @usually("reorder() removes blocks and does not add them again")
    def test_reorder_keeps_candidates(self, make: MakePolicy) -> None:
        """Reordered blocks stay candidates, each once."""
        cache = make(CAPACITY)
        keys = _kept(cache, CAPACITY)
        cache.reorder(keys[::-2])
        assert sorted(_evict(cache, CAPACITY)) == sorted(keys)

    @usually("evict() names a block twice, or stops at a bound of its own")
    @pytest.mark.parametrize("count", [1, 2, 5, CAPACITY])
    def test_evict_returns_the_count_asked_for(self, make: MakePolicy, count: int) -> None:
        """Evicted blocks are distinct, and are not evicted again."""
        cache = make(CAPACITY)
        keys = _kept(cache, CAPACITY)
        evicted = _evict(cache, count)
        assert len(set(evicted)) == count, (
            f"evict({count}) returned {len(set(evicted))} different blocks"
        )
        rest = CAPACITY - count
        others = _evict(cache, rest) if rest else []
        assert sorted([*evicted, *others]) == sorted(keys)

    @usually("insert() makes a block a candidate while it is being stored")
    def test_inserted_blocks_are_evicted_only_after_release(self, make: MakePolicy) -> None:
        """Inserted blocks are candidates once they are released."""
        cache = make(CAPACITY)
        (old,) = _kept(cache, 1)
        new = _keys(2)
        cache.insert(new)
        _check_refused(cache, 2)
        assert _evict(cache, 1) == [old]
        cache.release(new)
        assert sorted(_evict(cache, 2)) == sorted(new)

    @usually("pin() does not take a block out of the order, or release() does not put it back")
    def test_pinned_blocks_are_evicted_only_after_release(self, make: MakePolicy) -> None:
        """Pinned blocks are candidates again once they are released, however often."""
        cache = make(CAPACITY)
        keys = _kept(cache, 3)
        for _ in range(3):
            cache.pin(keys[:2])
            _check_refused(cache, 2)
            cache.release(keys[:2])
        cache.pin(keys[:2])
        assert _evict(cache, 1) == [keys[2]]
        cache.release(keys[:2])
        assert sorted(_evict(cache, 2)) == sorted(keys[:2])

    @usually("`protected` is not looked at, or that protected blocks are dropped from the order")
    def test_protected_blocks_are_not_evicted(self, make: MakePolicy) -> None:
        """Protected blocks stay, in any position; the next call may evict them."""
        cache = make(CAPACITY)
        keys = _kept(cache, 6)
        protected = {keys[0], keys[3], keys[5]}
        _check_refused(cache, 4, protected)
        assert set(_evict(cache, 3, protected)) == set(keys) - protected
        assert set(_evict(cache, 3)) == protected

    @usually("touch() adds a block and leaves the former entry")
    def test_touch_keeps_candidates(self, make: MakePolicy) -> None:
        """Touched blocks stay candidates, each once."""
        cache = make(CAPACITY)
        keys = _kept(cache, 4)
        for _ in range(3):
            cache.touch(keys[1:3])
            cache.touch(keys[::-1])
        assert sorted(_evict(cache, 4)) == sorted(keys)
        _check_refused(cache, 1)

    @usually("remove() looks in one of the policy's lists only")
    def test_removed_blocks_are_not_evicted(self, make: MakePolicy) -> None:
        """Removed blocks stay out: candidates, blocks being stored and blocks being loaded."""
        cache = make(CAPACITY)
        keys = _kept(cache, 4)
        storing = _keys(2)
        cache.insert(storing)
        cache.pin(keys[:1])
        cache.remove([keys[0], keys[1], storing[0]])
        cache.release(storing[1:])
        assert sorted(_evict(cache, 3)) == sorted([keys[2], keys[3], storing[1]])
        _check_refused(cache, 1)

    @usually("a block that is remembered as evicted is not taken up again")
    def test_evicted_and_removed_blocks_may_return(self, make: MakePolicy) -> None:
        """Blocks are candidates again when inserted after eviction, or after removal."""
        cache = make(4)
        keys = _kept(cache, 4)
        for _ in range(4):
            evicted = _evict(cache, 2, incoming=keys[:2])
            cache.insert(evicted)
            cache.release(evicted)
            cache.remove(keys[3:])
            cache.insert(keys[3:])
            cache.release(keys[3:])
        assert sorted(_evict(cache, 4)) == sorted(keys)

    # -- all or none

    @usually("evict() changes its lists before it knows that there are enough candidates")
    def test_refused_eviction_changes_nothing(self, make: MakePolicy) -> None:
        """After a refused eviction, a policy behaves like one without the call."""
        asked, other = make(CAPACITY), make(CAPACITY)
        keys = _keys(CAPACITY)
        coming = _keys(CAPACITY)
        for cache in (asked, other):
            cache.insert(keys)
            cache.release(keys)
            cache.touch(keys[:8])
            gone = _evict(cache, 4, incoming=coming[:4])
            cache.insert(coming[:4])
            cache.release(coming[:4])
            cache.pin(coming[:2])
        for count, protected in ((CAPACITY, ()), (CAPACITY - 2, set(coming[2:3]))):
            # The incoming blocks were evicted before: the policy must not learn from a refusal.
            incoming = [*gone, *coming[4:]][:count]
            assert asked.evict(count, protected, incoming) is None
        for number in range(CAPACITY - 2):
            new = [coming[4 + number % 12]]
            assert asked.evict(1, (), new) == other.evict(1, (), new), (
                "after a refused eviction others are evicted"
            )

    # -- effort and memory

    @usually("a call sorts, copies or scans all blocks")
    def test_lookups_do_not_grow_with_capacity(self, make: MakePolicy) -> None:
        """The effort is counted in look-ups of keys, over many calls of each method."""
        few, many = (_effort(make(capacity), capacity) for capacity in (64, MANY))
        assert many <= 2 * few + 64, f"{few} look-ups with 64 blocks, {many} with {MANY}"

    @usually("evicted keys are remembered for good")
    def test_memory_is_bounded(self, make: MakePolicy) -> None:
        """A policy may remember evicted and removed keys, up to a few times the capacity."""
        # Keys of an earlier test may live until its failure was told.
        own_key: type[_Key] = type("_OwnKey", (_Key,), {"alive": 0})
        cache = make(CAPACITY)
        for first in range(0, 100 * CAPACITY, CAPACITY):
            new: list[Any] = [own_key(number) for number in range(first, first + CAPACITY)]
            if first:
                assert cache.evict(CAPACITY, (), new) is not None
            # Blocks that could not be stored, and blocks that were found damaged.
            other: list[Any] = [own_key(10**6 + n) for n in range(first, first + CAPACITY)]
            cache.insert(other)
            cache.release(other[::2])
            cache.remove(other)
            cache.insert(new)
            cache.release(new)
            cache.touch(new[:3])
            del new, other
        held = own_key.alive
        assert held <= 4 * CAPACITY, f"{held} keys are held, of a cache of {CAPACITY} blocks"

    # -- everything together

    @usually("two of the calls above do not go together; the seed is the test's parameter")
    @pytest.mark.parametrize("seed", range(3))
    def test_random_calls(self, make: MakePolicy, seed: int) -> None:
        """Any order of calls: evicted blocks are candidates, in the right number."""
        numbers = random.Random(seed)  # noqa: S311  # no secret
        cache = make(CAPACITY)
        keys = _keys(3 * CAPACITY)
        candidates: set[Any] = set()
        busy: set[Any] = set()
        num_refused = num_evicted = num_spared = 0
        for _ in range(NUM_STEPS):
            some = _some(numbers, candidates)
            match numbers.randrange(5):
                case 0:
                    cache.touch(some)
                case 1:
                    cache.pin(some)
                    candidates.difference_update(some)
                    busy.update(some)
                case 2:
                    done = _some(numbers, busy)
                    cache.release(done)
                    busy.difference_update(done)
                    candidates.update(done)
                case 3:
                    gone = _some(numbers, candidates | busy)[:1]
                    cache.remove(gone)
                    candidates.difference_update(gone)
                    busy.difference_update(gone)
                case _:
                    absent = [key for key in keys if key not in candidates | busy]
                    new = numbers.sample(absent, numbers.randint(1, 4))
                    missing = len(candidates) + len(busy) + len(new) - CAPACITY
                    if missing > 0:
                        evicted = cache.evict(missing, set(some), new)
                        allowed = candidates - set(some)
                        assert (evicted is None) == (missing > len(allowed))
                        num_refused += evicted is None
                        if evicted is None:
                            continue
                        num_evicted += missing
                        num_spared += bool(busy) and bool(some)
                        assert len(set(evicted)) == len(evicted) == missing
                        assert allowed.issuperset(evicted)
                        candidates.difference_update(evicted)
                    cache.insert(new)
                    busy.update(new)
        assert num_refused, "no eviction was refused"
        assert num_evicted > CAPACITY, "hardly anything was evicted"
        assert num_spared, "nothing was evicted beside pinned and protected blocks"


_numbers = itertools.count(1)


def _keys(count: int) -> list[Any]:
    return [next(_numbers).to_bytes(8, "big") for _ in range(count)]


def _kept(cache: CachePolicy, count: int) -> list[Any]:
    keys = _keys(count)
    cache.insert(keys)
    cache.release(keys)
    return keys


def _check_refused(cache: CachePolicy, count: int, protected: Any = ()) -> None:
    evicted = cache.evict(count, protected, _keys(count))
    assert evicted is None, (
        f"evict({count}) returned {len(evicted)} blocks; there are fewer candidates: return None"
    )


def _evict(
    cache: CachePolicy, count: int, protected: Any = (), incoming: Sequence[Any] | None = None
) -> list[Any]:
    evicted = cache.evict(count, protected, incoming or _keys(count))
    assert evicted is not None, f"{count} candidates, and none was evicted"
    assert len(evicted) == count, f"evict({count}) returned {len(evicted)} blocks"
    return evicted


def _some(numbers: random.Random, keys: set[Any]) -> list[Any]:
    return numbers.sample(sorted(keys), min(len(keys), numbers.randint(0, 3)))


def _effort(cache: Any, capacity: int) -> int:
    """Return the number of look-ups of keys in a hundred rounds of a full cache."""
    numbers = itertools.count()
    kept = [_Key(next(numbers)) for _ in range(capacity)]
    cache.insert(kept)
    cache.release(kept)
    before = _Key.lookups
    for number in range(100):
        new = [_Key(next(numbers))]
        cache.pin(kept[capacity // 2 : capacity // 2 + 1])
        cache.release(kept[capacity // 2 : capacity // 2 + 1])
        cache.touch(kept[capacity // 2 : capacity // 2 + 1])
        cache.reorder(kept[capacity // 2 : capacity // 2 + 1])
        evicted = cache.evict(1, frozenset(kept[:1]), new)
        assert evicted is not None
        cache.insert(new)
        cache.release(new)
        if number % 2:
            cache.remove(new)
            cache.insert(new)
            cache.release(new)
    return _Key.lookups - before
