"""An arena over a tier: what the arena has needs no tier, and a tier never makes a hit wrong."""

from __future__ import annotations

import random
import time

import pytest
from tier_rig import NUM_BLOCKS, Gate, Rig, key, until

from wtransfer.config import OffloadingConfig
from wtransfer.errors import BlockNotKeptError, EvictionPolicyError, OffloadingOptionError
from wtransfer.specs import payoff, tier, tier_link, tier_manager
from wtransfer.specs.arena_manager import CPUOffloadingManager
from wtransfer.specs.factory import OffloadingSpecFactory
from wtransfer.specs.interface import (
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
    ScheduleEndContext,
)
from wtransfer.specs.tier import TierLoadStoreSpec, rank_key

pytestmark = pytest.mark.usefixtures("leaves_nothing")

HIT, MISS, RETRY = LookupResult.HIT, LookupResult.MISS, LookupResult.RETRY
own = [rank_key(key(number), 0) for number in range(10)]


@pytest.fixture
def rig():
    """One thread each way, so that blocks are put in the order in which they are stored."""
    with Rig(num_slots=3, num_io_threads=1) as made:
        yield made


@pytest.fixture
def put():
    """Wait until blocks are in the tier."""

    def wait(rig, *numbers):
        until(lambda: {own[n] for n in numbers} <= rig.kept.keys())

    return wait


# -- loads


def test_blocks_of_the_arena_are_loaded_while_the_tier_hangs(rig):
    rig.held.update({"contains", "put", "get"})
    assert rig.keep([1, 2])
    assert rig.load([1, 2], [5, 6])
    assert rig.is_right(5, 1)
    assert rig.is_right(6, 2)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_evicted_block_comes_back_from_the_tier_and_stays(num_ranks, blocks_per_chunk):
    with Rig(num_slots=2, num_ranks=num_ranks, blocks_per_chunk=blocks_per_chunk) as rig:

        def blocks(number):
            return [number * blocks_per_chunk + each for each in range(blocks_per_chunk)]

        for number in (1, 2, 3):
            context = rig.request()
            for block in blocks(number):
                rig.fill(block, block)
            job = next(rig.jobs)
            room = rig.manager.prepare_store([key(number)], context)
            for worker in rig.workers:
                source = GPULoadStoreSpec(blocks(number))
                assert worker.submit_store(job, source, room.store_spec)
            assert all(rig.success(job))
            rig.manager.complete_store([key(number)], context)
            parts = {rank_key(key(number), rank) for rank in range(num_ranks)}
            until(lambda parts=parts: parts <= rig.kept.keys())
        gets = rig.tier_cls.entered["get"]
        for _ in range(2):
            assert rig.load([1], [12, 13][:blocks_per_chunk])
            assert all(rig.is_right(12 + i, each) for i, each in enumerate(blocks(1)))
        assert rig.tier_cls.entered["get"] == gets + num_ranks


def test_blocks_of_the_arena_are_loaded_while_every_thread_hangs_in_the_tier(put, later):
    with Rig(num_slots=3, num_io_threads=1, deadline_s=60.0) as rig:
        rig.keep([1])
        put(rig, 1)
        rig.manager.reset_cache()
        rig.held.add("get")
        load = rig.begin_load([1], [5])
        until(lambda: rig.tier_cls.entered["get"])
        later(61)
        assert not rig.end_load(*load)
        rig.keep([2])
        assert rig.load([2], [6])
        assert rig.is_right(6, 2)


def test_block_of_the_arena_waits_for_no_load_from_the_tier_that_shares_it(put):
    with Rig(num_slots=3, num_io_threads=1) as rig:
        rig.keep([1, 2])
        put(rig, 1, 2)
        rig.manager.reset_cache()
        rig.keep([1])
        rig.held.add("get")
        mixed = rig.begin_load([1, 2], [5, 6])
        began = time.monotonic()
        assert rig.load([1], [7])
        assert time.monotonic() - began < 5
        assert rig.is_right(7, 1)
        rig.tier_cls.gate.set()
        assert rig.end_load(*mixed)
        assert rig.is_right(6, 2)


def test_tier_that_fails_takes_nothing_from_the_arena(rig, put):
    rig.keep([1, 2])
    put(rig, 1, 2)
    rig.manager.reset_cache()
    rig.keep([1])
    rig.failing.add("get")
    assert not rig.end_load(*rig.begin_load([1, 2], [5, 6]))
    assert rig.load([1], [7])
    assert rig.is_right(7, 1)
    assert rig.lookup([key(2)]) == [MISS]


def test_store_of_a_block_that_the_arena_was_told_to_forget_leaks_no_slot(rig):
    first, second = rig.request(), rig.request()
    rig.manager.prepare_store([key(1), key(2), key(3)], first)
    rig.manager.reset_cache()
    room = rig.manager.prepare_store([key(1), key(4)], second)
    assert room.keys_to_store == [key(4)]
    rig.manager.complete_store([key(1), key(2), key(3)], first)
    rig.manager.complete_store([key(4)], second, success=False)
    stats = rig.stats()
    assert (stats["slots_free"], stats["blocks_storing"]) == (3, 0)


def test_policy_that_raises_leaves_a_load_without_promotion(rig, put, monkeypatch):
    rig.keep([1])
    put(rig, 1)
    rig.manager.reset_cache()

    def fail(*_):
        raise EvictionPolicyError("no")

    monkeypatch.setattr(CPUOffloadingManager, "prepare_store", fail)
    assert rig.load([1], [5])
    assert rig.is_right(5, 1)
    assert rig.stats()["blocks_loading"] == 0


def test_block_is_promoted_once_however_many_requests_want_it(rig, put):
    rig.keep([1])
    put(rig, 1)
    rig.manager.reset_cache()
    rig.held.add("get")
    load = rig.begin_load([1], [5])
    until(lambda: rig.tier_cls.entered["get"])
    others = [rig.request() for _ in range(3)]
    assert [rig.manager.lookup(key(1), each) for each in others] == [RETRY] * 3
    rig.tier_cls.gate.set()
    assert rig.end_load(*load)
    for block, context in zip((6, 7, 8), others, strict=True):
        assert rig.end_load(*rig.begin_load([1], [block], context))
        assert rig.is_right(block, 1)
    assert rig.tier_cls.entered["get"] == 1


def test_load_waits_for_another_one_that_fills_its_slot(rig, put):
    """Though a manager takes a promoted block for a hit only when its load has ended."""
    rig.keep([1])
    put(rig, 1)
    rig.held.add("get")
    jobs = [next(rig.jobs) for _ in range(2)]
    plans = [
        TierLoadStoreSpec([key(1)], promoted={0: 2}),
        TierLoadStoreSpec([key(1)], in_arena={0: 2}),
    ]
    for block, (job, plan) in enumerate(zip(jobs, plans, strict=True), 5):
        assert rig.workers[0].submit_load(job, plan, GPULoadStoreSpec([block]))
    until(lambda: rig.tier_cls.entered["get"])
    assert not any(map(rig.has_ended, jobs))
    rig.tier_cls.gate.set()
    assert [rig.success(job) for job in jobs] == [[True]] * 2
    assert rig.is_right(6, 1)


def test_prefix_that_is_longer_than_the_arena_is_loaded(rig, put):
    for number in range(1, 6):
        rig.keep([number])
        put(rig, number)
    assert rig.load([1, 2, 3, 4, 5], [5, 6, 7, 8, 9])
    assert all(rig.is_right(number + 4, number) for number in range(1, 6))


def test_load_needs_a_hit_of_arena_or_tier(rig):
    rig.keep([1])
    context = rig.request()
    assert rig.lookup([key(1), key(2)], context) == [HIT, MISS]
    with pytest.raises(BlockNotKeptError):
        rig.manager.prepare_load([key(1), key(2)], context)
    assert rig.stats()["blocks_loading"] == 0


@pytest.mark.parametrize("where", ["arena", "tier"])
def test_damaged_block_is_a_miss_until_it_is_stored_anew(rig, put, where):
    rig.keep([1, 2])
    put(rig, 1, 2)
    if where == "tier":
        rig.manager.reset_cache()
        rig.kept[own[1]] = rig.kept[own[1]][:-1] + bytes([rig.kept[own[1]][-1] ^ 1])
    else:
        rig.workers[0].links[0].part.slots[:, 3] ^= 1
    before = rig.content(5)
    assert not rig.load([1, 2], [5, 6])
    assert rig.content(5) == before
    assert rig.lookup([key(1), key(2)]) == [MISS, MISS]
    rig.keep([1, 2])
    assert rig.load([1, 2], [5, 6])
    assert rig.is_right(5, 1)
    rig.manager.reset_cache()
    put(rig, 1)
    assert rig.load([1], [7])
    assert rig.is_right(7, 1)


@pytest.mark.parametrize("where", ["header", "block"])
def test_any_damaged_byte_of_the_arena_is_refused(rig, put, where):
    """In the tier: `test_damaged_block_is_refused` of the kit."""
    rig.fill(0, 1)
    assert rig.success(rig.submit_store([key(1)], [0])) == [True]
    put(rig, 1)
    part, before = rig.workers[0].links[0].part, rig.content(5)
    good = part._headers[0].copy(), part.slots[0].copy()
    memory = part._headers if where == "header" else part.slots
    for n in range(memory.shape[1]):
        memory[0, n] ^= 1 << n % 8
        assert rig.success(rig.submit_load([key(1)], [5])) == [False], n
        assert rig.content(5) == before, n
        part._headers[0], part.slots[0] = good
    assert rig.success(rig.submit_load([key(1)], [5])) == [True]
    assert rig.is_right(5, 1)


def test_rank_that_cannot_promote_leaves_no_hit(put):
    with Rig(num_slots=3, num_ranks=2) as rig:
        rig.keep([1])
        other = rank_key(key(1), 1)
        put(rig, 1)
        until(lambda: other in rig.kept)
        rig.manager.reset_cache()
        load = rig.begin_load([1], [5])
        # Gone between look-up and load, or before: either way that rank has nothing.
        rig.kept.pop(other, None)
        if not rig.end_load(*load):
            assert rig.lookup([key(1)]) == [MISS]


def test_block_of_a_refused_load_is_no_hit_of_the_arena(rig, put):
    """As the weights changed meanwhile: a worker did not even begin it."""
    rig.keep([1])
    put(rig, 1)
    rig.manager.reset_cache()
    context = rig.request()
    rig.lookup([key(1)], context)
    rig.manager.prepare_load([key(1)], context)
    rig.manager.load_failed([key(1)], context, suspect=False)
    rig.manager.complete_load([key(1)], context)
    stats = rig.stats()
    assert (stats["blocks_idle"], stats["blocks_storing"], stats["blocks_loading"]) == (0, 0, 0)
    assert rig.load([1], [5])
    assert rig.is_right(5, 1)


def sent_again(rig):
    """Two requests with one id: the first one is aborted while its load runs."""
    contexts = [ReqContext("request") for _ in range(2)]
    for context in contexts:
        rig.manager.on_new_request(context)
    return contexts


def unused(rig):
    """Return whether no block of the arena is pinned."""
    stats = rig.stats()
    return stats["blocks_storing"] == stats["blocks_loading"] == 0


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_requests_with_one_id_pin_blocks_for_themselves(rig, order):
    rig.keep([1, 2])
    keys, contexts = [key(1), key(2)], sent_again(rig)
    for context in contexts:
        rig.manager.prepare_load(keys, context)
    rig.manager.on_request_finished(contexts[0])
    for number in order:
        assert rig.stats()["blocks_loading"] == 2
        rig.manager.complete_load(keys, contexts[number])
    assert unused(rig)
    assert rig.keep([3, 4, 5])


@pytest.mark.parametrize("answers", [{0: HIT, 1: HIT}, {1: RETRY, 0: HIT}])
def test_block_that_one_of_two_requests_with_one_id_promotes_becomes_a_hit(rig, put, answers):
    rig.keep([1])
    put(rig, 1)
    rig.manager.reset_cache()
    contexts = sent_again(rig)
    for context in contexts:
        assert rig.lookup([key(1)], context) == [HIT]
    plans = [rig.manager.prepare_load([key(1)], context) for context in contexts]
    assert [len(plan.promoted) for plan in plans] == [1, 0]
    for number, answer in answers.items():
        rig.manager.complete_load([key(1)], contexts[number])
        assert rig.manager.lookup(key(1), rig.request()) is answer
    assert unused(rig)


def test_request_that_was_aborted_ends_no_promotion_of_its_successor(rig, put):
    rig.keep([1])
    put(rig, 1)
    rig.manager.reset_cache()
    contexts, other = sent_again(rig), rig.request()
    keys = [key(2), key(3), key(4)]
    rig.manager.prepare_store(keys, other)
    rig.lookup([key(1)], contexts[0])
    assert not rig.manager.prepare_load([key(1)], contexts[0]).promoted
    rig.manager.complete_store(keys, other, success=False)
    rig.lookup([key(1)], contexts[1])
    assert rig.manager.prepare_load([key(1)], contexts[1]).promoted
    rig.manager.load_failed([key(1)], contexts[0], suspect=False)
    rig.manager.complete_load([key(1)], contexts[0])
    assert rig.manager.lookup(key(1), rig.request()) is RETRY
    rig.manager.complete_load([key(1)], contexts[1])
    assert rig.manager.lookup(key(1), rig.request()) is HIT
    assert unused(rig)


# -- stores


def test_slow_tier_misses_blocks_and_holds_up_no_store(rig):
    rig.held.add("put")
    for number in range(1, 9):
        assert rig.keep([number])
    assert rig.load([8, 7], [5, 6])
    rig.tier_cls.gate.set()
    until(lambda: rig.stats().get("puts_total", 0) + rig.stats().get("puts_dropped_total", 0) == 8)
    assert rig.stats()["puts_dropped_total"] >= 4
    rig.manager.reset_cache()
    for number in [n for n in range(1, 9) if own[n] in rig.kept]:
        assert rig.load([number], [9])
        assert rig.is_right(9, number)


def test_block_is_put_when_the_arena_evicts_it(put):
    with Rig(num_slots=2, num_io_threads=1, write_back=True) as rig:
        rig.keep([1, 2])
        assert rig.load([1, 2], [5, 6])
        assert not rig.kept
        rig.keep([3])
        put(rig, 2)
        assert own[3] not in rig.kept
        # One that was promoted gives way without being put again.
        puts = rig.tier_cls.entered["put"]
        assert rig.load([2], [7])
        assert rig.is_right(7, 2)
        rig.keep([4, 5])
        put(rig, 1, 3)
        assert rig.tier_cls.entered["put"] == puts + 2 - (puts == 2)


def test_evicted_block_of_other_weights_is_not_put():
    with Rig(num_slots=2, num_io_threads=1, write_back=True) as rig:
        rig.keep([1, 2], weights="before")
        rig.manager.weights_changed()
        rig.keep([1, 2])
        rig.keep([3, 4])
        until(lambda: own[1] in rig.kept and own[2] in rig.kept)
        assert set(rig.kept) == {own[1], own[2]}


def test_block_that_a_job_evicts_is_put_by_that_jobs_plan():
    """Also while a later job of its slot is in line, in whose plan nothing is outdated."""
    with Rig(num_slots=2, num_io_threads=1, write_back=True) as rig:

        def store(number, **more):
            rig.fill(number, number)
            job, source = next(rig.jobs), GPULoadStoreSpec([number])
            place = TierLoadStoreSpec([key(number)], in_arena={0: 0}, **more)
            assert rig.workers[0].submit_store(job, source, place)
            return job

        assert rig.success(store(1)) == [True]
        rig.held.add("get")
        both = TierLoadStoreSpec([key(1), key(9)], in_arena={0: 0})
        assert rig.workers[0].submit_load(next(rig.jobs), both, GPULoadStoreSpec([5, 6]))
        jobs = [store(2, outdated=[0]), store(3)]
        rig.tier_cls.gate.set()
        assert [rig.success(job) for job in jobs] == [[True]] * 2
        until(lambda: own[2] in rig.kept)
        assert own[1] not in rig.kept


BAD_PLANS = {
    "unknown slot": {"in_arena": {0: 3}},
    "negative slot": {"in_arena": {0: -1}},
    "unknown place": {"in_arena": {2: 0}},
    "unknown slot for what is promoted": {"promoted": {0: 3}},
    "slot beyond 64 bits": {"in_arena": {0: 1 << 70}},
    "slot beyond 63 bits": {"in_arena": {0: 1 << 63}},
    "place beyond 64 bits": {"promoted": {1 << 70: 0}},
    "half a slot": {"in_arena": {0: 1.5}},
    "half a place": {"in_arena": {0.5: 1}},
    "no slot": {"in_arena": {0: None}},
    "slot that is read and promoted to": {"in_arena": {0: 1}, "promoted": {1: 1}},
    "place that is read and promoted": {"in_arena": {0: 1}, "promoted": {0: 2}},
    "slots without places": {"promoted": [0]},
    "no slots": {"outdated": None},
    "no keys to rewrite": {"rewritten": None},
    "numbers to rewrite": {"rewritten": [1]},
    "bytes of a key to rewrite": {"rewritten": b"key"},
    "text to rewrite": {"rewritten": "key"},
}


@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("bad", BAD_PLANS)
def test_plan_that_makes_no_sense_fails(rig, kind, bad):
    job, cache = next(rig.jobs), GPULoadStoreSpec([5, 6])
    plan = TierLoadStoreSpec([key(1), key(2)], **BAD_PLANS[bad])
    sides = (cache, plan) if kind == "store" else (plan, cache)
    assert getattr(rig.workers[0], f"submit_{kind}")(job, *sides)
    assert rig.success(job) == [False]
    assert rig.stats()[f"{kind}s_failed_malformed_total"] == 1


def test_slow_tier_delays_a_store_that_evicts_once():
    with Rig(num_slots=1, buffer_bytes=1, num_io_threads=1, write_back=True) as rig:
        rig.held.add("put")
        began = time.monotonic()
        for number in range(1, 31):
            assert rig.keep([number])
        assert time.monotonic() - began < 10 * tier_link.STALL_S
        assert rig.stats()["puts_dropped_total"] >= 4
        rig.tier_cls.gate.set()
        until(lambda: rig.kept)


class SlowPut(Gate):
    """A tier that keeps each block a while later."""

    def put(self, key, data):
        time.sleep(0.3)
        super().put(key, data)


def test_slow_tier_delays_a_store_of_several_blocks_by_one_wait():
    with Rig(
        tier_cls=SlowPut, num_slots=6, buffer_bytes=1, num_io_threads=1, write_back=True
    ) as rig:
        rig.keep([0, 1, 2, 3, 4, 5])
        assert rig.keep([6, 7, 8, 9, 10, 11])
        # A wait for each would last until each is put: six times 0.3 s.
        assert rig.stats()["puts_dropped_total"] >= 1


def test_blocks_that_wait_to_be_put_are_bounded():
    with Rig(num_slots=3, buffer_bytes=1, num_io_threads=1) as rig:
        rig.held.add("put")
        for number in range(40):
            assert rig.keep([number])
        assert rig.stats()["puts_waiting"] < 15
        assert rig.stats()["puts_dropped_total"] > 20


@pytest.mark.parametrize("num_slots", [0, 8])
def test_shutdown_drops_puts_that_have_not_begun(num_slots, monkeypatch):
    monkeypatch.setattr(tier_link, "END_S", 20.0)

    class EndingPut(Gate):
        """A tier whose put ends when those behind it are to be dropped."""

        def put(self, key, data):
            super().put(key, data)
            until(lambda: rig.workers[0].links[-1]._is_ending)

    with Rig(tier_cls=EndingPut, num_slots=num_slots, num_io_threads=1) as rig:
        context = rig.request()
        keys = [key(number) for number in range(8)]
        room = rig.manager.prepare_store(keys, context)
        worker = rig.workers[0]
        assert worker.submit_store(99, GPULoadStoreSpec(list(range(8))), room.store_spec)
        until(lambda: worker.get_stats()["puts_waiting"] == 7)
        worker.shutdown()
        assert rig.tier_cls.entered["close"] == rig.tier_cls.entered["put"] == 1


def test_block_without_room_in_the_arena_goes_to_the_tier(rig, put):
    rig.keep([1, 2, 3])
    load = rig.begin_load([1, 2, 3], [5, 6, 7])
    rig.fill(0, 1)
    assert rig.keep([1, 4], [0, 9])
    put(rig, 1, 2, 3, 4)
    assert rig.stats()["puts_total"] == 4
    assert rig.end_load(*load)
    assert rig.load([4], [5])
    assert rig.is_right(5, 4)


@pytest.mark.parametrize("num_slots", [0, 3])
def test_block_is_stored_when_it_was_offered_often_enough(num_slots):
    with Rig(num_slots=num_slots, store_threshold=3) as rig:
        for _ in range(2):
            rig.keep([1, 2])
            assert rig.lookup([key(1)]) == [MISS]
        rig.keep([1])
        assert rig.lookup([key(1), key(2)]) == [HIT, MISS]


def test_shutdown_puts_what_it_can_and_drops_the_rest():
    with Rig(num_slots=8, num_io_threads=1) as rig:
        rig.keep([1, 2, 3])
    assert {own[1], own[2], own[3]} <= rig.kept.keys()
    with Rig(num_slots=8, num_io_threads=1) as rig:
        rig.held.add("put")
        rig.keep([1, 2, 3])
        began = time.monotonic()
        rig.workers[0].shutdown()
        assert time.monotonic() - began < 15
        # The call that hangs: whatever it still writes goes to a buffer's block, whole.
        rig.tier_cls.gate.set()


# -- tiers that fail, and tiers that are slow


def test_failing_tier_is_left_alone_and_tried_again(rig, monkeypatch, later):
    monkeypatch.setattr(tier, "PAUSE_S", 60.0)
    rig.failing.update({"contains", "put", "get"})
    for number in range(tier.FAILURES):
        assert rig.lookup([key(number)]) == [MISS]
    calls = rig.tier_cls.entered["contains"]
    assert rig.lookup([key(7), key(8)]) == [MISS, MISS]
    assert rig.tier_cls.entered["contains"] == calls
    assert rig.stats()["lookups_paused_total"] >= 2
    for number in range(1, tier.FAILURES + 1):
        assert rig.keep([number])
        # Each by itself: several puts that wait fail as one batch.
        until(lambda number=number: rig.stats().get("put_failures_ConnectionError_total") == number)
    calls = rig.tier_cls.entered["contains"]
    assert rig.keep([number + 1])
    until(lambda: rig.stats().get("puts_paused_total"))
    assert rig.tier_cls.entered["contains"] == calls
    rig.failing.clear()
    later(61)
    until(lambda: rig.keep([9]) and rig.manager.reset_cache() is False and own[9] in rig.kept)
    assert rig.load([9], [5])
    assert rig.is_right(5, 9)


class Slow(Gate):
    """A tier that takes its time."""

    def get(self, key, into):
        time.sleep(0.01)
        return super().get(key, into)


@pytest.mark.parametrize(
    ("skip_slow_loads", "seconds_per_token", "expected"),
    [(True, 1e-6, MISS), (False, 1e-6, HIT), (True, 1.0, HIT), (True, None, HIT)],
)
def test_load_that_loses_to_computing_is_left(skip_slow_loads, seconds_per_token, expected):
    with Rig(tier_cls=Slow, skip_slow_loads=skip_slow_loads) as rig:
        rig.keep([1])
        rig.manager.on_schedule_end(ScheduleEndContext(seconds_per_token=seconds_per_token))
        for _ in range(payoff.MIN_LOADS):
            assert rig.load([1], [5])
        assert rig.lookup([key(1)]) == [expected]
        stats = rig.stats()
        assert stats["compute_seconds_per_block"] == pytest.approx(16 * (seconds_per_token or 0))
        assert stats["load_seconds_per_block"] >= 0.01
        assert ("loads_skipped_total" in stats) == (expected is MISS)


# -- events of a tier that is left alone


def told(rig):
    """Return the events since the last call: keys, and whether they were removed."""
    return [(list(each.keys), each.removed) for each in rig.manager.take_events()]


def test_block_is_told_as_removed_while_its_tier_is_left_alone(monkeypatch, later):
    monkeypatch.setattr(tier_manager, "LOOKUP_S", 30.0)
    monkeypatch.setattr(tier, "PAUSE_S", 60.0)
    with Rig(tells=True) as rig:
        rig.keep([1])
        assert told(rig) == [([key(1)], False)]
        for number in range(tier.FAILURES):
            rig.failing.add("contains")
            assert rig.lookup([key(10 + number)]) == [MISS]
        assert told(rig) == []
        assert rig.lookup([key(1)]) == [MISS]
        assert told(rig) == [([key(1)], True)]
        # Once, however often it is asked for, and again when it is found.
        assert rig.lookup([key(1)]) == [MISS]
        assert told(rig) == []
        rig.failing.clear()
        later(61)
        assert rig.lookup([key(1)]) == [HIT]
        assert told(rig) == [([key(1)], False)]


def test_block_is_told_as_removed_while_its_tier_hangs(monkeypatch, later):
    monkeypatch.setattr(tier_manager, "LOOKUP_S", 30.0)
    with Rig(tells=True) as rig:
        rig.keep([1])
        assert told(rig) == [([key(1)], False)]
        rig.held.add("contains")
        context = rig.request()
        assert rig.manager.lookup(key(1), context) is RETRY
        until(lambda: rig.tier_cls.entered["contains"])
        later(31)
        assert rig.lookup([key(1)], context) == [MISS]
        assert told(rig) == [([key(1)], True)]
        rig.held.clear()
        rig.tier_cls.gate.set()
        until(lambda: rig.stats().get("lookups_total"))
        assert rig.lookup([key(1)]) == [HIT]
        assert told(rig) == [([key(1)], False)]


def test_block_is_told_as_removed_while_its_tier_loses_to_computing(later):
    with Rig(tier_cls=Slow, tells=True) as rig:
        rig.keep([1])
        rig.manager.on_schedule_end(ScheduleEndContext(seconds_per_token=1e-6))
        for _ in range(payoff.MIN_LOADS):
            assert rig.load([1], [5])
        assert told(rig) == [([key(1)], False)]
        assert rig.lookup([key(1)]) == [MISS]
        assert told(rig) == [([key(1)], True)]
        later(payoff.LEAVE_S)
        assert rig.lookup([key(1)]) == [HIT]
        assert told(rig) == [([key(1)], False)]


def test_load_counts_from_its_own_beginning_while_another_one_hangs(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(payoff.time, "monotonic", lambda: now[0])
    measured = payoff.Payoff(tokens_per_block=16)
    for number in range(payoff.MIN_LOADS):
        began = now[0] = 0.5 * (number + 1)
        now[0] += 0.002
        measured.end(1, began)
    assert measured.numbers()["load_seconds_per_block"] == pytest.approx(0.002)
    # Side by side with the last one: it counts from its end.
    now[0] += 0.001
    measured.end(1, 0.0)
    number = payoff.MIN_LOADS + 1
    expected = (payoff.MIN_LOADS * 0.002 + 0.001) / number
    assert measured.numbers()["load_seconds_per_block"] == pytest.approx(expected)


def test_loads_that_lose_are_measured_again(monkeypatch):
    monkeypatch.setattr(payoff, "LEAVE_S", 0.2)
    with Rig(tier_cls=Slow) as rig:
        rig.keep([1])
        rig.manager.on_schedule_end(ScheduleEndContext(seconds_per_token=1e-6))
        for _ in range(payoff.MIN_LOADS):
            assert rig.load([1], [5])
        assert rig.lookup([key(1)]) == [MISS]
        time.sleep(0.25)
        assert rig.load([1], [5])


# -- tiers with batches, and with memory of their own


class Batches(Gate):
    """A tier with batches, which notes them."""

    sizes: list
    memory = None

    def register_memory(self, memory):
        self.memory = memory

    def put_many(self, items):
        self.call("put_many")
        self.sizes.append(("put", len(items), all(self.is_registered(each[1]) for each in items)))
        super().put_many(items)

    def get_many(self, items):
        self.call("get_many")
        self.sizes.append(("get", len(items), all(self.is_registered(each[1]) for each in items)))
        return super().get_many(items)

    def is_registered(self, data):
        return data.obj.base is self.memory.obj.base or data.obj.base is self.memory.obj


@pytest.mark.parametrize("num_slots", [0, 16])
def test_tier_with_batches_is_given_several_blocks_at_once(put, num_slots):
    batches = type("Own", (Batches,), {"sizes": []})
    with Rig(tier_cls=batches, num_slots=num_slots, num_io_threads=1) as rig:
        numbers = list(range(1, 9))
        rig.held.add("contains")
        assert rig.keep(numbers) if num_slots else True
        rig.held.clear()
        rig.tier_cls.gate.set()
        rig.keep(numbers)
        put(rig, *numbers)
        rig.manager.reset_cache()
        assert rig.load(numbers, list(range(8)))
        assert all(rig.is_right(block, block + 1) for block in range(8))
        assert max(size for name, size, _ in batches.sizes if name == "get") == 8
        assert all(registered for _, _, registered in batches.sizes)


def test_load_of_few_blocks_is_divided_among_the_threads():
    batches = type("Own", (Batches,), {"sizes": []})
    with Rig(tier_cls=batches, num_io_threads=2) as rig:
        rig.keep(list(range(1, 8)))
        assert rig.load(list(range(1, 8)), list(range(7)))
        assert sorted(size for name, size, _ in batches.sizes if name == "get") == [3, 4]


@pytest.mark.parametrize("what", ["missing", "damaged", "failing"])
def test_block_that_spoils_a_batch_leaves_those_before_it(what):
    with Rig(tier_cls=type("Own", (Batches,), {"sizes": []}), num_io_threads=1) as rig:
        rig.keep([1, 2, 3])
        before = [rig.content(block) for block in (5, 6, 7)]
        load = None
        rig.held.add("get_many")
        load = rig.begin_load([1, 2, 3], [5, 6, 7])
        if what == "missing":
            del rig.kept[own[2]]
        elif what == "damaged":
            rig.kept[own[2]] = bytes(len(rig.kept[own[2]]))
        else:
            rig.failing.add("get")
        rig.held.clear()
        rig.tier_cls.gate.set()
        assert not rig.end_load(*load)
        assert [rig.content(block) for block in (6, 7)] == before[1:]
        assert rig.lookup([key(1)]) == [MISS]


# -- names and options


@pytest.mark.parametrize(
    "options",
    [
        {"spec_name": "file"},
        {"tier": "file"},
        {"spec_name": "TieringOffloadingSpec", "tier": "file"},
    ],
)
def test_tier_is_named_in_either_option(tmp_path, options):
    extra = {**options, "shared_storage_path": str(tmp_path), "cpu_bytes_to_use": 1e6}
    config = OffloadingConfig(extra_config=extra, worker_kv_bytes_per_block=4096)
    spec = OffloadingSpecFactory.create_spec(config)
    assert spec.layout.num_slots > 200
    manager = spec.get_manager()
    assert manager.get_stats()["slots"] == spec.layout.num_slots
    manager.shutdown()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"spec_name": "TieringOffloadingSpec"}, "needs the option tier"),
        ({"tier": "CPUOffloadingSpec"}, "'CPUOffloadingSpec' is an offloading spec, and no tier"),
        ({"spec_name": "file", "tier": "acme"}, "spec_name='file' and tier='acme': name one"),
        ({"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 1e6, "tier": "file"}, "`tier`"),
        ({"tier": "file", "cpu_bytes_to_use": 7}, "too little for one block"),
        ({"tier": "file", "cpu_bytes_to_use": -7}, "cpu_bytes_to_use"),
        ({"tier": "file", "store_threshold": 0}, "store_threshold"),
        ({"tier": "file", "write_back": "x"}, "write_back"),
        ({"tier": "file", "write_back": True}, "write_back is about an arena .* cpu_bytes_to_use"),
        ({"tier": "file", "eviction_policy": "lru"}, "eviction_policy is about an arena"),
    ],
)
def test_option_that_cannot_be_used_is_refused(tmp_path, options, error):
    extra = {**options, "shared_storage_path": str(tmp_path)}
    config = OffloadingConfig(extra_config=extra, worker_kv_bytes_per_block=4096)
    with pytest.raises(OffloadingOptionError, match=error):
        OffloadingSpecFactory.create_spec(config)


# -- everything in any order


@pytest.mark.parametrize("write_back", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_successful_loads_are_right_under_random_events(seed, write_back, monkeypatch):
    monkeypatch.setattr(tier, "PAUSE_S", 0.01)
    monkeypatch.setattr(tier_manager, "FAILED_S", 0.01)
    dice = random.Random(seed)
    num_loads, under_way, free_blocks = 0, [], set(range(NUM_BLOCKS))

    def end(load, numbers, blocks):
        nonlocal num_loads
        if rig.end_load(*load):
            num_loads += len(numbers)
            right = [rig.is_right(*each) for each in zip(blocks, numbers, strict=True)]
            assert all(right)
        free_blocks.update(blocks)

    def lookup(keys, context):
        while True:
            found = [rig.manager.lookup(each, context) for each in keys]
            if RETRY not in found:
                return found
            if under_way:
                # It may be this one that promotes them.
                end(*under_way.pop(0))
            time.sleep(0.001)

    with Rig(num_slots=4, num_ranks=2, write_back=write_back, buffer_bytes=1000) as rig:
        for _ in range(150):
            numbers = dice.sample(range(10), dice.randint(1, 5))
            few = ["damage", "lose", "fail", "mend", "reset", "refuse"]
            action = dice.choice(["keep"] * 4 + ["load"] * 6 + ["end"] * 2 + few)
            if action == "keep":
                rig.keep(numbers, dice.sample(sorted(free_blocks), len(numbers)))
            elif action in ("load", "refuse"):
                context = rig.request()
                found = lookup([key(n) for n in numbers], context)
                numbers = [n for n, each in zip(numbers, found, strict=True) if each is HIT]
                keys = [key(n) for n in numbers]
                if action == "refuse":
                    rig.manager.prepare_load(keys, context)
                    rig.manager.load_failed(keys, context, suspect=False)
                    rig.manager.complete_load(keys, context)
                    continue
                blocks = dice.sample(sorted(free_blocks), len(numbers))
                try:
                    load = rig.begin_load(numbers, blocks, context)
                except (AssertionError, BlockNotKeptError):
                    continue
                free_blocks.difference_update(blocks)
                under_way.append((load, numbers, blocks))
                if len(under_way) > 2:
                    end(*under_way.pop(0))
            elif action == "end" and under_way:
                end(*under_way.pop(dice.randrange(len(under_way))))
            elif action == "damage" and rig.kept:
                name = dice.choice(list(rig.kept))
                data = bytearray(rig.kept[name])
                data[dice.randrange(len(data))] ^= 1
                rig.kept[name] = bytes(data)
            elif action == "lose" and rig.kept:
                rig.kept.pop(dice.choice(list(rig.kept)), None)
            elif action == "fail":
                rig.failing.add(dice.choice(["contains", "put", "get", "remove"]))
            elif action == "reset":
                rig.manager.reset_cache()
            else:
                rig.failing.clear()
        while under_way:
            end(*under_way.pop())
        stats = rig.stats()
        assert stats["blocks_storing"] == stats["blocks_loading"] == 0
        assert stats["slots_free"] + stats["blocks_idle"] == 4
    assert num_loads > 5
