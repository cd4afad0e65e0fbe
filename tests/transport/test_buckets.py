"""Streams of tensors cut into buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wtransfer.transport.buckets import ALIGNMENT, LEAST_NBYTES, Bucket, Layout, slices

sizes_of_tensors = st.lists(st.integers(0, 1000), max_size=40)
bucket_sizes = st.integers(1, 2000)


@given(sizes_of_tensors)
def test_tensors_follow_each_other_aligned_and_do_not_overlap(sizes):
    layout = Layout(sizes)
    stop = 0
    for size, start, end in zip(sizes, layout.starts, layout.stops, strict=True):
        assert start % ALIGNMENT == 0
        assert stop <= start < stop + ALIGNMENT
        assert end - start == size
        stop = end
    assert layout.nbytes == stop


@given(sizes_of_tensors, bucket_sizes)
def test_every_tensor_is_in_one_bucket_in_order(sizes, nbytes):
    layout = Layout(sizes)
    buckets = list(layout.cut(nbytes))
    numbers = [n for bucket in buckets for n in range(bucket.first, bucket.last)]
    assert numbers == list(range(len(sizes)))
    for bucket in buckets:
        assert bucket.start == layout.starts[bucket.first]
        assert bucket.stop == layout.stops[bucket.last - 1]


@given(sizes_of_tensors, bucket_sizes)
def test_buckets_are_full_with_their_last_tensor_and_not_before(sizes, nbytes):
    layout = Layout(sizes)
    *full, _ = [*layout.cut(nbytes), None]
    for bucket in full[:-1]:
        assert bucket.nbytes >= nbytes
    for bucket in full:
        if bucket.last - bucket.first > 1:
            assert layout.stops[bucket.last - 2] - bucket.start < nbytes


MIB = 1 << 20


@given(st.lists(st.integers(0, 3 * MIB), max_size=60), st.integers(1, 8 * MIB))
def test_what_is_filled_last_is_small(sizes, nbytes):
    layout = Layout(sizes)
    for bucket in layout.cut(nbytes):
        left = layout.nbytes - bucket.start
        size = min(nbytes, max(LEAST_NBYTES, left // 2))
        if bucket.last < len(sizes):
            assert bucket.nbytes >= size
        if bucket.last - bucket.first > 1:
            assert layout.stops[bucket.last - 2] - bucket.start < size


def test_buckets_taper_off():
    layout = Layout([64 << 10] * (80 * 16))
    found = [bucket.nbytes // MIB for bucket in layout.cut(16 * MIB)]
    assert found == [16, 16, 16, 16, 8, 4, 2, 1, 1]


@given(st.integers(0, 5000), bucket_sizes)
def test_slices_cover_a_bucket_once_in_order_in_small_parts(nbytes, part_nbytes):
    bucket = Bucket(0, 1, 128, 128 + nbytes)
    parts = list(slices(bucket, part_nbytes))
    covered = [byte for part in parts for byte in range(part.start, part.stop)]
    assert covered == list(range(nbytes))
    assert all(0 < part.stop - part.start <= part_nbytes for part in parts)


@pytest.mark.parametrize("sizes", [[], [0], [0, 0, 0]])
def test_a_stream_without_bytes_has_its_tensors_all_the_same(sizes):
    layout = Layout(sizes)
    buckets = list(layout.cut(100))
    assert layout.nbytes == 0
    assert sum(bucket.last - bucket.first for bucket in buckets) == len(sizes)
    assert [part for bucket in buckets for part in slices(bucket, 100)] == []
