"""Blocks of the cache: held, shared, reused, and found by what they contain."""

from __future__ import annotations

import pytest

from wtransfer.blocks import fence_key
from wtransfer.testing.mini_engine.pool import BlockPool


def named(letter, weights="A"):
    return fence_key(letter.encode(), weights)


@pytest.fixture
def pool():
    return BlockPool(4)


def test_blocks_are_taken_all_or_none(pool):
    assert pool.take(5) is None
    assert (pool.num_free, pool.take(4), pool.num_free) == (4, [0, 1, 2, 3], 0)
    assert pool.take(1) is None
    pool.release([2])
    assert pool.take(1) == [2]


def test_a_free_block_is_found_until_it_is_needed_for_others(pool):
    blocks = pool.take(2)
    for block, letter in zip(blocks, "ab", strict=True):
        pool.name(block, named(letter))
    pool.release(blocks)
    assert pool.find([named("a"), named("b"), named("c")]) == blocks
    assert pool.find([named("c"), named("a")]) == []
    assert pool.find([named("a", "B")]) == [], "computed with other weights"
    pool.take(3)
    assert pool.find([named("a"), named("b")]) == blocks[:1], "the tail goes first"


def test_a_block_that_is_held_twice_is_free_when_both_have_let_go(pool):
    blocks = pool.take(1)
    pool.hold(blocks)
    pool.release(blocks)
    assert pool.num_free == 3
    pool.release(blocks)
    assert pool.num_free == 4
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(blocks)


def test_a_block_that_is_found_can_be_held_again(pool):
    blocks = pool.take(1)
    pool.name(blocks[0], named("a"))
    pool.release(blocks)
    pool.hold(blocks)
    assert blocks[0] not in pool.take(3)
    assert pool.find([named("a")]) == blocks


def test_of_two_blocks_with_the_same_contents_the_first_is_found(pool):
    one, other = pool.take(2)
    pool.name(one, named("a"))
    pool.name(other, named("a"))
    pool.release([other])
    pool.take(3)
    assert pool.find([named("a")]) == [one]


def test_all_names_are_forgotten_at_once(pool):
    blocks = pool.take(1)
    pool.name(blocks[0], named("a"))
    pool.forget_all()
    assert pool.find([named("a")]) == []
    pool.name(blocks[0], named("b"))
    assert pool.find([named("b")]) == blocks
