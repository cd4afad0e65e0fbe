"""Policies that are broken in one way each. `test_kits.py` runs this file as a test module."""

from wtransfer.specs.policies import ARCCachePolicy, LRUCachePolicy
from wtransfer.testing.policy import PolicyConformance


def broken(caught_by=None, **attributes):
    """Have the kit run with a class that overrides a part of a healthy policy."""

    def make(cls):
        return type(
            cls.__name__,
            (PolicyConformance,),
            {"caught_by": caught_by, "policy_cls": cls, **attributes},
        )

    return make


@broken("test_every_candidate_is_evicted_once", says="1 candidates, and none was evicted")
class TestKeepsLastBlock(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        if len(self._order) == 1:
            return None
        return super().evict(count, protected, incoming)


@broken("test_evict_returns_the_count_asked_for[5]", says="evict(5) returned 4 different blocks")
class TestEvictsTwice(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        evicted = super().evict(count, protected, incoming)
        return evicted and [evicted[0], *evicted[:-1]]


@broken(
    "test_every_candidate_is_evicted_once",
    says="evict(1) returned 0 blocks; there are fewer candidates: return None",
)
class TestEvictsFewer(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        few = min(count, sum(key not in protected for key in self._order))
        return super().evict(few, protected, incoming)


@broken(
    "test_inserted_blocks_are_evicted_only_after_release",
    says="evict(2) returned 2 blocks; there are fewer candidates: return None",
)
class TestReleasesAtInsert(LRUCachePolicy):
    def insert(self, keys):
        self.release(keys)


@broken("test_reorder_keeps_candidates", says="16 candidates, and none was evicted")
class TestPinsAtReorder(LRUCachePolicy):
    def reorder(self, keys):
        self.pin(keys)


@broken(
    "test_pinned_blocks_are_evicted_only_after_release",
    says="evict(2) returned 2 blocks; there are fewer candidates: return None",
)
class TestPinsNothing(LRUCachePolicy):
    def pin(self, keys): ...


@broken("test_pinned_blocks_are_evicted_only_after_release", says="KeyError:")
class TestNeverUnpins(LRUCachePolicy):
    def pin(self, keys):
        super().pin(keys)
        self.pinned = {*getattr(self, "pinned", ()), *keys}

    def release(self, keys):
        super().release([key for key in keys if key not in getattr(self, "pinned", ())])


@broken(
    "test_protected_blocks_are_not_evicted",
    says="evict(4) returned 4 blocks; there are fewer candidates: return None",
    passes=("test_every_candidate_is_evicted_once",),
)
class TestIgnoresProtected(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        return super().evict(count, (), incoming)


@broken(
    "test_protected_blocks_are_not_evicted",
    says="evict(4) returned 4 blocks; there are fewer candidates: return None",
)
class TestProtectsFirstOnly(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        return super().evict(count, set(list(self._order)[:1]) & set(protected), incoming)


@broken(
    "test_touch_keeps_candidates",
    says="evict(1) returned 1 blocks; there are fewer candidates: return None",
)
class TestDuplicatesTouched(LRUCachePolicy):
    def touch(self, keys):
        super().touch(keys)
        self.again = [*getattr(self, "again", ()), *keys]

    def evict(self, count, protected, incoming):
        evicted = super().evict(count, protected, incoming)
        again = getattr(self, "again", [])
        return again[:count] if evicted is None and len(again) >= count else evicted


@broken(
    "test_removed_blocks_are_not_evicted",
    says="evict(1) returned 1 blocks; there are fewer candidates: return None",
)
class TestIgnoresRemovalDuringStore(LRUCachePolicy):
    def insert(self, keys):
        self.storing = {*getattr(self, "storing", ()), *keys}

    def release(self, keys):
        super().release([*keys, *(getattr(self, "storing", set()) - set(keys))])
        self.storing = set()


@broken("test_evicted_and_removed_blocks_may_return", says="2 candidates, and none was evicted")
class TestRefusesReturningBlocks(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        evicted = super().evict(count, protected, incoming)
        self.gone = {*getattr(self, "gone", ()), *(evicted or ())}
        return evicted

    def release(self, keys):
        super().release([key for key in keys if key not in getattr(self, "gone", ())])


@broken("test_refused_eviction_changes_nothing", says="after a refused eviction others are evicted")
class TestEvictsBeforeRefusal(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        evicted = super().evict(count, protected, incoming)
        if evicted is None and self._order:
            self._order.popitem(last=False)
        return evicted


@broken("test_refused_eviction_changes_nothing", says="after a refused eviction others are evicted")
class TestLearnsFromRefusals(ARCCachePolicy):
    def evict(self, count, protected, incoming):
        for key in incoming:
            self._learn(key)
        return super().evict(count, protected, incoming)


@broken(
    "test_lookups_do_not_grow_with_capacity",
    says=" look-ups with 64 blocks, ",
    passes=("test_random_calls[0]",),
)
class TestSortsAtEviction(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        places = {key: place for place, key in enumerate(self._order)}
        found = [key for key in sorted(places, key=places.get) if key not in protected]
        if len(found) < count:
            return None
        for key in found[:count]:
            del self._order[key]
        return found[:count]


@broken(
    "test_memory_is_bounded",
    says=" keys are held, of a cache of 16 blocks",
    passes=("test_random_calls[1]",),
)
class TestRemembersAllKeys(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        self.seen = {*getattr(self, "seen", ()), *incoming}
        return super().evict(count, protected, incoming)


@broken(
    "test_memory_is_bounded",
    says=" keys are held, of a cache of 16 blocks",
    passes=("test_removed_blocks_are_not_evicted",),
)
class TestRemembersRemovedKeys(LRUCachePolicy):
    def remove(self, keys):
        super().remove(keys)
        self.removed = [*getattr(self, "removed", ()), *keys]


@broken(
    "test_lookups_do_not_grow_with_capacity",
    says=" look-ups with 64 blocks, ",
    passes=("test_reorder_keeps_candidates", "test_random_calls[0]"),
)
class TestSortsAtReorder(LRUCachePolicy):
    def reorder(self, keys):
        order = {key: place for place, key in enumerate(self._order)}
        super().reorder([key for key in keys if key in order])


@broken(
    "test_random_calls[1]",
    says="assert ",
    passes=("test_protected_blocks_are_not_evicted", "test_every_candidate_is_evicted_once"),
)
class TestProtectsFewOnly(LRUCachePolicy):
    """Forgets whom it protects after many evictions."""

    num_evicted = 0

    def evict(self, count, protected, incoming):
        self.num_evicted += 1
        protected = protected if self.num_evicted < 100 else ()
        return super().evict(count, protected, incoming)


@broken("test_random_calls[0]", says="KeyError:")
class TestDropsBlocksSometimes(LRUCachePolicy):
    calls = 0

    def release(self, keys):
        self.calls += 1
        super().release(keys if self.calls % 50 else keys[:-1])


@broken(passes=("test_random_calls[0]", "test_refused_eviction_changes_nothing"))
class TestIsFifo(LRUCachePolicy):
    """In the order in which they came; no worse for that."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.birth = {}
        self.births = 0

    def insert(self, keys):
        for key in keys:
            self.births += 1
            self.birth[key] = self.births

    def touch(self, keys): ...
