"""Blocks of the pool: pinned, shared, evicted, and found by key."""

from __future__ import annotations

import pytest

from wtransfer.kv.keys import fence_key
from wtransfer.testing.mini_engine.cache import BlockPool


def key(letter, weights="A"):
    return fence_key(letter.encode(), weights)


@pytest.fixture
def pool():
    return BlockPool(4)


def test_blocks_are_allocated_all_or_none(pool):
    assert pool.allocate(5) is None
    assert (pool.num_free, pool.allocate(4), pool.num_free) == (4, [0, 1, 2, 3], 0)
    assert pool.allocate(1) is None
    pool.release([2])
    assert pool.allocate(1) == [2]


def test_free_block_is_cached_until_it_is_evicted_tail_first(pool):
    blocks = pool.allocate(2)
    for block, letter in zip(blocks, "ab", strict=True):
        pool.insert(block, key(letter))
    pool.release(blocks)
    assert pool.lookup([key("a"), key("b"), key("c")]) == blocks
    assert pool.lookup([key("c"), key("a")]) == []
    assert pool.lookup([key("a", "B")]) == [], "computed with other weights"
    pool.allocate(3)
    assert pool.lookup([key("a"), key("b")]) == blocks[:1], "the tail goes first"


def test_block_pinned_twice_is_free_after_two_releases(pool):
    blocks = pool.allocate(1)
    pool.pin(blocks)
    pool.release(blocks)
    assert pool.num_free == 3
    pool.release(blocks)
    assert pool.num_free == 4
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_cached_block_that_is_pinned_is_not_evicted(pool):
    blocks = pool.allocate(1)
    pool.insert(blocks[0], key("a"))
    pool.release(blocks)
    pool.pin(blocks)
    assert blocks[0] not in pool.allocate(3)
    assert pool.lookup([key("a")]) == blocks


def test_first_of_two_blocks_of_one_key_is_cached(pool):
    one, other = pool.allocate(2)
    pool.insert(one, key("a"))
    pool.insert(other, key("a"))
    pool.release([other])
    pool.allocate(3)
    assert pool.lookup([key("a")]) == [one]


def test_reset_empties_the_prefix_cache(pool):
    blocks = pool.allocate(1)
    pool.insert(blocks[0], key("a"))
    pool.reset()
    assert pool.lookup([key("a")]) == []
    pool.insert(blocks[0], key("b"))
    assert pool.lookup([key("b")]) == blocks
