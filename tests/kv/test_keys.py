"""Keys say what a block is; headers say what bytes are."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wtransfer.kv.header import HEADER_NBYTES, BlockGeometry, BlockHeader
from wtransfer.kv.keys import (
    FENCE_NBYTES,
    MAX_KEY_NBYTES,
    BlockHashes,
    fence_key,
    hash_blocks,
    make_offload_key,
)

GEOMETRY = BlockGeometry(16, (("bfloat16", 4096), ("bfloat16", 4096)))
TOKENS = list(range(100))


def header(**changes):
    facts = {"key": b"k" * 36, "geometry": GEOMETRY.digest, "nbytes": 8192, "checksum": b"c" * 16}
    return BlockHeader(**facts | changes)


def test_only_whole_blocks_have_a_hash():
    assert len(list(hash_blocks(TOKENS, 16))) == 6
    assert list(hash_blocks(TOKENS[:15], 16)) == []


def test_a_hash_contains_all_that_is_before():
    changed = [7, *TOKENS[1:]]
    assert not set(hash_blocks(TOKENS, 16)) & set(hash_blocks(changed, 16))
    assert list(hash_blocks(TOKENS, 16))[:3] == list(hash_blocks([*TOKENS[:48], 0], 16))


def check_hashes(tokens, block_size=16, root=b""):
    hashes = BlockHashes(block_size, root)
    hashes.extend(tokens)
    return {check_hash for _, check_hash in hashes.pairs}


def test_a_root_parts_what_is_otherwise_equal():
    assert not set(hash_blocks(TOKENS, 16, b"tenant a")) & set(hash_blocks(TOKENS, 16, b"b"))
    assert not check_hashes(TOKENS, root=b"a") & check_hashes(TOKENS, root=b"b")


def test_the_group_is_a_part_of_the_key():
    assert make_offload_key(b"h", 0) != make_offload_key(b"h", 1)
    assert make_offload_key(b"h", 258) == b"h\0\0\1\2"


def test_fenced_keys_differ_with_the_weights_and_give_the_hosts_key_back():
    key = make_offload_key(b"h" * 16)
    assert fence_key(key, "f0") != fence_key(key, "f1")
    assert fence_key(key, "f0") == fence_key(key, "f0")
    assert fence_key(key, "f0")[FENCE_NBYTES:] == key


def weak(data):
    return bytes([sum(data) % 251, len(data) % 256])


def test_check_hashes_tell_apart_what_a_weak_hash_confuses():
    pairs = [[1, 2], [2, 1]]
    keys = [next(iter(hash_blocks(each, 2, hash_function=weak))) for each in pairs]
    assert keys[0] == keys[1]
    checks = [check_hashes(each, 2).pop() for each in pairs]
    assert fence_key(keys[0], "f", checks[0]) != fence_key(keys[1], "f", checks[1])


def test_a_header_comes_back_as_it_was():
    packed = header(rank=3).pack()
    assert len(packed) == HEADER_NBYTES
    assert BlockHeader.unpack(packed) == header(rank=3)


@given(st.integers(0, HEADER_NBYTES * 8 - 1))
def test_any_flipped_bit_of_a_header_is_seen(bit):
    packed = bytearray(header().pack())
    packed[bit // 8] ^= 1 << bit % 8
    assert BlockHeader.unpack(bytes(packed)) == "torn"


def test_nothing_stored_and_half_a_header_are_no_header():
    assert BlockHeader.unpack(bytes(HEADER_NBYTES)) == "absent"
    assert BlockHeader.unpack(header().pack()[:-1]) == "torn"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": b"other"}, "key"),
        ({"geometry": BlockGeometry(16, (("float16", 4096),) * 2).digest}, "geometry"),
        ({"rank": 1}, "rank"),
        ({"nbytes": 8191}, "length"),
        ({}, None),
    ],
)
def test_the_first_difference_is_named(changes, reason):
    assert header(**changes).mismatch(b"k" * 36, GEOMETRY.digest, 8192) == reason


def test_a_key_that_does_not_fit_is_refused():
    header(key=b"k" * (FENCE_NBYTES + MAX_KEY_NBYTES)).pack()
    with pytest.raises(ValueError, match="a block key of 65 bytes; at most 64"):
        header(key=b"k" * 65).pack()


def test_geometries_are_equal_only_in_every_part():
    others = [
        BlockGeometry(8, GEOMETRY.pages),
        BlockGeometry(16, GEOMETRY.pages[:1]),
        BlockGeometry(16, GEOMETRY.pages, num_ranks=2),
        BlockGeometry(16, GEOMETRY.pages, model="llama"),
    ]
    assert len({each.digest for each in (GEOMETRY, *others)}) == 5
    assert GEOMETRY.nbytes == 8192


def test_hashes_that_fail_half_way_leave_no_block_without_what_it_follows():
    fails = []

    def hash_function(data):
        if fails and fails.pop():
            raise ZeroDivisionError
        return b"%d" % (sum(data) % 9973)

    known = BlockHashes(4, hash_function=hash_function)
    known.extend(TOKENS[:8])
    fails += [True, False, False]
    with pytest.raises(ZeroDivisionError):
        known.extend(TOKENS)
    assert len(known.pairs) == 2
    known.extend(TOKENS)
    again = BlockHashes(4, hash_function=hash_function)
    again.extend(TOKENS)
    assert known.pairs == again.pairs
    with pytest.raises(struct.error):
        again.extend([*TOKENS, 1, 2, 3, -1])
    assert len(again.pairs) == 25
