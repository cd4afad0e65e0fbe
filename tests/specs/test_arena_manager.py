"""What `test_manager_model.py` does not say of the manager: orders, texts, numbers, effort."""

from __future__ import annotations

import itertools

import pytest

from wtransfer.errors import BlockNotKeptError, OffloadingOptionError
from wtransfer.kv.keys import make_offload_key
from wtransfer.specs.arena_manager import CPUOffloadingManager
from wtransfer.specs.interface import LookupResult, ReqContext

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


# -- pins


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


# -- who gives way


def test_least_recently_used_blocks_are_evicted_tails_before_heads(make):
    manager = make(4)
    store(manager, A, B)
    store(manager, C, D)
    assert store(manager, E).evicted_keys == [B]
    manager.touch([A], ONE)
    assert store(manager, F).evicted_keys == [D]


def test_keys_of_one_store_do_not_evict_each_other(make):
    manager = make(3)
    store(manager, A, B, C)
    prepared = manager.prepare_store([A, B, D], ONE)
    assert prepared.evicted_keys == [C]
    manager.complete_store([D], ONE)
    assert manager.prepare_store([A, B, D, E], ONE) is None
    assert looked_up(manager, A, B, D) == [HIT, HIT, HIT]


def test_a_load_is_a_use(make):
    manager = make(2)
    store(manager, A)
    store(manager, B)
    manager.prepare_load([A], ONE)
    manager.complete_load([A], ONE)
    assert store(manager, C).evicted_keys == [B]


# -- weights


def test_the_oldest_weights_blocks_give_way_before_younger_ones(make):
    manager = make(3)
    for key in (A, B, C):
        store(manager, key)
        manager.weights_changed()
    assert [store(manager, key).evicted_keys for key in (D, E, F)] == [[A], [B], [C]]


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


# -- what is told


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
    store(manager, D, success=False)
    assert manager.prepare_store([D, E, F, make_offload_key(b"G" * 16)], ONE) is None
    stats = manager.get_stats()
    assert stats == {
        "slots": 5,
        "slots_free": 2,
        "blocks_storing": 1,
        "blocks_loading": 1,
        "blocks_idle": 1,
        "loads_total": 1,
        "stores_total": 4,
        "stores_failed_total": 1,
        "stores_refused_total": 4,
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


def effort(manager, numbers, counted):
    """Return how often keys are looked up in one call of each kind."""
    spent = {}

    def note(name, call, *args):
        before = counted.lookups
        result = call(*args)
        spent[name] = counted.lookups - before
        return result

    new = [counted(next(numbers).to_bytes(8, "big")) for _ in range(2)]
    note("weights_changed", manager.weights_changed)
    assert note("prepare_store", manager.prepare_store, new, ONE).evicted_keys
    note("complete_store", manager.complete_store, new, ONE)
    note("lookup", manager.lookup, new[0], ONE)
    note("touch", manager.touch, new, ONE)
    note("prepare_load", manager.prepare_load, new, ONE)
    note("complete_load", manager.complete_load, new, ONE)
    note("get_stats", manager.get_stats)
    return spent


def test_effort_does_not_grow_with_the_number_of_blocks(make, counted):
    found = []
    for num_slots in (8, 2000):
        manager, numbers = make(num_slots), itertools.count(1)
        for _ in range(num_slots):
            store(manager, counted(next(numbers).to_bytes(8, "big")))
        found.append(effort(manager, numbers, counted))
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


def test_blocks_that_are_touched_together_give_way_from_the_tail(make):
    manager = make(3)
    for key in (A, B, C):
        store(manager, key)
    manager.touch([A, B, C], ONE)
    assert evicted_one_by_one(manager, 3) == [[C], [B], [A]]


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
