"""Blocks are taken by several threads as they are by one."""

from __future__ import annotations

import threading

import pytest
import torch

from wtransfer.blocks import checksum
from wtransfer.config import KVCacheConfig, KVTransferConfig, ModelConfig, ServingConfig
from wtransfer.connectors.relay import taking
from wtransfer.connectors.relay.layout import SlotLayout
from wtransfer.connectors.relay.pages import CachePages
from wtransfer.connectors.relay.taking import Taken, Taker, Wanted
from wtransfer.connectors.settings import Instance

BLOCKS = 23
SERVING = ServingConfig(
    kv_transfer_config=KVTransferConfig("c", "e"),
    cache_config=KVCacheConfig(BLOCKS, 4),
    model_config=ModelConfig("m", "uint8"),
)


@pytest.fixture(params=[1, 3])
def taker(request, monkeypatch, leaves_nothing):
    monkeypatch.setattr(taking, "TASK_NBYTES", 1)
    caches = {f"layer{n}": torch.zeros(BLOCKS, 4, 16, dtype=torch.uint8) for n in range(3)}
    pages = CachePages(caches, Instance.of(SERVING))
    made = Taker(pages, SlotLayout(pages.geometry), 0, request.param)
    made.caches = caches
    yield made
    made.close()


def slots_of(layout):
    """Return blocks as they stand on a shelf: block n consists of n."""
    memory = torch.zeros(BLOCKS, layout.nbytes, dtype=torch.uint8).numpy()
    for number, slot in enumerate(memory):
        for where in layout.pages:
            slot[where] = number + 1
        total = checksum(slot[layout.payload].tobytes())
        slot[:128].data[:] = layout.header(b"name%d" % number, total, 0)
    return memory


WANTED = [Wanted(b"name%d" % n, BLOCKS - 1 - n) for n in range(BLOCKS)]


def test_all_are_taken_to_where_they_belong(taker):
    slots = list(slots_of(taker.layout))
    assert taker.take_at_once(WANTED, slots, lambda: True) == Taken(BLOCKS, None)
    for cache in taker.caches.values():
        assert cache[:, 0, 0].tolist() == list(range(BLOCKS, 0, -1))


@pytest.mark.parametrize("broken", [[0], [7], [8], [15, 7], [BLOCKS - 1]])
def test_what_comes_before_the_first_that_is_broken_counts(taker, broken):
    slots = slots_of(taker.layout)
    for number in broken:
        slots[number][taker.layout.pages[1].start] ^= 1
    taken = taker.take_at_once(WANTED, list(slots), lambda: True)
    assert taken == Taken(min(broken), "checksum")


def test_what_is_not_wanted_any_more_ends_without_a_reason(taker):
    left = [5]

    def go_on():
        left[0] -= 1
        return left[0] >= 0

    taken = taker.take_at_once(WANTED, list(slots_of(taker.layout)), go_on)
    assert taken.reason is None
    assert taken.number <= 5


def test_nothing_is_written_after_one_of_them_has_raised(taker, monkeypatch):
    real, late = Taker._take, threading.Event()

    def take(self, wanted, slot):
        if wanted.name == b"name0":
            raise ZeroDivisionError
        late.wait(0.02)
        return real(self, wanted, slot)

    monkeypatch.setattr(Taker, "_take", take)
    with pytest.raises(ZeroDivisionError):
        taker.take_at_once(WANTED, list(slots_of(taker.layout)), lambda: True)
    before = [cache.clone() for cache in taker.caches.values()]
    late.wait(0.3)
    assert all(map(torch.equal, before, taker.caches.values()))
