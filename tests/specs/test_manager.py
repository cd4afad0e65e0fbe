"""The manager's promises, one by one; `test_manager_model.py` mixes them."""

from __future__ import annotations

import itertools

import pytest

from wtransfer.errors import BlockNotKeptError, OffloadingOptionError
from wtransfer.kv.keys import make_offload_key
from wtransfer.specs.interface import LookupResult, Medium, OffloadPolicy, ReqContext
from wtransfer.specs.manager import CPUOffloadingManager

A, B, C, D, E, F = (make_offload_key(name.encode() * 16) for name in "ABCDEF")
ONE, TWO = ReqContext("one"), ReqContext("two")
HIT, MISS, PENDING = LookupResult.HIT, LookupResult.MISS, LookupResult.HIT_PENDING


@pytest.fixture(params=["lru", "arc"])
def make(request):
    def make(num_slots, **options):
        return CPUOffloadingManager(num_slots, policy=request.param, **options)

    return make


def store(manager, *keys, ctx=ONE, success=True):
    prepared = manager.prepare_store(keys, ctx)
    assert prepared is not None
    manager.complete_store(prepared.keys_to_store, ctx, success)
    return prepared


def looked_up(manager, *keys):
    return [manager.lookup(key, ONE) for key in keys]


def test_a_block_is_stored_found_loaded_and_found_again(make):
    manager = make(4)
    assert manager.on_new_request(ONE).policy is OffloadPolicy.CHUNK_LEVEL
    assert looked_up(manager, A) == [MISS]
    prepared = manager.prepare_store([A, B], ONE)
    assert prepared.keys_to_store == [A, B]
    assert prepared.evicted_keys == []
    assert prepared.store_spec.keys == [A, B]
    assert len(set(prepared.store_spec.slots)) == 2
    assert looked_up(manager, A, B) == [PENDING, PENDING]
    manager.complete_store([A, B], ONE)
    assert looked_up(manager, A, B) == [HIT, HIT]
    loaded = manager.prepare_load([B, A], TWO)
    assert loaded.keys == [B, A]
    assert loaded.slots == prepared.store_spec.slots[::-1]
    manager.complete_load([B, A], TWO)
    assert looked_up(manager, A, B) == [HIT, HIT]


def test_only_what_is_new_is_stored_and_once(make):
    manager = make(4)
    store(manager, A)
    prepared = manager.prepare_store([B, A, B, C], ONE)
    assert prepared.keys_to_store == [B, C]
    assert len(prepared.store_spec.slots) == 2
    again = manager.prepare_store([B, C, D], TWO)
    assert again.keys_to_store == [D]


def test_nothing_new_is_no_refusal(make):
    manager = make(1)
    store(manager, A)
    prepared = manager.prepare_store([A], ONE)
    assert (prepared.keys_to_store, prepared.evicted_keys) == ([], [])
    assert prepared.store_spec.slots == []
    assert manager.prepare_store([], ONE).keys_to_store == []


def test_slots_are_those_that_exist_and_belong_to_one_block_each(make):
    manager = make(3)
    slots = store(manager, A, B, C).store_spec.slots
    assert sorted(slots) == [0, 1, 2]
    store(manager, D, E)
    kept = [key for key in (A, B, C, D, E) if manager.lookup(key, ONE) is HIT]
    assert len(kept) == 3
    assert sorted(manager.prepare_load(kept, ONE).slots) == [0, 1, 2]


def test_a_failed_store_is_forgotten_and_its_slot_used_again(make):
    manager = make(1)
    slot = store(manager, A, success=False).store_spec.slots
    assert looked_up(manager, A) == [MISS]
    prepared = store(manager, B)
    assert prepared.evicted_keys == []
    assert prepared.store_spec.slots == slot
    assert manager.get_stats()["stores_failed_total"] == 1


# -- all or none


def test_a_store_that_finds_no_room_changes_nothing(make):
    manager = make(3, enable_events=True)
    store(manager, A, B, C)
    manager.prepare_load([A, B], ONE)
    list(manager.take_events())
    before = dict(manager.get_stats())
    assert manager.prepare_store([D, E], TWO) is None
    assert looked_up(manager, A, B, C, D, E) == [HIT, HIT, HIT, MISS, MISS]
    assert list(manager.take_events()) == []
    assert manager.get_stats() == {**before, "stores_refused_total": 2}
    # The one that could give way is still there to do so.
    assert store(manager, D, ctx=TWO).evicted_keys == [C]


def test_more_than_there_are_slots_is_refused(make):
    manager = make(2)
    store(manager, A)
    assert manager.prepare_store([B, C, D], ONE) is None
    assert looked_up(manager, A) == [HIT]


def test_what_is_asked_for_together_does_not_evict_each_other(make):
    manager = make(3)
    store(manager, A, B, C)
    prepared = manager.prepare_store([A, B, D], ONE)
    assert prepared.evicted_keys == [C]
    manager.complete_store([D], ONE)
    assert manager.prepare_store([A, B, D, E], ONE) is None
    assert looked_up(manager, A, B, D) == [HIT, HIT, HIT]


def test_without_slots_everything_is_refused(make):
    manager = make(0)
    assert manager.prepare_store([A], ONE) is None
    assert looked_up(manager, A) == [MISS]


# -- pins


def test_what_is_being_loaded_stays_until_the_last_load_has_ended(make):
    manager = make(1)
    store(manager, A)
    for ctx in (ONE, ONE, TWO):
        manager.prepare_load([A], ctx)
    for ctx in (TWO, ONE):
        manager.complete_load([A], ctx)
        assert manager.prepare_store([B], TWO) is None
    manager.complete_load([A], ONE)
    assert store(manager, B).evicted_keys == [A]


def test_what_is_being_stored_stays(make):
    manager = make(1)
    manager.prepare_store([A], ONE)
    assert manager.prepare_store([B], TWO) is None
    manager.complete_store([A], ONE)
    assert store(manager, B).evicted_keys == [A]


@pytest.mark.parametrize("state", ["missing", "pending"])
def test_a_load_of_what_is_no_hit_pins_nothing(make, state):
    manager = make(2)
    store(manager, A)
    if state == "pending":
        manager.prepare_store([B], ONE)
    text = "is not kept" if state == "missing" else "is still being stored"
    with pytest.raises(BlockNotKeptError, match=text) as caught:
        manager.prepare_load([A, B], TWO)
    assert B.hex() in str(caught.value)
    assert manager.get_stats()["blocks_loading"] == 0


def test_one_block_may_be_loaded_twice_in_one_call(make):
    manager = make(1)
    store(manager, A)
    assert len(manager.prepare_load([A, A], ONE).slots) == 2
    manager.complete_load([A], ONE)
    assert manager.prepare_store([B], ONE) is None
    manager.complete_load([A], ONE)
    assert store(manager, B).evicted_keys == [A]


# -- FAULTS 28: completions that come twice, late, or from nowhere


def unknown(manager):
    return manager.get_stats()["unknown_completions_total"]


def test_a_load_that_is_completed_twice_unpins_nobody_elses(make):
    manager = make(1)
    store(manager, A)
    manager.prepare_load([A], ONE)
    manager.prepare_load([A], TWO)
    for _ in range(3):
        manager.complete_load([A], ONE)
    assert unknown(manager) == 2
    assert manager.prepare_store([B], ONE) is None


def test_a_store_that_is_completed_twice_does_nothing_more(make):
    manager = make(2, enable_events=True)
    store(manager, A)
    manager.complete_store([A], ONE)
    manager.complete_store([A], ONE, success=False)
    assert looked_up(manager, A) == [HIT]
    assert unknown(manager) == 2
    assert [event.keys for event in manager.take_events()] == [[A]]


def test_a_late_failure_does_not_take_away_what_another_request_stores(make):
    manager = make(2)
    store(manager, A, success=False)
    manager.prepare_store([A], TWO)
    manager.complete_store([A], ONE, success=False)
    assert looked_up(manager, A) == [PENDING]
    manager.complete_store([A], TWO)
    assert looked_up(manager, A) == [HIT]


def test_completions_of_what_never_was_are_counted(make):
    manager = make(1)
    manager.complete_store([A, B], ONE)
    manager.complete_load([C], TWO)
    assert unknown(manager) == 3
    assert looked_up(manager, A, B, C) == [MISS, MISS, MISS]


def test_completions_in_any_order_and_in_parts_are_fine(make):
    manager = make(4)
    manager.prepare_store([A, B], ONE)
    manager.prepare_store([C], ONE)
    manager.complete_store([C, B], ONE)
    assert looked_up(manager, A, B, C) == [PENDING, HIT, HIT]
    manager.on_request_finished(ONE)
    manager.complete_store([A], ONE)
    assert looked_up(manager, A) == [HIT]
    assert unknown(manager) == 0


def test_requests_without_jobs_leave_nothing_behind(make):
    manager = make(4)
    for number in range(100):
        ctx = ReqContext(str(number))
        manager.on_new_request(ctx)
        store(manager, A, ctx=ctx)
        manager.prepare_load([A], ctx)
        manager.complete_load([A], ctx)
        manager.complete_load([A], ctx)
        manager.prepare_store([A], ctx)
        assert manager.prepare_load([], ctx).slots == []
        manager.on_request_finished(ctx)
    assert manager._jobs == {}


# -- who gives way


def test_what_was_used_longest_ago_gives_way_tails_before_heads(make):
    manager = make(4)
    store(manager, A, B)
    store(manager, C, D)
    assert store(manager, E).evicted_keys == [B]
    manager.touch([A], ONE)
    assert store(manager, F).evicted_keys == [D]


def test_a_load_is_a_use(make):
    manager = make(2)
    store(manager, A)
    store(manager, B)
    manager.prepare_load([A], ONE)
    manager.complete_load([A], ONE)
    assert store(manager, C).evicted_keys == [B]


def test_touching_what_is_pinned_or_not_kept_does_nothing(make):
    manager = make(3)
    store(manager, A)
    manager.prepare_load([A], ONE)
    manager.prepare_store([B], ONE)
    manager.touch([A, B, C], TWO)
    assert looked_up(manager, A, B, C) == [HIT, PENDING, MISS]
    assert manager.prepare_store([C, D], TWO) is None


# -- weights


def test_blocks_of_earlier_weights_give_way_first(make):
    manager = make(4)
    store(manager, A, B)
    manager.weights_changed()
    store(manager, C)
    store(manager, D)
    manager.touch([C, D], ONE)
    assert sorted(store(manager, E, F).evicted_keys) == [A, B]
    assert looked_up(manager, C, D, E, F) == [HIT] * 4


def test_the_oldest_weights_blocks_give_way_before_younger_ones(make):
    manager = make(3)
    for key in (A, B, C):
        store(manager, key)
        manager.weights_changed()
    assert [store(manager, key).evicted_keys for key in (D, E, F)] == [[A], [B], [C]]


def test_one_store_may_take_from_several_generations(make):
    manager = make(3)
    for key in (A, B, C):
        store(manager, key)
        manager.weights_changed()
    prepared = manager.prepare_store([D, E, B], ONE)
    assert sorted(prepared.evicted_keys) == [A, C]
    assert looked_up(manager, B) == [HIT]


def test_a_block_that_is_asked_for_again_after_a_way_back_is_no_old_one(make):
    manager = make(3)
    store(manager, A)
    store(manager, B)
    store(manager, C)
    manager.weights_changed()
    manager.touch([A], ONE)
    manager.prepare_load([B], ONE)
    manager.complete_load([B], ONE)
    assert store(manager, D).evicted_keys == [C]
    assert store(manager, E).evicted_keys != [D]


def test_a_block_that_is_loaded_after_a_way_back_is_of_the_newest_weights(make):
    manager = make(2)
    store(manager, A)
    manager.weights_changed()
    store(manager, B)
    manager.prepare_load([A], ONE)
    manager.complete_load([A], ONE)
    assert store(manager, C).evicted_keys == [B]


def test_a_block_may_be_touched_twice_in_one_call(make):
    manager = make(2)
    store(manager, A, B)
    manager.weights_changed()
    manager.touch([A, A, B, A], ONE)
    assert sorted(store(manager, C, D).evicted_keys) == [A, B]


def test_jobs_that_outlive_their_weights_end_as_they_would_have(make):
    manager = make(3)
    store(manager, A)
    manager.prepare_load([A], ONE)
    manager.prepare_store([B], ONE)
    manager.prepare_store([C], TWO)
    manager.weights_changed()
    assert manager.prepare_store([D], TWO) is None
    manager.complete_load([A], ONE)
    manager.complete_store([B], ONE)
    manager.complete_store([C], TWO, success=False)
    assert looked_up(manager, A, B, C) == [HIT, HIT, MISS]
    assert store(manager, D).evicted_keys == []
    # Both are of the old weights: A was asked for before the change.
    evicted = [*store(manager, E).evicted_keys, *store(manager, F).evicted_keys]
    assert sorted(evicted) == [A, B]


def test_a_block_that_was_being_loaded_at_a_change_gives_way_before_those_of_the_new_weights(make):
    manager = make(4)
    store(manager, A)
    manager.prepare_load([A], ONE)
    manager.weights_changed()
    store(manager, B, C, D)
    manager.complete_load([A], ONE)
    assert store(manager, E).evicted_keys == [A]
    assert looked_up(manager, A, B, C, D, E) == [MISS, HIT, HIT, HIT, HIT]


def test_many_changes_leave_nothing_behind(make):
    manager = make(2)
    store(manager, A)
    for _ in range(1000):
        manager.weights_changed()
        manager.touch([A], ONE)
    assert len(manager._eviction._queue) <= 1
    assert looked_up(manager, A) == [HIT]


# -- reset


def test_a_reset_forgets_all_that_is_idle(make):
    manager = make(3, enable_events=True)
    store(manager, A, B)
    list(manager.take_events())
    manager.reset_cache()
    assert looked_up(manager, A, B) == [MISS, MISS]
    (event,) = manager.take_events()
    assert (sorted(event.keys), event.removed) == ([A, B], True)
    assert store(manager, C, D, E).evicted_keys == []


def test_pinned_blocks_are_no_hits_after_a_reset_and_keep_their_slots(make):
    manager = make(2, enable_events=True)
    slot = store(manager, A).store_spec.slots
    manager.prepare_load([A], ONE)
    other = manager.prepare_store([B], ONE).store_spec.slots
    list(manager.take_events())
    manager.reset_cache()
    assert [event.keys for event in manager.take_events()] == [[A]]
    assert looked_up(manager, A, B) == [MISS, MISS]
    with pytest.raises(BlockNotKeptError, match="is not kept"):
        manager.prepare_load([A], TWO)
    assert manager.prepare_store([C], TWO) is None
    manager.complete_store([B], ONE)
    assert manager.prepare_store([C], TWO).store_spec.slots == other
    manager.complete_load([A], ONE)
    assert manager.prepare_store([D], TWO).store_spec.slots == slot
    assert looked_up(manager, A, B) == [MISS, MISS]
    assert list(manager.take_events()) == []


def test_a_pinned_block_is_not_stored_a_second_time_after_a_reset(make):
    manager = make(3)
    manager.prepare_store([A], ONE)
    manager.reset_cache()
    assert manager.prepare_store([A, B], TWO).keys_to_store == [B]
    manager.reset_cache()
    manager.complete_store([A], ONE, success=False)
    manager.complete_store([B], TWO, success=True)
    assert looked_up(manager, A, B) == [MISS, MISS]
    assert manager.get_stats()["slots_free"] == 3


# -- what is told


def test_removals_come_before_what_took_their_place(make):
    manager = make(1, enable_events=True)
    store(manager, A)
    store(manager, B)
    events = [(event.keys, event.removed, event.medium) for event in manager.take_events()]
    assert events == [([A], False, Medium.CPU), ([A], True, Medium.CPU), ([B], False, Medium.CPU)]
    assert list(manager.take_events()) == []


def test_failed_stores_and_evicted_ones_are_told_as_they_are(make):
    manager = make(2, enable_events=True)
    store(manager, A, B, success=False)
    assert list(manager.take_events()) == []


def test_without_listeners_no_events_gather(make):
    manager = make(1)
    store(manager, A)
    assert list(manager.take_events()) == []
    assert manager._events is None


def test_the_numbers(make):
    manager = make(5)
    assert set(manager.get_stats().values()) == {0, 5}
    store(manager, A, B)
    manager.prepare_load([A], ONE)
    manager.prepare_store([C], ONE)
    stats = manager.get_stats()
    assert stats == {
        "slots": 5,
        "slots_free": 2,
        "blocks_storing": 1,
        "blocks_loading": 1,
        "blocks_idle": 1,
        "loads_total": 1,
        "stores_total": 3,
        "stores_failed_total": 0,
        "stores_refused_total": 0,
        "evictions_total": 0,
        "unknown_completions_total": 0,
    }
    assert all(type(value) is int for value in stats.values())


def test_shutting_down_twice_and_going_on(make):
    manager = make(2)
    store(manager, A)
    manager.prepare_load([A], ONE)
    manager.shutdown()
    manager.shutdown()
    manager.complete_load([A], ONE)
    assert looked_up(manager, A) == [MISS]
    assert manager.prepare_store([B], ONE) is None


def test_a_negative_number_of_slots():
    with pytest.raises(OffloadingOptionError, match="-1 slots"):
        CPUOffloadingManager(-1)


# -- effort


class Counted(bytes):
    """A key that counts how often any is looked up."""

    lookups = 0

    def __hash__(self):
        type(self).lookups += 1
        return super().__hash__()

    def __eq__(self, other):
        return super().__eq__(other)


def effort(manager, numbers):
    """Return how often keys are looked up in one call of each kind."""
    spent = {}

    def note(name, call, *args):
        before = Counted.lookups
        result = call(*args)
        spent[name] = Counted.lookups - before
        return result

    new = [Counted(next(numbers).to_bytes(8, "big")) for _ in range(2)]
    note("weights_changed", manager.weights_changed)
    assert note("prepare_store", manager.prepare_store, new, ONE).evicted_keys
    note("complete_store", manager.complete_store, new, ONE)
    note("lookup", manager.lookup, new[0], ONE)
    note("touch", manager.touch, new, ONE)
    note("prepare_load", manager.prepare_load, new, ONE)
    note("complete_load", manager.complete_load, new, ONE)
    note("get_stats", manager.get_stats)
    return spent


def test_effort_does_not_grow_with_the_number_of_blocks(make):
    found = []
    for num_slots in (8, 2000):
        manager, numbers = make(num_slots), itertools.count(1)
        for _ in range(num_slots):
            store(manager, Counted(next(numbers).to_bytes(8, "big")))
        found.append(effort(manager, numbers))
    few, many = found
    assert few == many
    assert (many["weights_changed"], many["get_stats"], many["lookup"]) == (0, 0, 1)


# -- the order of a request's blocks


def evicted_one_by_one(manager, count):
    """Return who gives way, one by one, to blocks of another request."""
    others = [make_offload_key(bytes([200 + number]) * 16) for number in range(count)]
    return [manager.prepare_store([each], TWO).evicted_keys for each in others]


def test_blocks_that_were_stored_one_a_step_give_way_from_the_tail(make):
    manager = make(5)
    manager.on_new_request(ONE)
    for key in (A, B, C, D, E):
        store(manager, key)
    manager.on_request_finished(ONE)
    assert evicted_one_by_one(manager, 5) == [[E], [D], [C], [B], [A]]


def test_the_last_store_may_end_after_its_request(make):
    manager = make(3)
    manager.on_new_request(ONE)
    store(manager, A)
    store(manager, B)
    prepared = manager.prepare_store([C], ONE)
    manager.on_request_finished(ONE)
    manager.complete_store(prepared.keys_to_store, ONE)
    assert evicted_one_by_one(manager, 3) == [[C], [B], [A]]


def test_a_prefix_that_was_there_or_loaded_outlives_what_was_stored_after_it(make):
    manager = make(4)
    store(manager, A, B, ctx=TWO)
    manager.on_new_request(ONE)
    manager.touch([A], ONE)
    manager.prepare_load([B], ONE)
    manager.complete_load([B], ONE)
    store(manager, C)
    store(manager, D)
    manager.on_request_finished(ONE)
    others = [make_offload_key(bytes([100 + number]) * 16) for number in range(2)]
    assert [manager.prepare_store([each], TWO).evicted_keys for each in others] == [[D], [C]]


def test_the_head_of_a_request_that_runs_on_is_used_again_whenever_it_has_doubled(make):
    manager = make(8)
    for number in range(4):
        store(manager, make_offload_key(bytes([50 + number]) * 16), ctx=TWO)
    manager.on_new_request(ONE)
    for key in (A, B, C, D):
        store(manager, key)
    # Blocks of others that were used before its last block go first, then its tail.
    gone = [key for keys in evicted_one_by_one(manager, 5) for key in keys]
    assert gone[4] == D


def test_to_order_blocks_costs_as_little_as_twice_their_number(make, monkeypatch):
    manager, ordered = make(2000), []
    reorder = manager._eviction.reorder
    monkeypatch.setattr(
        manager._eviction, "reorder", lambda keys: ordered.append(len(keys)) or reorder(keys)
    )
    manager.on_new_request(ONE)
    for number in range(1000):
        store(manager, make_offload_key(number.to_bytes(16, "big")))
    manager.on_request_finished(ONE)
    assert sum(ordered) <= 3 * 1000
    assert not manager._sequences
