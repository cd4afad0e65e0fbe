"""The built-in policies: the kit, the order that is their own, and policies that break theirs."""

from __future__ import annotations

import copy
import random

import pytest

from wtransfer.errors import EvictionPolicyError, OffloadingOptionError
from wtransfer.kv.keys import make_offload_key
from wtransfer.specs.arena_manager import CPUOffloadingManager
from wtransfer.specs.interface import LookupResult, ReqContext
from wtransfer.specs.policies import POLICIES, ARCCachePolicy, LRUCachePolicy, policy_class
from wtransfer.testing.policy import PolicyConformance


class TestLru(PolicyConformance):
    policy = "lru"


class TestArc(PolicyConformance):
    policy = "arc"


# -- the order of lru


def kept(policy, *keys):
    policy.insert(keys)
    policy.release(keys)


def test_lru_evicts_what_was_used_longest_ago():
    policy = LRUCachePolicy(5)
    kept(policy, *"abcde")
    policy.touch(["a"])
    policy.pin(["b"])
    policy.release(["b"])
    assert policy.evict(5, (), "vwxyz") == ["c", "d", "e", "a", "b"]


# -- arc, against the published algorithm


class PublishedArc:
    """Figure 4 of the paper, line by line, for one block at a time and nothing in flight."""

    def __init__(self, c):
        self.c, self.p = c, 0.0
        self.t1, self.t2, self.b1, self.b2 = [], [], [], []

    def request(self, x):
        """Return what gave way, if anything did."""
        if x in self.t1 or x in self.t2:
            (self.t1 if x in self.t1 else self.t2).remove(x)
            self.t2.append(x)
            return None
        if x in self.b1:
            self.p = min(self.c, self.p + max(len(self.b2) / len(self.b1), 1))
            gone = self.replace(x)
            self.b1.remove(x)
            self.t2.append(x)
            return gone
        if x in self.b2:
            self.p = max(0, self.p - max(len(self.b1) / len(self.b2), 1))
            gone = self.replace(x)
            self.b2.remove(x)
            self.t2.append(x)
            return gone
        gone = None
        if len(self.t1) + len(self.b1) == self.c:
            if len(self.t1) < self.c:
                self.b1.pop(0)
                gone = self.replace(x)
            else:
                gone = self.t1.pop(0)
        else:
            known = len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2)
            if known >= self.c:
                if known == 2 * self.c:
                    self.b2.pop(0)
                gone = self.replace(x)
        self.t1.append(x)
        return gone

    def replace(self, x):
        if len(self.t1) + len(self.t2) < self.c:
            return None
        if self.t1 and (len(self.t1) > self.p or (x in self.b2 and len(self.t1) == self.p)):
            gone = self.t1.pop(0)
            self.b1.append(gone)
        else:
            gone = self.t2.pop(0)
            self.b2.append(gone)
        return gone


def traffic(kind):
    """Return numbers of blocks, as they are asked for."""
    numbers = random.Random(kind)
    if kind == "scans":
        return [n for _ in range(20) for n in [*range(6), *range(100 + 7 * _, 120 + 7 * _)]]
    if kind == "loops":
        return [n % 11 for n in range(800)]
    return [min(int(numbers.paretovariate(0.6)), 60) for _ in range(3000)]


@pytest.mark.parametrize("kind", ["scans", "loops", "skewed", "skewed again"])
@pytest.mark.parametrize("capacity", [1, 2, 8])
def test_arc_decides_as_the_published_algorithm(kind, capacity):
    paper, ours = PublishedArc(capacity), ARCCachePolicy(capacity)
    cached = set()
    for block in traffic(kind):
        expected = paper.request(block)
        gone = None
        if block in cached:
            ours.touch([block])
        else:
            if len(cached) == capacity:
                (gone,) = ours.evict(1, (), [block])
                cached.remove(gone)
            ours.insert([block])
            ours.release([block])
            cached.add(block)
        assert gone == expected
        assert ours.target == paper.p
        assert ours.num_ghosts == len(paper.b1) + len(paper.b2)


def used(policy, cached, block):
    """Let one block be asked for; `cached` is who is kept."""
    if block in cached:
        policy.touch([block])
        return
    if len(cached) == policy.capacity:
        cached.difference_update(policy.evict(1, (), [block]))
    kept(policy, block)
    cached.add(block)


def test_arc_decides_over_many_blocks_as_over_one_at_a_time():
    num_compared = num_ghosts = 0
    for seed in range(200):
        numbers = random.Random(seed)
        policy, cached = ARCCachePolicy(12), set()
        for _ in range(150):
            used(policy, cached, min(int(numbers.paretovariate(0.7)), 40))
        gone = numbers.sample(sorted(cached), numbers.randint(0, 4))
        policy.remove(gone)
        cached.difference_update(gone)
        ghosts = [n for n in range(60) if _num_learned(policy, [n])]
        new = [*numbers.sample(ghosts, min(len(ghosts), 5)), *range(100, 103)]
        numbers.shuffle(new)
        singly, expected = copy.deepcopy(policy), []
        known = singly.num_ghosts
        for number, block in enumerate(new, len(cached)):
            expected += singly.evict(1, (), [block]) if number >= 12 else []
            singly.insert([block])
        # Ghosts that came, less those that came back: none was dropped on the way.
        if singly.num_ghosts != known + len(expected) - _num_learned(policy, new):
            continue
        assert policy.evict(len(expected), (), new) == expected
        policy.insert(new)
        assert policy.target == singly.target
        num_compared += 1
        num_ghosts += _num_learned(singly, new) == 0
    assert num_compared > 50
    assert num_ghosts > 50


def _num_learned(policy, new):
    return sum(each in policy._recent.ghosts or each in policy._frequent.ghosts for each in new)


def test_arc_counts_a_load_as_a_use():
    policy = ARCCachePolicy(4)
    kept(policy, *"abc")
    policy.pin(["a"])
    policy.release(["a"])
    kept(policy, "d")
    assert policy.evict(3, (), "xyz") == ["b", "c", "d"]


# -- by name


def test_policies_are_found_by_name_and_by_place():
    assert policy_class("lru") is LRUCachePolicy
    assert policy_class("arc") is ARCCachePolicy
    place = "wtransfer.specs.policies:LRUCachePolicy"
    assert policy_class(place) is LRUCachePolicy


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lruu", "Unknown eviction policy 'lruu'; expected one of ['arc', 'lru'], or 'module:Cl"),
        ("LRU", "Did you mean 'lru'?"),
        ("", "Unknown eviction policy ''"),
        ("nowhere_at_all:Policy", "cannot be loaded: ModuleNotFoundError: No module named"),
        ("wtransfer.config:Policy", "cannot be loaded: AttributeError"),
        ("wtransfer.config:KVCacheConfig", "expected a subclass of wtransfer.specs.policies.C"),
        ("wtransfer.specs.policies:CachePolicy", "abstract methods left: evict, insert, pin"),
    ],
)
def test_unusable_policy_is_refused_with_its_reason(name, text):
    with pytest.raises(OffloadingOptionError) as caught:
        CPUOffloadingManager(4, policy=name)
    assert text in str(caught.value)


# -- policies that break the contract

A, B, C, D, E, F = (make_offload_key(name.encode() * 16) for name in "ABCDEF")
ONE = ReqContext("one")


class TooFew(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        return (super().evict(count, protected, incoming) or [])[:-1]


class Twice(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        return [super().evict(count, protected, incoming)[0]] * count


class Unknown(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        return [F] * count


class Protected(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        return super().evict(count, (), incoming)


class Refuses(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        return None


class Raises(LRUCachePolicy):
    def evict(self, count, protected, incoming):
        raise IndexError("pop from an empty deque")


class Pinned(LRUCachePolicy):
    def pin(self, keys): ...


def kept_in(manager):
    return [k for k in (A, B, C, D, E, F) if manager.lookup(k, ONE) is LookupResult.HIT]


def store(manager, *keys):
    prepared = manager.prepare_store(keys, ONE)
    manager.complete_store(prepared.keys_to_store, ONE)
    return prepared.evicted_keys


@pytest.mark.parametrize(
    ("policy", "did"),
    [
        (TooFew, "returned 1 keys, not all of them candidates"),
        (Twice, "returned 2 keys, not all of them candidates"),
        (Unknown, "returned 2 keys, not all of them candidates"),
        (Protected, "returned 2 keys, not all of them candidates"),
        (Pinned, "returned 2 keys, not all of them candidates"),
        (Refuses, "returned None"),
        (Raises, r"raised IndexError\('pop from an empty deque'\)"),
    ],
)
def test_policy_that_breaks_its_contract_is_an_error_and_evicts_nothing(policy, did, monkeypatch):
    monkeypatch.setitem(POLICIES, "bad", policy)
    manager = CPUOffloadingManager(4, policy="bad")
    store(manager, A, B, C, D)
    manager.prepare_load([D], ONE)
    before = dict(manager.get_stats())
    with pytest.raises(EvictionPolicyError, match=f"{policy.__name__} was asked for 2 .* {did}; "):
        manager.prepare_store([C, E, F], ONE)
    assert kept_in(manager) == [A, B, C, D]
    assert dict(manager.get_stats()) == before


def test_candidates_of_earlier_cohorts_stay_candidates_if_a_later_policy_fails(monkeypatch):
    class FailsOnce(LRUCachePolicy):
        num_failures = 1

        def evict(self, count, protected, incoming):
            if C in self._order and FailsOnce.num_failures:
                FailsOnce.num_failures -= 1
                return None
            return super().evict(count, protected, incoming)

    monkeypatch.setitem(POLICIES, "bad", FailsOnce)
    manager = CPUOffloadingManager(4, policy="bad")
    store(manager, A, B)
    manager.weights_changed()
    store(manager, C, D)
    with pytest.raises(EvictionPolicyError):
        store(manager, E, F, make_offload_key(b"G" * 16))
    assert kept_in(manager) == [A, B, C, D]
    assert store(manager, E, F) == [B, A]
