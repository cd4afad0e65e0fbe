"""Blocks go into slots and come back, whatever the cache looks like."""

import numpy as np
import pytest
import torch

from wtransfer.kv import cache_view, copier
from wtransfer.kv.cache_view import DevicePages
from wtransfer.kv.copier import Chunks
from wtransfer.specs.interface import GPULoadStoreSpec
from wtransfer.specs.tier import TierLoadStoreSpec

CACHES = {
    "one token": {"layers": "even", "page_nbytes": (256,), "num_layers": 2},
    "odd sizes": {"layers": "scattered", "page_nbytes": (1000,), "num_layers": 5},
    "packed": {"layers": "packed", "page_nbytes": (768,), "num_layers": 4},
    "floats": {"layers": "shaped", "page_nbytes": (4096,), "num_layers": 3},
    "large": {"layers": "even", "page_nbytes": (65536,), "num_layers": 4},
    "large, scattered": {"layers": "scattered", "page_nbytes": (32768,), "num_layers": 3},
    "large, packed": {"layers": "packed", "page_nbytes": (32768,), "num_layers": 3},
}


@pytest.fixture(params=["host", "device", pytest.param("gpu", marks=pytest.mark.gpu)])
def side(request, monkeypatch):
    """All ways to get at a cache; torch's `cpu` is the device that there is everywhere."""
    if request.param == "device":
        monkeypatch.setattr(cache_view, "HostPages", DevicePages)
    with torch.device("cuda" if request.param == "gpu" else "cpu"):
        yield request.param


@pytest.fixture(params=CACHES)
def cache(request, arena_rig):
    options = CACHES[request.param]
    return {**options, "layers": getattr(arena_rig, options["layers"])}


@pytest.mark.parametrize("blocks_per_chunk", [1, 3])
def test_blocks_come_back_into_other_blocks_and_nothing_else_changes(
    side, cache, blocks_per_chunk, make_rig, arena_rig
):
    rig = make_rig(**cache, blocks_per_chunk=blocks_per_chunk).fill()
    chunks, slots = 3, [5, 0, 9]
    keys = [arena_rig.key(n) for n in range(chunks)]
    source = [7, 3, 11, 1, 23, 0, 14, 9, 20][: chunks * blocks_per_chunk]
    target = [2, 17, 4, 12, 6, 21, 8, 13, 10][: chunks * blocks_per_chunk]
    stored = rig.store(source, slots, keys)
    assert stored.success
    assert stored.transfer_size == len(source) * len(rig.block(0))
    before = rig.snapshot()[0]
    rig.fill(seed=1)
    changed = rig.snapshot()[0]
    assert rig.load(target, slots, keys).success
    expected = list(changed)
    for old, new in zip(source, target, strict=True):
        expected[new] = before[old]
    assert rig.snapshot()[0] == expected


@pytest.mark.parametrize("step_nbytes", [1, 5000, 1 << 20])
def test_jobs_of_many_steps_are_whole(side, make_rig, arena_rig, monkeypatch, step_nbytes):
    monkeypatch.setattr(copier, "TASK_NBYTES", step_nbytes * 2)
    monkeypatch.setattr(copier, "STEP_NBYTES", step_nbytes)
    rig = make_rig(num_blocks=200, num_slots=200).fill()
    keys = [arena_rig.key(n) for n in range(200)]
    slots = list(range(200))[::-1]
    before = rig.snapshot()
    assert rig.store(list(range(200)), slots, keys).success
    rig.wipe()
    assert rig.load(list(range(200)), slots, keys).success
    assert rig.snapshot() == before


@pytest.mark.parametrize(
    ("num_chunks", "num_threads", "sizes"),
    [
        (3, 2, [3]),
        (8, 2, [4, 4]),
        (8, 8, [4, 4]),
        (12, 2, [6, 6]),
        (12, 3, [4, 4, 4]),
        (13, 2, [7, 6]),
        (45, 2, [12, 12, 12, 9]),
        (40, 2, [20, 20]),
    ],
)
def test_a_job_is_divided_among_the_threads(make_rig, monkeypatch, num_chunks, num_threads, sizes):
    """As far as it is worth it, and no task is too long."""
    (whole,) = make_rig(num_blocks=50, num_slots=50).worker.links[0].copiers
    monkeypatch.setattr(copier, "SHARE_NBYTES", 4 * whole.chunk_nbytes)
    monkeypatch.setattr(copier, "TASK_NBYTES", 20 * whole.chunk_nbytes)
    blocks = np.arange(num_chunks)
    keys = [b"%d" % n for n in range(num_chunks)]
    tasks = list(whole.tasks(Chunks(0, blocks, keys, blocks.reshape(-1, 1)), num_threads))
    assert [len(each) for each in tasks] == sizes
    assert [key for each in tasks for key in each.keys] == keys


def test_groups_have_their_own_pages(side, make_rig, arena_rig):
    rig = make_rig(page_nbytes=(512, 2048), blocks_per_chunk=2).fill()
    keys = [arena_rig.key(0), arena_rig.key(0, group=1), arena_rig.key(1, group=1)]
    blocks, slots = [1, 2, 3, 4, 5, 6], [4, 2, 7]
    groups = {"group_sizes": [2, 4], "block_indices": [8, 2]}
    assert rig.store(blocks, slots, keys, **groups).success
    before = rig.snapshot()
    rig.wipe()
    assert rig.load(blocks, slots, keys, **groups).success
    assert [rig.block(n, 0) for n in (1, 2)] == before[0][1:3]
    assert [rig.block(n, 1) for n in (3, 4, 5, 6)] == before[1][3:7]
    assert rig.block(3, 0) == bytes(len(rig.block(3, 0)))


def test_a_chunk_may_be_stored_from_its_middle_on_and_has_no_beginning_then(
    side, make_rig, arena_rig
):
    rig = make_rig(blocks_per_chunk=4).fill()
    key = arena_rig.key(0)
    # Something else was there: none of its bytes may ever come out under the new key.
    assert rig.store([20, 21, 22, 23], [3], [arena_rig.key(9)]).success
    assert rig.store([0, 1], [3], [key], block_indices=[2]).success
    before = rig.snapshot()[0]
    rig.wipe()
    assert rig.load([8, 9], [3], [key], block_indices=[2]).success
    assert [rig.block(8), rig.block(9)] == before[:2]
    assert rig.load([10], [3], [key], block_indices=[3]).success
    assert rig.block(10) == before[1]
    wiped = rig.snapshot()
    for index in (0, 1):
        blocks = list(range(12, 16 - index))
        assert not rig.load(blocks, [3], [key], block_indices=[index]).success
        assert rig.snapshot() == wiped
    assert rig.failures() == {"loads_failed_length": 2}
    # To ask for too much is no damage.
    assert rig.load([8, 9], [3], [key], block_indices=[2]).success


BAD_JOBS = {
    "unknown slot": ([1], [16], 1, {}),
    "negative slot": ([1], [-1], 1, {}),
    "unknown block": ([24], [1], 1, {}),
    "negative block": ([-1], [1], 1, {}),
    "more slots": ([1], [1, 2], 2, {}),
    "more blocks": ([1, 2], [1], 1, {}),
    "more groups": ([1, 2], [1, 2], 2, {"group_sizes": [1, 1]}),
    "slots beyond 64 bits": ([1], [1 << 70], 1, {}),
    "slots beyond 63 bits": ([1], [1 << 63], 1, {}),
    "halves of slots": ([1, 2], [0.5, 1.5], 2, {}),
    "no slots": ([1], [None], 1, {}),
    "slots in lists": ([1], [[1]], 1, {}),
    "blocks beyond 64 bits": ([1 << 70], [1], 1, {}),
    "halves of blocks": ([0.5, 1.5], [1, 2], 2, {}),
    "half an index": ([1], [1], 1, {"block_indices": [0.5]}),
}


@pytest.mark.parametrize("kind", ["store", "load"])
@pytest.mark.parametrize("bad", BAD_JOBS)
def test_a_job_that_makes_no_sense_fails_and_touches_nothing(kind, bad, make_rig, arena_rig):
    blocks, slots, num_keys, groups = BAD_JOBS[bad]
    rig = make_rig(num_slots=16).fill()
    slots = [rig.part.layout.num_slots if slot == 16 else slot for slot in slots]
    cache, arena = rig.snapshot(), rig.part.segment.buffer.copy()
    keys = [arena_rig.key(n) for n in range(num_keys)]
    assert not getattr(rig, kind)(blocks, slots, keys, **groups).success
    assert rig.failures() == {f"{kind}s_failed_malformed": 1}
    assert rig.snapshot() == cache
    assert np.array_equal(rig.part.segment.buffer, arena)


def test_one_slot_for_two_blocks_is_refused(make_rig, arena_rig):
    rig = make_rig()
    assert not rig.store([1, 2], [3, 3], [arena_rig.key(0), arena_rig.key(1)]).success
    assert rig.failures() == {"stores_failed_malformed": 1}


def test_a_chunk_without_an_end_cannot_be_stored(make_rig, arena_rig):
    rig = make_rig(blocks_per_chunk=4)
    assert not rig.store([1, 2, 3], [0], [arena_rig.key(0)]).success
    assert rig.failures() == {"stores_failed_malformed": 1}


def test_a_block_without_a_slot_is_refused_where_there_is_no_tier(make_rig, arena_rig):
    rig = make_rig()
    place = TierLoadStoreSpec([arena_rig.key(0), arena_rig.key(1)], in_arena={0: 3})
    assert rig.worker.submit_store(7, GPULoadStoreSpec([1, 2]), place)
    assert not rig.result(7).success
    assert rig.failures() == {"stores_failed_malformed": 1}


def test_a_job_of_nothing_succeeds(make_rig):
    assert make_rig().store([], [], []).success


def test_specs_of_another_maker_fit(make_rig, arena_rig):
    """A serving engine has its own classes, with arrays where ours have lists."""

    class Blocks:
        block_ids = np.array([2, 5], np.int32)
        group_sizes = (2,)
        block_indices = (0,)

    class Slots:
        slots = np.array([1, 0], np.int32)
        keys = (arena_rig.key(0), arena_rig.key(1))

    rig = make_rig().fill()
    before = rig.snapshot()[0]
    rig.worker.submit_store(100, Blocks(), Slots())
    assert rig.result(100).success
    rig.wipe()
    rig.worker.submit_load(101, Slots(), Blocks())
    assert rig.result(101).success
    assert [rig.block(2), rig.block(5)] == [before[2], before[5]]
