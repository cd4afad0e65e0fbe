"""The manager and its policies against a plain dictionary: any order of calls, each one checked.

The model knows which blocks there are, who holds them, and what may give way. It does not know in
which order: that a policy chooses among candidates, so many as are needed, is what is checked.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from wtransfer.errors import BlockNotKeptError
from wtransfer.kv.keys import make_offload_key
from wtransfer.specs.arena_manager import CPUOffloadingManager
from wtransfer.specs.interface import LookupResult, ReqContext

KEYS = [make_offload_key(bytes([number]) * 8) for number in range(9)]
REQUESTS = [ReqContext(name) for name in "xyz"]
KEY_LISTS = st.lists(st.sampled_from(KEYS), max_size=5)
REQUEST = st.sampled_from(REQUESTS)


@dataclass
class Known:
    """What the model knows of one block."""

    slot: int
    era: int
    state: str = "storing"
    forgotten: bool = False
    loads: Counter = field(default_factory=Counter)

    @property
    def idle(self):
        return self.state == "kept" and not sum(self.loads.values())


class ManagerMachine(RuleBasedStateMachine):
    policy = "lru"

    @initialize(num_slots=st.integers(0, 6))
    def begin(self, num_slots):
        self.num_slots = num_slots
        self.manager = CPUOffloadingManager(num_slots, self.policy, enable_events=True)
        self.model: dict[bytes, Known] = {}
        self.storing: dict[str, set[bytes]] = {ctx.req_id: set() for ctx in REQUESTS}
        self.announced: set[bytes] = set()
        self.era = 0
        self.unknown = 0

    # -- what the model would say

    def expected(self, key):
        known = self.model.get(key)
        if known is None or known.forgotten:
            return LookupResult.MISS
        return LookupResult.HIT if known.state == "kept" else LookupResult.HIT_PENDING

    def forget_if_due(self, key):
        known = self.model[key]
        if known.forgotten and known.idle:
            del self.model[key]

    # -- calls

    @rule(keys=KEY_LISTS, ctx=REQUEST)
    def prepare_store(self, keys, ctx):
        before = dict(self.manager.get_stats())
        prepared = self.manager.prepare_store(keys, ctx)
        new = [key for key in dict.fromkeys(keys) if key not in self.model]
        num_free = self.num_slots - len(self.model)
        candidates = {k for k, known in self.model.items() if known.idle and k not in keys}
        missing = max(0, len(new) - num_free)
        if missing > len(candidates):
            assert prepared is None
            after = dict(self.manager.get_stats())
            before["stores_refused_total"] += len(new)
            assert after == before
            return
        assert prepared.keys_to_store == new
        assert len(prepared.evicted_keys) == missing
        assert set(prepared.evicted_keys) <= candidates
        assert len(set(prepared.evicted_keys)) == missing
        if any(self.model[key].era == self.era for key in prepared.evicted_keys):
            old = {key for key in candidates if self.model[key].era != self.era}
            assert old <= set(prepared.evicted_keys), "blocks of earlier weights give way first"
        for key in prepared.evicted_keys:
            del self.model[key]
        taken = {known.slot for known in self.model.values()}
        slots = prepared.store_spec.slots
        assert len(set(slots)) == len(new)
        assert not taken & set(slots)
        assert set(slots) <= set(range(self.num_slots))
        assert prepared.store_spec.keys == new
        for key, slot in zip(new, slots, strict=True):
            self.model[key] = Known(slot, self.era)
            self.storing[ctx.req_id].add(key)

    @rule(keys=KEY_LISTS, ctx=REQUEST, success=st.booleans())
    def complete_store(self, keys, ctx, success):
        self.manager.complete_store(keys, ctx, success)
        ours = self.storing[ctx.req_id] & set(keys)
        self.unknown += len(keys) - len(ours)
        self.storing[ctx.req_id] -= ours
        for key in ours:
            self.model[key].state = "kept"
            if not success:
                self.model[key].forgotten = True
            self.forget_if_due(key)

    @precondition(lambda self: any(self.storing.values()))
    @rule(data=st.data(), success=st.sampled_from([True, True, False]))
    def complete_a_store_of_ones_own(self, data, success):
        busy = [ctx for ctx in REQUESTS if self.storing[ctx.req_id]]
        ctx = data.draw(st.sampled_from(busy))
        keys = sorted(self.storing[ctx.req_id])
        self.complete_store(data.draw(st.sampled_from([keys, keys[:1], keys * 2])), ctx, success)

    @rule(keys=KEY_LISTS, ctx=REQUEST)
    def store(self, keys, ctx):
        self.prepare_store(keys, ctx)
        self.complete_store(sorted(self.storing[ctx.req_id]), ctx, success=True)

    @rule(keys=KEY_LISTS, ctx=REQUEST)
    def prepare_load(self, keys, ctx):
        if any(self.expected(key) is not LookupResult.HIT for key in keys):
            before = dict(self.manager.get_stats())
            with pytest.raises(BlockNotKeptError):
                self.manager.prepare_load(keys, ctx)
            assert dict(self.manager.get_stats()) == before
            return
        prepared = self.manager.prepare_load(keys, ctx)
        assert prepared.slots == [self.model[key].slot for key in keys]
        assert prepared.keys == keys
        for key in keys:
            self.model[key].loads[ctx.req_id] += 1

    @precondition(lambda self: any(known.state == "kept" for known in self.model.values()))
    @rule(data=st.data(), ctx=REQUEST)
    def prepare_a_load_of_what_is_kept(self, data, ctx):
        kept = [key for key in KEYS if self.expected(key) is LookupResult.HIT]
        if kept:
            self.prepare_load(data.draw(st.lists(st.sampled_from(kept), max_size=3)), ctx)

    @rule(keys=KEY_LISTS, ctx=REQUEST)
    def complete_load(self, keys, ctx):
        self.manager.complete_load(keys, ctx)
        for key in keys:
            known = self.model.get(key)
            if known is None or not known.loads[ctx.req_id]:
                self.unknown += 1
                continue
            known.loads[ctx.req_id] -= 1
            if known.idle:
                known.era = self.era
            self.forget_if_due(key)

    @rule(ctx=REQUEST)
    def complete_all_loads(self, ctx):
        loads = Counter({key: known.loads[ctx.req_id] for key, known in self.model.items()})
        self.complete_load(list(loads.elements()), ctx)

    @rule(keys=KEY_LISTS, ctx=REQUEST)
    def touch(self, keys, ctx):
        self.manager.touch(keys, ctx)
        for key in keys:
            if key in self.model and self.model[key].idle:
                self.model[key].era = self.era

    @rule()
    def weights_changed(self):
        self.manager.weights_changed()
        self.era += 1

    @rule()
    def reset_cache(self):
        self.manager.reset_cache()
        for key in list(self.model):
            self.model[key].forgotten = True
            self.forget_if_due(key)

    # -- what holds after every call

    @invariant()
    def answers_are_the_models(self):
        found = [self.manager.lookup(key, REQUESTS[0]) for key in KEYS]
        assert found == [self.expected(key) for key in KEYS]

    @invariant()
    def numbers_are_the_models(self):
        stats = self.manager.get_stats()
        states = Counter(
            "idle" if known.idle else "storing" if known.state == "storing" else "loading"
            for known in self.model.values()
        )
        assert stats["slots_free"] == self.num_slots - len(self.model)
        assert {name: stats[f"blocks_{name}"] for name in ("idle", "storing", "loading")} == {
            name: states[name] for name in ("idle", "storing", "loading")
        }
        assert stats["unknown_completions_total"] == self.unknown

    @invariant()
    def whoever_hears_events_knows_what_is_kept(self):
        for event in self.manager.take_events():
            if event.removed:
                assert set(event.keys) <= self.announced
                self.announced -= set(event.keys)
            else:
                assert not set(event.keys) & self.announced
                self.announced |= set(event.keys)
        assert self.announced == {key for key in KEYS if self.expected(key) is LookupResult.HIT}

    @invariant()
    def requests_without_jobs_are_forgotten(self):
        busy = {name for name, keys in self.storing.items() if keys}
        for known in self.model.values():
            busy |= {name for name, count in known.loads.items() if count}
        assert set(self.manager._jobs) == busy


class ArcMachine(ManagerMachine):
    policy = "arc"


SHORT = settings(max_examples=40, stateful_step_count=40, deadline=None)
LONG = settings(
    max_examples=100,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("machine", [ManagerMachine, ArcMachine])
def test_any_order_of_calls(machine):
    run_state_machine_as_test(machine, settings=SHORT)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("machine", [ManagerMachine, ArcMachine])
def test_any_order_of_calls_for_ten_thousand_steps(machine):
    run_state_machine_as_test(machine, settings=LONG)
