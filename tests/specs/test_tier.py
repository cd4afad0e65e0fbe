"""A spec over any tier: whatever a store of bytes does, a hit is the right block."""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import re
import threading
import time
import weakref
from dataclasses import dataclass

import pytest
from tier_rig import NUM_BLOCKS, NUM_LAYERS, PAGE, PATIENCE_S, Gate, Rig, key, until

from wtransfer.config import OffloadingConfig
from wtransfer.errors import BlockNotKeptError, OffloadingOptionError, PluginTypeError
from wtransfer.kv.cache_view import HostPages
from wtransfer.kv.header import HEADER_NBYTES
from wtransfer.specs import tier as tier_module
from wtransfer.specs import tier_link
from wtransfer.specs.factory import OffloadingSpecFactory
from wtransfer.specs.interface import (
    GPULoadStoreSpec,
    LookupResult,
)
from wtransfer.specs.jobs import CopyThreads
from wtransfer.specs.tier import TierLoadStoreSpec, open_tier, rank_key
from wtransfer.specs.tier_link import STALL_S
from wtransfer.specs.tier_manager import FAILED_S, LOOKUP_S
from wtransfer.specs.tier_spec import tier_spec
from wtransfer.testing.fakes import MemoryTier, MemoryTierOptions

pytestmark = pytest.mark.usefixtures("leaves_nothing")


class StillWriting(Gate):
    """A client that goes on writing to the memory of a `get` that has returned."""

    given: list

    def get(self, key, into):
        self.given.append(into)
        return super().get(key, into)

    @classmethod
    def write(cls):
        for into in cls.given:
            into[HEADER_NBYTES:] = bytes(len(into) - HEADER_NBYTES)


@pytest.fixture
def rig():
    with Rig() as made:
        yield made


# -- blocks


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_blocks_come_back_on_all_ranks(num_ranks):
    with Rig(num_ranks=num_ranks) as rig:
        assert rig.store([3, 1, 4]) == [True] * num_ranks
        expected = [rig.content(block) for block in range(3)]
        keys = [key(n) for n in (3, 1, 4)]
        assert rig.lookup([*keys, key(9)]) == [LookupResult.HIT] * 3 + [LookupResult.MISS]
        assert all(rig.success(rig.submit_load(keys, [7, 9, 8])))
        assert [rig.content(block) for block in (7, 9, 8)] == expected
        assert {len(data) for data in rig.kept.values()} == {HEADER_NBYTES + NUM_LAYERS * PAGE}


def test_chunk_of_several_blocks_is_loaded_from_its_middle_on():
    with Rig(blocks_per_chunk=2) as rig:
        for block in range(4):
            rig.fill(block, block)
        keys = [key(1), key(2)]
        assert rig.success(rig.submit_store(keys, [0, 1, 2, 3])) == [True]
        before = rig.content(8)
        assert rig.success(rig.submit_load(keys, [5, 6, 7], block_indices=[1])) == [True]
        assert [rig.content(n) for n in (5, 6, 7)] == [rig.content(n) for n in (1, 2, 3)]
        assert rig.content(8) == before


def test_part_of_a_chunk_is_not_stored():
    with Rig(blocks_per_chunk=2) as rig:
        job = rig.submit_store([key(1), key(2)], [1, 2, 3], block_indices=[1])
        assert rig.success(job) == [False]
        assert rank_key(key(1), 0) not in rig.kept


def test_hit_needs_the_part_of_every_rank():
    with Rig(num_ranks=2) as rig:
        rig.store([1, 2])
        del rig.kept[rank_key(key(1), 1)]
        assert rig.lookup([key(1), key(2)]) == [LookupResult.MISS, LookupResult.HIT]


def test_block_that_is_there_is_not_put_again(rig):
    rig.store([1])
    puts = rig.tier_cls.entered["put"]
    assert rig.store([1]) == [True]
    assert rig.tier_cls.entered["put"] == puts
    assert rig.workers[0].get_stats()["puts_skipped_total"] == 1


def test_load_needs_a_hit(rig):
    context = rig.request()
    rig.store([1])
    with pytest.raises(BlockNotKeptError):
        rig.manager.prepare_load([key(1)], context)
    rig.lookup([key(1), key(2)], context)
    assert rig.manager.prepare_load([key(1)], context).keys == [key(1)]
    with pytest.raises(BlockNotKeptError):
        rig.manager.prepare_load([key(1), key(2)], context)


def test_end_of_a_prefix_is_put_first():
    """A tier that evicts what was used longest ago keeps the head."""
    with Rig(num_io_threads=1) as rig:
        rig.store([1, 2, 3])
        assert list(rig.kept) == [rank_key(key(n), 0) for n in (3, 2, 1)]


def test_request_finds_what_it_has_stored(rig):
    context = rig.request()
    assert rig.lookup([key(1)], context) == [LookupResult.MISS]
    rig.manager.prepare_store([key(1)], context)
    rig.store([1])
    rig.manager.complete_store([key(1)], context)
    assert rig.lookup([key(1)], context) == [LookupResult.HIT]


def test_store_takes_each_new_key_once(rig):
    rig.store([1])
    first, second = rig.request(), rig.request()
    rig.lookup([key(1)], first)
    keys = [key(n) for n in (3, 1, 2, 3)]
    assert rig.manager.prepare_store(keys, first).keys_to_store == [key(3), key(2)]
    assert rig.manager.prepare_store([key(2), key(4)], second).keys_to_store == [key(4)]
    rig.manager.complete_store([key(2)], first, success=False)
    assert rig.manager.prepare_store([key(2)], second).keys_to_store == [key(2)]


def test_refused_load_keeps_no_cache_after_shutdown():
    """Also where the host has switched the collector off."""
    gc.collect()
    gc.disable()
    try:
        with Rig() as rig:
            assert rig.success(rig.submit_load([key(1)], [0])) == [False]
            pages = weakref.ref(rig.workers[0].links[0].copiers[0].pages)
        assert pages() is None
    finally:
        gc.enable()


CANNOT_BE_OPENED = {
    "no memory": (tier_link, "_Buffers", MemoryError(), "buffer_bytes=134,217,728: there is not"),
    "not registered": (Gate, "register_memory", OffloadingOptionError("no card"), "no card"),
}


@pytest.mark.parametrize("num_slots", [0, 3])
@pytest.mark.parametrize(
    ("owner", "name", "error", "text"), CANNOT_BE_OPENED.values(), ids=CANNOT_BE_OPENED
)
def test_worker_that_cannot_be_made_closes_its_tier(
    monkeypatch, num_slots, *, owner, name, error, text
):
    closed = []

    def fail(*_):
        raise error

    def close(tier):
        closed.append(tier)

    monkeypatch.setattr(owner, name, fail)
    monkeypatch.setattr(Gate, "close", close)
    before = set(threading.enumerate())
    with pytest.raises(OffloadingOptionError, match=text):
        Rig(num_slots=num_slots)
    assert len(closed) == 1
    assert set(threading.enumerate()) <= before


# -- stores that are damaged: FAULTS 30, 32; every byte of a block in the kit


def test_blocks_of_a_failed_load_are_all_stored_anew(rig):
    """Also those that the load has not come to."""
    keys = [key(n) for n in range(8)]
    rig.store(range(8))
    good = dict(rig.kept)
    for own in rig.kept:
        rig.kept[own] = bytes(len(good[own]))
    assert rig.success(rig.submit_load(keys, [*range(8)])) == [False]
    rig.manager.load_failed(keys, rig.request(), suspect=True)
    for block in range(8):
        rig.fill(block, block)
    context = rig.request()
    places = rig.manager.prepare_store(keys, context).store_spec
    job = next(rig.jobs)
    assert rig.workers[0].submit_store(job, GPULoadStoreSpec([*range(8)]), places)
    assert rig.success(job) == [True]
    rig.manager.complete_store(keys, context)
    assert rig.lookup(keys) == [LookupResult.HIT] * 8
    assert rig.success(rig.submit_load(keys, [*range(8, 16)])) == [True]
    assert rig.kept == good


def test_block_of_another_layout_is_refused():
    with Rig(shelf="two layouts") as first, Rig(shelf="two layouts", page=2 * PAGE) as second:
        first.store([1])
        assert second.success(second.submit_load([key(1)], [5])) == [False]


def test_part_of_another_rank_is_refused():
    with Rig(num_ranks=2) as rig:
        rig.store([1])
        rig.kept[rank_key(key(1), 1)] = rig.kept[rank_key(key(1), 0)]
        assert rig.success(rig.submit_load([key(1)], [5])) == [True, False]


def test_key_whose_load_failed_is_a_miss_for_a_while(rig, monkeypatch):
    rig.store([1])
    assert rig.manager.load_failed([key(1)], rig.request(), suspect=True) is True
    assert rig.lookup([key(1)]) == [LookupResult.MISS]
    # And it may be stored again.
    context = rig.request()
    assert rig.manager.prepare_store([key(1)], context).keys_to_store == [key(1)]
    rig.manager.complete_store([key(1)], context)
    assert rig.lookup([key(1)]) == [LookupResult.HIT]
    assert rig.manager.load_failed([key(1)], rig.request(), suspect=True) is True
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + FAILED_S + 1)
    context = rig.request()
    while (found := rig.manager.lookup(key(1), context)) is LookupResult.RETRY:
        time.sleep(0.001)
    assert found is LookupResult.HIT


def test_failed_load_costs_the_same_however_many_have_failed(rig, counted):
    spent = []
    for first in range(0, 2000, 2):
        before = counted.lookups
        keys = [counted(key(first)), counted(key(first + 1))]
        rig.manager.load_failed(keys, rig.request(), suspect=True)
        spent.append(counted.lookups - before)
    assert set(spent[1:]) == {spent[0]}


# -- stores that fail


@pytest.mark.parametrize("call", ["contains", "put"])
def test_failed_put_fails_its_store_alone(rig, call):
    rig.failing.add(call)
    assert rig.store([1]) == [False]
    rig.failing.clear()
    assert rig.lookup([key(1)]) == [LookupResult.MISS]
    assert rig.store([1]) == [True]
    assert rig.lookup([key(1)]) == [LookupResult.HIT]
    assert rig.workers[0].get_stats()["put_failures_ConnectionError_total"] == 1


def test_failed_lookup_is_a_miss(rig):
    rig.store([1])
    rig.failing.add("contains")
    assert rig.lookup([key(1)]) == [LookupResult.MISS]
    rig.failing.clear()
    assert rig.lookup([key(1)]) == [LookupResult.HIT]
    assert rig.manager.get_stats()["lookup_failures_total"] == 1


def test_lookup_with_too_few_answers_is_a_miss(rig, monkeypatch):
    rig.store([1])
    monkeypatch.setattr(rig.tier_cls, "contains", lambda self, keys: [])
    assert rig.lookup([key(1)]) == [LookupResult.MISS]


@pytest.mark.parametrize("failing", [{"get"}, {"get", "remove"}])
def test_failed_get_fails_its_load_and_keeps_the_block(rig, failing):
    rig.store([1])
    before = rig.content(5)
    rig.failing.update(failing)
    assert rig.success(rig.submit_load([key(1)], [5])) == [False]
    assert rig.content(5) == before
    rig.failing.clear()
    assert rig.success(rig.submit_load([key(1)], [5])) == [True]
    # It is there, and is put again: what could not be read may be broken on the disk.
    puts = rig.tier_cls.entered["put"]
    assert rig.store([1]) == [True]
    assert rig.tier_cls.entered["put"] == puts + 1


class PanicError(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("call", ["contains", "put", "get"])
def test_tier_that_panics_is_used_again(call, monkeypatch):
    monkeypatch.setattr(tier_module, "PAUSE_S", 0.0)
    with Rig() as rig:
        rig.tier_cls.error = PanicError
        assert rig.keep([1])
        rig.failing.add(call)
        # More often than there are threads.
        for number in range(2, 5):
            assert rig.store([number]) == [call == "get"]
            assert rig.lookup([key(0)]) == [LookupResult.MISS]
            assert rig.success(rig.submit_load([key(1)], [5])) == [call != "get"]
        rig.failing.clear()
        assert rig.keep([6])
        assert rig.lookup([key(1), key(6)]) == [LookupResult.HIT] * 2


# -- stores that hang


def test_lookup_in_a_tier_that_hangs_is_a_miss_soon(rig):
    # It hangs for longer than `lookup` waits for an answer.
    rig.held.add("contains")
    assert rig.lookup([key(1), key(2)]) == [LookupResult.MISS] * 2
    # Further requests do not wait at all, once the call itself is late: it may have begun after the
    # first request asked.
    end = time.monotonic() + PATIENCE_S
    while rig.manager.lookup(key(3), rig.request()) is LookupResult.RETRY:
        assert time.monotonic() < end
        time.sleep(0.01)
    rig.tier_cls.gate.set()
    rig.held.clear()
    end = time.monotonic() + PATIENCE_S
    while rig.manager.lookup(key(3), rig.request()) is LookupResult.MISS:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_answer_is_used_once_however_long_the_steps_are(rig, monkeypatch):
    rig.store([1])
    context, begun, num_asked = rig.request(), time.monotonic(), itertools.count(1)

    def ask():
        """Return once the tier has answered; the answer is not used yet."""
        assert rig.manager.lookup(key(1), context) is LookupResult.RETRY
        due = next(num_asked)
        while rig.manager.get_stats().get("lookup_hits_total", 0) < due:
            time.sleep(0.001)

    ask()
    for later_s in (0.9, 1.8):
        monkeypatch.setattr(time, "monotonic", lambda later_s=later_s: begun + later_s)
        assert rig.manager.lookup(key(1), context) is LookupResult.HIT
        assert rig.manager.lookup(key(1), context) is LookupResult.HIT
        monkeypatch.setattr(time, "monotonic", lambda later_s=later_s: begun + later_s + 0.6)
        ask()


def test_lookup_waits_for_a_tier_that_is_not_late(rig, monkeypatch):
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    rig.held.add("contains")
    rig.manager.lookup(key(1), rig.request())
    while not rig.tier_cls.entered["contains"]:
        time.sleep(0.001)
    assert rig.manager.lookup(key(2), rig.request()) is LookupResult.RETRY
    now[0] += LOOKUP_S + 0.1
    assert rig.manager.lookup(key(3), rig.request()) is LookupResult.MISS


def test_lookup_that_no_thread_answers_is_a_miss(rig, monkeypatch):
    """As in a forked child."""
    monkeypatch.setattr(CopyThreads, "submit", lambda self, call: None)
    context, clock = rig.request(), time.monotonic
    assert rig.manager.lookup(key(1), context) is LookupResult.RETRY
    monkeypatch.setattr(time, "monotonic", lambda: clock() + LOOKUP_S + 0.1)
    assert rig.manager.lookup(key(1), context) is LookupResult.MISS


@pytest.mark.parametrize("num_slots", [0, 4], ids=["alone", "under an arena"])
def test_late_write_of_a_client_reaches_no_cache(monkeypatch, num_slots):
    """The bytes that were verified are the ones that are copied."""
    scatter, seen = HostPages.scatter, []

    def write_then_copy(*args):
        # Verified by now, and not copied yet.
        rig.tier_cls.write()
        seen.append(len(rig.tier_cls.given))
        return scatter(*args)

    monkeypatch.setattr(StillWriting, "given", [], raising=False)
    with Rig(num_slots=num_slots, tier_cls=StillWriting) as rig:
        assert rig.store([3, 1]) == [True] if not num_slots else rig.keep([3, 1])
        if num_slots:
            rig.manager.reset_cache()
            until(lambda: len(rig.kept) == 2)
        monkeypatch.setattr(HostPages, "scatter", write_then_copy)
        # One after the other: a block whose call has not returned may well be refused.
        for number, block in ((3, 7), (1, 9)):
            assert rig.load([number], [block])
            assert rig.is_right(block, number)
        assert seen
        # What came to the arena on the way is right as well.
        for number, block in ((3, 5), (1, 6)):
            assert rig.load([number], [block])
            assert rig.is_right(block, number)


def test_late_load_fails_and_writes_nothing(later):
    with Rig(deadline_s=60.0) as rig:
        rig.store([1])
        before = rig.content(5)
        rig.held.add("get")
        job = rig.submit_load([key(1)], [5])
        until(lambda: rig.tier_cls.entered["get"])
        later(61)
        assert rig.success(job) == [False]
        rig.held.clear()
        rig.tier_cls.gate.set()
        # What hung has come to its end when a later load has.
        for _ in range(4):
            assert rig.success(rig.submit_load([key(1)], [6])) == [True]
        assert rig.content(5) == before
        assert rig.workers[0].get_stats()["loads_failed_slow_total"] == 1


def test_put_that_hangs_holds_no_block_of_the_cache(rig):
    rig.held.add("put")
    rig.fill(0, 1)
    job = rig.submit_store([key(1)], [0])
    rig.workers[0].wait({job})
    assert rig.workers[0].get_released() == {job}
    assert not rig.has_ended(job)
    expected = rig.content(0)
    rig.fill(0, 2)
    rig.tier_cls.gate.set()
    assert rig.success(job) == [True]
    assert rig.success(rig.submit_load([key(1)], [5])) == [True]
    assert rig.content(5) == expected


def test_stores_fail_at_once_while_all_buffers_are_held(monkeypatch):
    block = HEADER_NBYTES + NUM_LAYERS * PAGE
    with Rig(buffer_bytes=2 * block, deadline_s=60.0) as rig:
        rig.held.add("put")
        held = [rig.submit_store([key(n)], [n]) for n in range(2)]
        rig.workers[0].wait(set(held))
        # The first one waits for a moment; those after it do not.
        assert rig.success(rig.submit_store([key(2)], [2])) == [False]
        begun = time.monotonic()
        for n in range(3, 33):
            assert rig.success(rig.submit_store([key(n)], [3])) == [False]
        assert time.monotonic() - begun < 10 * STALL_S
        rig.tier_cls.gate.set()
        assert [rig.success(job) for job in held] == [[True], [True]]
        # From then on they wait for a moment again.
        monkeypatch.setattr(tier_link, "STALL_S", PATIENCE_S)
        rig.tier_cls.gate.clear()
        jobs = [rig.submit_store([key(n)], [n]) for n in range(2, 5)]
        time.sleep(0.05)
        rig.tier_cls.gate.set()
        assert [rig.success(job) for job in jobs] == [[True]] * 3


def test_store_that_was_given_up_keeps_nothing_of_the_blocks_next_owner(later):
    """A step may begin just before its job is given up; the host then reuses the block."""
    with Rig(deadline_s=60.0, buffer_bytes=1) as rig:
        (link,) = rig.workers[0].links
        begun, go_on, take_buffer = threading.Event(), threading.Event(), link._take_buffer
        num_free = rig.stats()["buffers_free"]

        def wait_and_take(job_id):
            begun.set()
            go_on.wait(PATIENCE_S)
            return take_buffer(job_id)

        link._take_buffer = wait_and_take
        rig.fill(0, 1)
        job = rig.submit_store([key(1)], [0])
        assert begun.wait(PATIENCE_S)
        later(61)
        assert rig.success(job) == [False]
        rig.fill(0, 99)
        go_on.set()
        link._take_buffer = take_buffer
        assert rig.success(rig.submit_store([key(2)], [2])) == [True]
        assert rig.lookup([key(1), key(2)]) == [LookupResult.MISS, LookupResult.HIT]
        until(lambda: rig.stats()["buffers_free"] == num_free)


def test_wait_gives_up_stores_that_find_no_buffer_soon():
    """The model waits meanwhile: its blocks are about to be overwritten."""
    block = HEADER_NBYTES + NUM_LAYERS * PAGE
    with Rig(buffer_bytes=block, deadline_s=60.0) as rig:
        rig.held.add("put")
        first = rig.submit_store([key(0)], [0])
        rig.workers[0].wait({first})
        behind = [rig.submit_store([key(n)], [n]) for n in range(1, 4)]
        begun = time.monotonic()
        rig.workers[0].wait(set(behind))
        assert time.monotonic() - begun < 10 * STALL_S
        assert [rig.success(job) for job in behind] == [[False]] * 3
        rig.tier_cls.gate.set()
        assert rig.success(first) == [True]


def test_loads_fail_at_once_while_every_thread_hangs_in_the_tier(later):
    with Rig(deadline_s=60.0, num_io_threads=1) as rig:
        rig.store([1])
        rig.held.add("get")
        job = rig.submit_load([key(1)], [5])
        until(lambda: rig.tier_cls.entered["get"])
        later(61)
        assert rig.success(job) == [False]
        # Long before its own deadline.
        assert rig.success(rig.submit_load([key(1)], [5])) == [False]
        rig.held.clear()
        rig.tier_cls.gate.set()
        end = time.monotonic() + PATIENCE_S
        while rig.success(rig.submit_load([key(1)], [5])) != [True]:
            assert time.monotonic() < end


def test_more_blocks_than_buffers_are_stored():
    block = HEADER_NBYTES + NUM_LAYERS * PAGE
    with Rig(buffer_bytes=block) as rig:
        assert rig.store(range(NUM_BLOCKS)) == [True]
        assert rig.lookup([key(n) for n in range(NUM_BLOCKS)]) == [LookupResult.HIT] * NUM_BLOCKS


@pytest.mark.parametrize(("call", "num_hung"), [("contains", 2), ("put", 1), ("get", 1)])
def test_shutdown_ends_though_a_call_hangs_and_closes_no_tier_under_it(call, num_hung):
    with Rig() as rig:
        rig.store([1])
        rig.held.add(call)
        due = rig.tier_cls.entered[call] + num_hung
        rig.manager.lookup(key(1), rig.request())
        rig.submit_store([key(2)], [2])
        rig.submit_load([key(1)], [5])
        end = time.monotonic() + PATIENCE_S
        while rig.tier_cls.entered[call] < due:
            assert time.monotonic() < end
        begun = time.monotonic()
        for _ in range(2):
            rig.manager.shutdown()
            rig.workers[0].shutdown()
        assert time.monotonic() - begun < 15  # a held call goes on for 30 s
        # Of the manager's tier and the worker's, those in which no call hangs.
        assert rig.tier_cls.entered["close"] == 2 - num_hung
        assert not rig.workers[0].submit_load(99, TierLoadStoreSpec([]), GPULoadStoreSpec([]))


@pytest.mark.parametrize("num_slots", [0, 3])
def test_tier_that_raises_when_it_is_closed_leaves_nothing(num_slots):
    with Rig(num_slots=num_slots) as rig:
        assert rig.keep([1])
        rig.failing.add("close")
        for side in (rig.manager, *rig.workers):
            with pytest.raises(ConnectionError):
                side.shutdown()


def test_second_shutdown_closes_no_tier_again(rig):
    for _ in range(2):
        rig.manager.shutdown()
        rig.workers[0].shutdown()
    assert rig.tier_cls.entered["close"] == 2


@pytest.mark.parametrize("num_slots", [0, 3])
def test_shutdown_in_a_forked_child_leaves_the_tier_to_its_parent(num_slots):
    with Rig(num_slots=num_slots) as rig:
        assert rig.keep([1])
        pid = os.fork()
        if pid == 0:
            # Nothing of this process is to run at the child's end.
            with contextlib.suppress(BaseException):
                rig.workers[0].shutdown()
                rig.manager.shutdown()
            os._exit(rig.tier_cls.entered["close"])
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert rig.keep([2])
        assert rig.lookup([key(1), key(2)]) == [LookupResult.HIT] * 2


# -- names and options


def test_tier_is_named_like_a_spec(tmp_path):
    config = OffloadingConfig(
        extra_config={"spec_name": "file", "shared_storage_path": str(tmp_path), "deadline_s": 2}
    )
    spec = OffloadingSpecFactory.create_spec(config)
    assert (type(spec).__name__, spec.options.deadline_s) == ("FileTier", 2.0)
    manager = spec.get_manager()
    assert manager is spec.get_manager()
    manager.shutdown()


def test_class_that_is_neither_spec_nor_tier_is_refused():
    config = OffloadingConfig(extra_config={"spec_name": "Thread", "spec_module_path": "threading"})
    with pytest.raises(PluginTypeError, match="OffloadingSpec or wtransfer"):
        OffloadingSpecFactory.create_spec(config)


@pytest.mark.parametrize(
    "options", [{"buffer_bytes": 0}, {"num_io_threads": "x"}, {"deadline_s": 0}]
)
def test_option_that_cannot_be_used_is_refused(options):
    with pytest.raises(OffloadingOptionError, match=next(iter(options))):
        tier_spec(MemoryTier)(OffloadingConfig(extra_config=options))


@dataclass(kw_only=True)
class RoomOptions(MemoryTierOptions):
    room: int


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"shelf": ""}, "missing required field `room`"),
        ({"room": 1, "shelv": ""}, "unknown field `shelv`"),
        ({"room": "one"}, r"Expected `int`, got `str` - at `\$.room`"),
    ],
)
def test_option_that_is_missing_or_unknown_or_of_another_type_is_refused(options, error):
    class InARoom(MemoryTier):
        options_cls = RoomOptions

        def __init__(self, options):
            super().__init__(options)
            self.room = {1: "one"}[options.room]

    there_are = r"kv_.*_config of InARoom: .*; the options are shelf \(str\), room \(int\)"
    with pytest.raises(OffloadingOptionError, match=there_are) as caught:
        open_tier(InARoom, options)
    assert re.search(error, str(caught.value))
    assert open_tier(InARoom, {"room": 1}).room == "one"
    with pytest.raises(KeyError, match="2"):
        open_tier(InARoom, {"room": 2})


def test_file_that_cannot_be_written_leaves_nothing(tmp_path):
    (tmp_path / "key").mkdir()
    with pytest.raises(IsADirectoryError):
        MemoryTier.write_whole(tmp_path / "key", memoryview(b"value"))
    assert [each.name for each in tmp_path.iterdir()] == ["key"]


def test_tier_that_takes_long_to_close_holds_up_no_shutdown(monkeypatch):
    monkeypatch.setattr(tier_module, "CLOSE_S", 0.1)
    with Rig() as rig:
        rig.held.add("close")
        began = time.monotonic()
        rig.manager.shutdown()
        rig.workers[0].shutdown()
        assert time.monotonic() - began < 15
        until(lambda: rig.tier_cls.entered["close"] == 2)
