"""Blocks of the cache: held, shared, reused, and found by what they contain."""

from __future__ import annotations

import pytest

from wtransfer.blocks import fence_key
from wtransfer.testing.mini_engine.cache import BlockPool


def key(letter, weights="A"):
    return fence_key(letter.encode(), weights)


@pytest.fixture
def pool():
    return BlockPool(4)


def test_blocks_are_taken_all_or_none(pool):
    assert pool.allocate(5) is None
    assert (pool.num_free, pool.allocate(4), pool.num_free) == (4, [0, 1, 2, 3], 0)
    assert pool.allocate(1) is None
    pool.release([2])
    assert pool.allocate(1) == [2]


def test_a_free_block_is_found_until_it_is_needed_for_others(pool):
    blocks = pool.allocate(2)
    for block, letter in zip(blocks, "ab", strict=True):
        pool.insert(block, key(letter))
    pool.release(blocks)
    assert pool.lookup([key("a"), key("b"), key("c")]) == blocks
    assert pool.lookup([key("c"), key("a")]) == []
    assert pool.lookup([key("a", "B")]) == [], "computed with other weights"
    pool.allocate(3)
    assert pool.lookup([key("a"), key("b")]) == blocks[:1], "the tail goes first"


def test_a_block_that_is_held_twice_is_free_when_both_have_let_go(pool):
    blocks = pool.allocate(1)
    pool.pin(blocks)
    pool.release(blocks)
    assert pool.num_free == 3
    pool.release(blocks)
    assert pool.num_free == 4
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_a_block_that_is_found_can_be_held_again(pool):
    blocks = pool.allocate(1)
    pool.insert(blocks[0], key("a"))
    pool.release(blocks)
    pool.pin(blocks)
    assert blocks[0] not in pool.allocate(3)
    assert pool.lookup([key("a")]) == blocks


def test_of_two_blocks_with_the_same_contents_the_first_is_found(pool):
    one, other = pool.allocate(2)
    pool.insert(one, key("a"))
    pool.insert(other, key("a"))
    pool.release([other])
    pool.allocate(3)
    assert pool.lookup([key("a")]) == [one]


def test_all_names_are_forgotten_at_once(pool):
    blocks = pool.allocate(1)
    pool.insert(blocks[0], key("a"))
    pool.reset()
    assert pool.lookup([key("a")]) == []
    pool.insert(blocks[0], key("b"))
    assert pool.lookup([key("b")]) == blocks
