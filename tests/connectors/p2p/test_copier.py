"""Blocks between cache and slots: the same by one thread as by several."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from wtransfer.blocks import checksum
from wtransfer.config import KVCacheConfig, KVTransferConfig, ModelConfig, ServingConfig
from wtransfer.connectors.p2p import copier
from wtransfer.connectors.p2p.buffer import HEAD, StagingBuffer
from wtransfer.connectors.p2p.copier import BlockLoader, BlockSaver, CacheView, Loaded
from wtransfer.connectors.settings import Instance

BLOCKS, LAYERS, PAGE_NBYTES = 23, 3, 64
SERVING = ServingConfig(
    kv_transfer_config=KVTransferConfig("c", "e"),
    cache_config=KVCacheConfig(BLOCKS, 4),
    model_config=ModelConfig("m", "uint8"),
)
KEYS = [b"key%d" % n for n in range(BLOCKS)]
PLACES = list(range(BLOCKS - 1, -1, -1))


@pytest.fixture
def caches():
    shape = (BLOCKS, 4, PAGE_NBYTES // 4)
    return {f"layer{n}": torch.zeros(shape, dtype=torch.uint8) for n in range(LAYERS)}


@pytest.fixture
def cache(caches):
    return CacheView(caches, Instance.of(SERVING))


@pytest.fixture(params=[1, 3])
def loader(request, monkeypatch, cache, leaves_nothing):
    monkeypatch.setattr(copier, "TASK_NBYTES", 1)
    made = BlockLoader(cache, 0, request.param)
    yield made
    made.close()


@pytest.fixture
def slots(cache):
    """Slots of staged blocks: block n consists of n + 1."""
    layout = cache.layout
    memory = np.zeros((BLOCKS, layout.nbytes), dtype=np.uint8)
    for number, slot in enumerate(memory):
        slot[layout.payload] = number + 1
        total = checksum(slot[layout.payload].tobytes())
        slot[:128].data[:] = layout.header(KEYS[number], total, 0)
    return memory


def test_blocks_are_loaded_to_where_they_belong(loader, slots, caches):
    loaded = loader.load_parallel(KEYS, PLACES, list(slots), lambda: True)
    assert loaded == Loaded(BLOCKS, None)
    for cache in caches.values():
        assert cache[:, 0, 0].tolist() == list(range(BLOCKS, 0, -1))


@pytest.mark.parametrize("broken", [[0], [7], [8], [15, 7], [BLOCKS - 1]])
def test_blocks_before_the_first_broken_one_count(loader, slots, broken):
    for number in broken:
        slots[number][loader.layout.payload.start + PAGE_NBYTES] ^= 1
    loaded = loader.load_parallel(KEYS, PLACES, list(slots), lambda: True)
    assert loaded == Loaded(min(broken), "checksum")


def test_aborted_load_ends_without_a_reason(loader, slots):
    left = iter(range(5))
    loaded = loader.load_parallel(KEYS, PLACES, list(slots), lambda: next(left, None) is not None)
    assert loaded.reason is None
    assert loaded.num_blocks <= 5


def test_nothing_is_written_after_one_thread_has_raised(loader, slots, caches, monkeypatch):
    real, late = BlockLoader._load, threading.Event()

    def load(self, key, block, slot):
        if key == KEYS[0]:
            raise ZeroDivisionError
        late.wait(0.02)
        return real(self, key, block, slot)

    monkeypatch.setattr(BlockLoader, "_load", load)
    with pytest.raises(ZeroDivisionError):
        loader.load_parallel(KEYS, PLACES, list(slots), lambda: True)
    before = [cache.clone() for cache in caches.values()]
    late.wait(0.3)
    assert all(map(torch.equal, before, caches.values()))


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("part_nbytes", [1, 2 * PAGE_NBYTES, 1 << 20])
@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1], [1, 1, 2, 0]])
@pytest.mark.usefixtures("leaves_nothing")
def test_saved_blocks_have_the_bytes_and_digest_of_the_cache(
    caches, monkeypatch, num_threads, part_nbytes, order
):
    """In whatever order layers come, and however many make a part."""
    monkeypatch.setattr(copier, "SAVE_PART_NBYTES", part_nbytes)
    for number, each in enumerate(caches.values()):
        each.copy_(torch.arange(BLOCKS).reshape(-1, 1, 1) * LAYERS + number)
    cache = CacheView(caches, Instance.of(SERVING))
    layout = cache.layout
    buffer = StagingBuffer(layout, BLOCKS * layout.stride, 0)
    saver = BlockSaver(cache, buffer, lambda _: True, num_threads)
    save = SimpleNamespace(request_id="r", keys=KEYS, block_ids=PLACES)
    for layer in order:
        saver.save_layer(f"layer{layer}", [save])
    saver.finish()
    for key, block, slot in zip(KEYS, PLACES, buffer.lease("x", KEYS), strict=True):
        memory = buffer.slot(slot)
        pages = memory[layout.payload].reshape(LAYERS, PAGE_NBYTES)
        assert (pages == block * LAYERS + np.arange(LAYERS).reshape(-1, 1)).all()
        header = layout.check_head(memory[HEAD].tobytes(), key, 0)
        assert header.checksum == checksum(memory[layout.payload].tobytes())
    saver.close()
    buffer.close()


def test_step_without_all_layers_commits_nothing(cache, leaves_nothing):
    buffer = StagingBuffer(cache.layout, BLOCKS * cache.layout.stride, 0)
    saver = BlockSaver(cache, buffer, lambda _: True, 2)
    save = SimpleNamespace(request_id="r", keys=KEYS, block_ids=PLACES)
    saver.save_layer("layer0", [save])
    saver.save_layer("layer2", [save])
    saver.finish()
    assert set(buffer.lease("x", KEYS)) == {-1}
    assert buffer.get_stats()["slots_filling"] == 0
    saver.close()
    buffer.close()
