"""Policies that are wrong in one way each. `test_policy_kit.py` runs this file as a test module."""

# ruff: noqa: N801 - classes that stand where the kit expects an attribute

from wtransfer.specs.policies import ARCCachePolicy, LRUCachePolicy
from wtransfer.testing.policy import PolicyConformance


class TestForgetsTheLast(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            if len(self._order) == 1:
                return None
            return super().evict(count, protected, incoming)


class TestNamesTheSameTwice(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            evicted = super().evict(count, protected, incoming)
            return evicted and [evicted[0], *evicted[:-1]]


class TestGivesWhatItHas(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            few = min(count, sum(key not in protected for key in self._order))
            return super().evict(few, protected, incoming)


class TestReleasesAtOnce(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        def insert(self, keys):
            self.release(keys)


class TestReordersByPinning(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        def reorder(self, keys):
            self.pin(keys)


class TestPinsNothing(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        def pin(self, keys): ...


class TestPinsForEver(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        def pin(self, keys):
            super().pin(keys)
            self.pinned = {*getattr(self, "pinned", ()), *keys}

        def release(self, keys):
            super().release([key for key in keys if key not in getattr(self, "pinned", ())])


class TestProtectsNobody(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            return super().evict(count, (), incoming)


class TestProtectsTheFirstOnly(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            return super().evict(count, set(list(self._order)[:1]) & set(protected), incoming)


class TestTouchesTwice(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        def touch(self, keys):
            super().touch(keys)
            self.again = [*getattr(self, "again", ()), *keys]

        def evict(self, count, protected, incoming):
            evicted = super().evict(count, protected, incoming)
            again = getattr(self, "again", [])
            return again[:count] if evicted is None and len(again) >= count else evicted


class TestRemovesCandidatesOnly(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        def insert(self, keys):
            self.storing = {*getattr(self, "storing", ()), *keys}

        def release(self, keys):
            super().release([*keys, *(getattr(self, "storing", set()) - set(keys))])
            self.storing = set()


class TestNeverTakesBack(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            evicted = super().evict(count, protected, incoming)
            self.gone = {*getattr(self, "gone", ()), *(evicted or ())}
            return evicted

        def release(self, keys):
            super().release([key for key in keys if key not in getattr(self, "gone", ())])


class TestEvictsBeforeItCounts(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            evicted = super().evict(count, protected, incoming)
            if evicted is None and self._order:
                self._order.popitem(last=False)
            return evicted


class TestLearnsFromRefusals(PolicyConformance):
    class policy_cls(ARCCachePolicy):
        def evict(self, count, protected, incoming):
            for key in incoming:
                self._learn(key)
            return super().evict(count, protected, incoming)


class TestSorts(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            places = {key: place for place, key in enumerate(self._order)}
            found = [key for key in sorted(places, key=places.get) if key not in protected]
            if len(found) < count:
                return None
            for key in found[:count]:
                del self._order[key]
            return found[:count]


class TestRemembersEverything(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        def evict(self, count, protected, incoming):
            self.seen = {*getattr(self, "seen", ()), *incoming}
            return super().evict(count, protected, incoming)


class TestForgetsUnderLoad(PolicyConformance):
    class policy_cls(LRUCachePolicy):
        calls = 0

        def release(self, keys):
            self.calls += 1
            super().release(keys if self.calls % 50 else keys[:-1])


class TestFifo(PolicyConformance):
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
