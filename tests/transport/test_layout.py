"""Where the tensors of an update lie, and which of them travel together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wtransfer.errors import ManifestError, ProtocolError, TruncatedError
from wtransfer.manifest import Manifest, Piece
from wtransfer.testing.contents import contents, random_tensor
from wtransfer.transport.layout import MAX_BUCKET_TENSORS, MIN_BUCKET_NBYTES, TensorLayout
from wtransfer.transport.tensors import byte_view, dtype_name

TENSORS = {
    "a": random_tensor(torch.float32, (2, 3), seed=1),
    "none": torch.empty(0, 4),
    "b": random_tensor(torch.bfloat16, (5,), seed=2),
    "scalar": torch.tensor(7),
    "flags": torch.tensor([True, False, True]),
}


def layout_of(tensors):
    pieces = (Piece(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items())
    return TensorLayout(Manifest(tuple(pieces)))


def sized(*sizes):
    """A layout of tensors of so many bytes."""
    return TensorLayout(Manifest(tuple(Piece(f"t{n}", "uint8", (s,)) for n, s in enumerate(sizes))))


@given(st.lists(st.integers(0, 300), max_size=30))
def test_no_two_tensors_overlap_and_each_starts_at_a_cache_line(sizes):
    layout = sized(*sizes)
    stops = [start + size for start, size in zip(layout.starts, sizes, strict=True)]
    assert all(start % 64 == 0 for start in layout.starts)
    assert all(stop <= start for stop, start in zip(stops, layout.starts[1:], strict=False))
    assert layout.nbytes == max(stops, default=0)


@given(st.lists(st.integers(0, 3 << 20), max_size=40), st.integers(1, 8 << 20))
def test_buckets_hold_every_tensor_once_and_little_more_than_asked_for(sizes, nbytes):
    layout = sized(*sizes)
    buckets = list(layout.buckets(nbytes))
    numbers = [number for b in buckets for number in range(b.first, b.last)]
    assert numbers == list(range(len(sizes)))
    for bucket in buckets:
        assert bucket == layout.bucket(bucket.first, bucket.last)
        assert bucket.nbytes - layout.sizes[bucket.last - 1] < max(nbytes, MIN_BUCKET_NBYTES) + 64


def test_buckets_get_smaller_towards_the_end():
    found = [b.nbytes for b in sized(*[1 << 20] * 64).buckets(16 << 20)]
    assert found == sorted(found, reverse=True)
    assert found[0] == 16 << 20
    assert found[-1] <= 2 << 20


def test_a_bucket_has_a_limited_number_of_tensors():
    found = list(sized(*[1] * (2 * MAX_BUCKET_TENSORS + 1)).buckets(1 << 30))
    assert [b.last - b.first for b in found] == [MAX_BUCKET_TENSORS, MAX_BUCKET_TENSORS, 1]


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_views_show_the_bytes_of_their_bucket_and_keep_the_memory(kind):
    layout = layout_of(TENSORS)
    for cut in range(len(TENSORS) + 1):
        found = {}
        for first, last in ((0, cut), (cut, len(TENSORS))):
            bucket = layout.bucket(first, last)
            memory = np.full(bucket.nbytes, 0xFF, np.uint8)
            for number in range(first, last):
                start = layout.starts[number] - bucket.start
                tensor = TENSORS[layout.names[number]]
                memory[start : start + tensor.nbytes] = byte_view(tensor)
            place = torch.from_numpy(memory.copy()) if kind == "tensor" else memory
            found |= layout.views(place, bucket, bucket.start)
            del memory, place
        assert contents(found) == contents(TENSORS)


@pytest.mark.parametrize("length", [0, 63, 64, 127])
def test_a_bucket_outside_of_its_memory_is_refused(length):
    layout = sized(64, 64)
    with pytest.raises(TruncatedError, match=f"bytes 0 to 128 .* within {length} bytes"):
        list(layout.views(np.zeros(length, np.uint8), layout.bucket(0, 2)))


@pytest.mark.parametrize(("first", "last"), [(-1, 1), (1, 0), (0, 3), (2**62, 2**62 + 1)])
def test_tensors_that_the_update_does_not_have_are_refused(first, last):
    with pytest.raises(ProtocolError, match="were announced of an update of 2"):
        sized(1, 1).bucket(first, last)


def test_equal_manifests_have_equal_identities_and_offsets():
    first, again = layout_of(TENSORS), layout_of(TENSORS)
    assert (first.identity, first.starts) == (again.identity, again.starts)
    others = itertools.chain(
        [dict(reversed(TENSORS.items()))], ({**TENSORS, "a": t} for t in (TENSORS["a"].double(),))
    )
    assert all(layout_of(other).identity != first.identity for other in others)


# FAULTS 3, 4
@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "error"),
    [
        (["a"], ["load"], [[1]], ManifestError),
        (["a"], ["float32"], [[-1]], ManifestError),
        (["a"], ["float32"], [[True]], ManifestError),
        (["a", "a"], ["float32"] * 2, [[1]] * 2, ManifestError),
        (["a", "b"], ["float32"], [[1], [2]], ValueError),
    ],
)
def test_columns_of_a_peer_are_checked(names, dtypes, shapes, error):
    with pytest.raises(error):
        TensorLayout.of_columns(names, dtypes, shapes)


def test_columns_of_a_peer_have_the_layout_of_their_manifest():
    layout = layout_of(TENSORS)
    dtypes = [dtype_name(dtype) for dtype in layout.dtypes]
    again = TensorLayout.of_columns(layout.names, dtypes, [list(s) for s in layout.shapes])
    assert again.identity == layout.identity
