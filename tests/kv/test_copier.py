"""Chunks between cache and slots: whole, verified, and in order up to the first that is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wtransfer.kv import copier
from wtransfer.kv.cache_view import CacheView
from wtransfer.kv.copier import Chunks, Copier, RefusedError
from wtransfer.kv.slots import HeaderForm, Look

BLOCKS, LAYERS, PAGE_NBYTES = 23, 3, 64
KEYS = [b"key%d" % n for n in range(BLOCKS)]
PLACES = np.arange(BLOCKS)[::-1].copy()
GEOMETRY = bytes(range(16))


class Memory:
    """Slots in plain memory."""

    def __init__(self, nbytes):
        self.slots = np.zeros((BLOCKS, nbytes), np.uint8)
        self.headers = np.zeros((BLOCKS, 128), np.uint8)
        self.openings = np.zeros(BLOCKS, np.int64)
        self.quarantined = []

    def look(self, slots):
        return Look(self.headers[slots], self.openings[slots])

    def quarantine(self, slot, seen):
        assert np.array_equal(self.headers[slot], seen)
        self.quarantined.append(slot)


@pytest.fixture
def caches():
    return {f"layer{n}": torch.zeros(BLOCKS, PAGE_NBYTES, dtype=torch.uint8) for n in range(LAYERS)}


@pytest.fixture(params=[1, 4 * LAYERS * PAGE_NBYTES, 1 << 20], ids=["1", "4 chunks", "all"])
def made(request, monkeypatch, caches):
    """A copier with steps of several sizes."""
    monkeypatch.setattr(copier, "STEP_NBYTES", request.param)
    blocks = CacheView(caches).blocks
    return Copier(Memory(blocks.block_nbytes), blocks, HeaderForm(GEOMETRY, 0))


CHUNKS = Chunks(0, np.arange(BLOCKS), KEYS, PLACES.reshape(-1, 1))


@pytest.fixture
def stored(made, caches):
    """The copier, with chunk n in slot n, which consists of n + 1; the cache is empty."""
    for cache in caches.values():
        cache[PLACES] = torch.arange(1, BLOCKS + 1, dtype=torch.uint8).reshape(-1, 1)
    made.part.headers[:] = made.gather(CHUNKS, made.pages.mark())
    for cache in caches.values():
        cache.zero_()
    return made


def loaded(caches):
    """Return how many chunks, from the first on, are in the cache; nothing is behind them."""
    found = [
        bool((each[PLACES[n]] == n + 1).all()) for each in caches.values() for n in range(BLOCKS)
    ]
    rows = np.array(found).reshape(LAYERS, BLOCKS)
    number = int(rows.all(axis=0).argmin()) if not rows.all() else BLOCKS
    assert not any(cache[PLACES[number:]].any() for cache in caches.values())
    return number


def test_chunks_are_loaded_to_where_they_belong(stored, caches):
    stored.load(CHUNKS, None)
    assert loaded(caches) == BLOCKS


def flip(memory, row):
    memory.slots[row, PAGE_NBYTES] ^= 1


def tear(memory, row):
    memory.headers[row, 20] ^= 1


def rename(memory, row):
    memory.headers[row] = HeaderForm(GEOMETRY, 0).pack([b"another"], 192, [bytes(16)])


def relayout(memory, row):
    memory.headers[row] = HeaderForm(bytes(16), 0).pack([KEYS[row]], 192, [bytes(16)])


def another_rank(memory, row):
    memory.headers[row] = HeaderForm(GEOMETRY, 1).pack([KEYS[row]], 192, [bytes(16)])


def clear(memory, row):
    memory.headers[row] = 0


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip, "checksum"),
        (tear, "torn"),
        (rename, "key"),
        (relayout, "geometry"),
        (another_rank, "rank"),
        (clear, "absent"),
    ],
)
@pytest.mark.parametrize("rows", [[0], [7], [8], [15, 7], [BLOCKS - 1]])
def test_chunks_before_the_first_refused_one_are_loaded_and_none_after_it(
    stored, caches, damage, reason, rows
):
    for row in rows:
        damage(stored.part, row)
    with pytest.raises(RefusedError) as refused:
        stored.load(CHUNKS, None)
    assert (refused.value.reason, refused.value.row) == (reason, min(rows))
    assert loaded(caches) == min(rows)
    # Another block is whole, and an empty slot is no damage.
    is_damage = reason not in ("key", "absent")
    assert stored.part.quarantined == ([min(rows)] if is_damage else [])


@pytest.mark.parametrize("rows", [[0], [7], [15, 7], [BLOCKS - 1]])
@pytest.mark.parametrize("how", ["opened", "another header", "other bytes too"])
def test_chunk_whose_slot_is_opened_during_the_copy_is_refused(stored, monkeypatch, rows, how):
    real = copier.differ

    def differ(found, expected):
        # The headers have been read and are right.
        for row in rows:
            if how == "another header":
                clear(stored.part, row)
            else:
                stored.part.openings[row] += 1
            if how == "other bytes too":
                flip(stored.part, row)
        return real(found, expected)

    monkeypatch.setattr(copier, "differ", differ)
    with pytest.raises(RefusedError) as refused:
        stored.load(CHUNKS, None)
    assert (refused.value.reason, refused.value.row) == ("reused", min(rows))
    assert stored.part.quarantined == []


def test_damage_behind_a_reused_slot_is_not_blamed(stored, monkeypatch):
    real = copier.differ
    flip(stored.part, 9)

    def differ(found, expected):
        stored.part.openings[3] += 1
        return real(found, expected)

    monkeypatch.setattr(copier, "differ", differ)
    with pytest.raises(RefusedError) as refused:
        stored.load(CHUNKS, None)
    assert (refused.value.reason, refused.value.row) == ("reused", 3)
    assert stored.part.quarantined == []


def test_headers_state_the_bytes_that_lie_in_the_slots(stored):
    before = stored.part.headers.copy()
    flip(stored.part, 5)
    assert not np.array_equal(stored.gather(CHUNKS, None)[5], before[5])  # an empty cache
    assert stored.part.slots.any(axis=1).tolist() == [False] * BLOCKS
