"""Policies that are broken in one way each. `test_kits.py` runs this file as a test module."""

# ruff: noqa: N801 - classes that stand where the kit expects an attribute

from wtransfer.specs.policies import ARCCachePolicy, LRUCachePolicy
from wtransfer.testing.policy import PolicyConformance


class TestKeepsLastBlock(PolicyConformance):
    caught_by = "test_every_candidate_is_evicted_once"

    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            if len(self._order) == 1:
                return None
            return super().evict(count, protected, incoming)


class TestEvictsTwice(PolicyConformance):
    caught_by = "test_evict_returns_the_count_asked_for[5]"

    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            evicted = super().evict(count, protected, incoming)
            return evicted and [evicted[0], *evicted[:-1]]


class TestEvictsFewer(PolicyConformance):
    caught_by = "test_every_candidate_is_evicted_once"

    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            few = min(count, sum(key not in protected for key in self._order))
            return super().evict(few, protected, incoming)


class TestReleasesAtInsert(PolicyConformance):
    caught_by = "test_inserted_blocks_are_evicted_only_after_release"

    class policy_cls(LRUCachePolicy):
        def insert(self, keys):
            self.release(keys)


class TestPinsAtReorder(PolicyConformance):
    caught_by = "test_reorder_keeps_candidates"

    class policy_cls(LRUCachePolicy):
        def reorder(self, keys):
            self.pin(keys)


class TestPinsNothing(PolicyConformance):
    caught_by = "test_pinned_blocks_are_evicted_only_after_release"

    class policy_cls(LRUCachePolicy):
        def pin(self, keys): ...


class TestNeverUnpins(PolicyConformance):
    caught_by = "test_pinned_blocks_are_evicted_only_after_release"

    class policy_cls(LRUCachePolicy):
        def pin(self, keys):
            super().pin(keys)
            self.pinned = {*getattr(self, "pinned", ()), *keys}

        def release(self, keys):
            super().release([key for key in keys if key not in getattr(self, "pinned", ())])


class TestIgnoresProtected(PolicyConformance):
    caught_by = "test_protected_blocks_are_not_evicted"
    passes = ("test_every_candidate_is_evicted_once",)

    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            return super().evict(count, (), incoming)


class TestProtectsFirstOnly(PolicyConformance):
    caught_by = "test_protected_blocks_are_not_evicted"

    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            return super().evict(count, set(list(self._order)[:1]) & set(protected), incoming)


class TestDuplicatesTouched(PolicyConformance):
    caught_by = "test_touch_keeps_candidates"

    class policy_cls(LRUCachePolicy):
        def touch(self, keys):
            super().touch(keys)
            self.again = [*getattr(self, "again", ()), *keys]

        def evict(self, count, protected, incoming):
            evicted = super().evict(count, protected, incoming)
            again = getattr(self, "again", [])
            return again[:count] if evicted is None and len(again) >= count else evicted


class TestIgnoresRemovalDuringStore(PolicyConformance):
    caught_by = "test_removed_blocks_are_not_evicted"

    class policy_cls(LRUCachePolicy):
        def insert(self, keys):
            self.storing = {*getattr(self, "storing", ()), *keys}

        def release(self, keys):
            super().release([*keys, *(getattr(self, "storing", set()) - set(keys))])
            self.storing = set()


class TestRefusesReturningBlocks(PolicyConformance):
    caught_by = "test_evicted_and_removed_blocks_may_return"

    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            evicted = super().evict(count, protected, incoming)
            self.gone = {*getattr(self, "gone", ()), *(evicted or ())}
            return evicted

        def release(self, keys):
            super().release([key for key in keys if key not in getattr(self, "gone", ())])


class TestEvictsBeforeRefusal(PolicyConformance):
    caught_by = "test_refused_eviction_changes_nothing"

    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            evicted = super().evict(count, protected, incoming)
            if evicted is None and self._order:
                self._order.popitem(last=False)
            return evicted


class TestLearnsFromRefusals(PolicyConformance):
    caught_by = "test_refused_eviction_changes_nothing"

    class policy_cls(ARCCachePolicy):
        def evict(self, count, protected, incoming):
            for key in incoming:
                self._learn(key)
            return super().evict(count, protected, incoming)


class TestSortsAtEviction(PolicyConformance):
    caught_by = "test_lookups_do_not_grow_with_capacity"
    passes = ("test_random_calls[0]",)

    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            places = {key: place for place, key in enumerate(self._order)}
            found = [key for key in sorted(places, key=places.get) if key not in protected]
            if len(found) < count:
                return None
            for key in found[:count]:
                del self._order[key]
            return found[:count]


class TestRemembersAllKeys(PolicyConformance):
    caught_by = "test_memory_is_bounded"
    passes = ("test_random_calls[1]",)

    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            self.seen = {*getattr(self, "seen", ()), *incoming}
            return super().evict(count, protected, incoming)


class TestDropsBlocksSometimes(PolicyConformance):
    caught_by = "test_random_calls[0]"

    class policy_cls(LRUCachePolicy):
        calls = 0

        def release(self, keys):
            self.calls += 1
            super().release(keys if self.calls % 50 else keys[:-1])


class TestIsFifo(PolicyConformance):
    passes = ("test_random_calls[0]", "test_refused_eviction_changes_nothing")

    class policy_cls(LRUCachePolicy):
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
