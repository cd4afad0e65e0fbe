"""Headers of many slots at once are those of one block each."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wtransfer.kv.header import HEADER_NBYTES, BlockHeader
from wtransfer.kv.slots import HeaderForm, differ

GEOMETRY = bytes(range(16))

keys = st.binary(min_size=0, max_size=64)
headers = st.tuples(keys, st.integers(0, 2**63 - 1), st.binary(min_size=16, max_size=16))


@given(st.lists(headers, min_size=1, max_size=5), st.integers(0, 2**16 - 1))
@settings(max_examples=20, deadline=None)
def test_headers_packed_together_equal_those_packed_alone(rows, rank):
    form = HeaderForm(GEOMETRY, rank)
    keys, sizes, sums = map(list, zip(*rows, strict=True))
    packed = form.pack(keys, sizes, sums)
    one_by_one = [
        BlockHeader(key, GEOMETRY, nbytes, total, rank).pack() for key, nbytes, total in rows
    ]
    assert [each.tobytes() for each in packed] == one_by_one
    expected = form.expect(keys, sizes)
    assert not len(differ(packed, expected))
    # The checksum of the payload is looked at elsewhere; everything else is compared here.
    for bit in range(HEADER_NBYTES * 8):
        damaged = packed.copy()
        damaged[0, bit // 8] ^= 1 << bit % 8
        assert differ(damaged, expected).tolist() == [0], bit


def test_too_long_key_is_refused():
    with pytest.raises(ValueError, match="a block key of 65 bytes; at most 64 fit into a header"):
        HeaderForm(GEOMETRY, 0).expect([bytes(64), bytes(65)], [1, 1])


def test_key_that_ends_in_zeros_differs_from_the_shorter_key():
    form = HeaderForm(GEOMETRY, 0)
    packed = form.pack([b"a"], [1], [bytes(16)])
    assert differ(packed, form.expect([b"a\0"], [1])).tolist() == [0]
