"""What an arena is: its layout, its headers, its memory."""

import os
import stat

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wtransfer.blocks import HEADER_NBYTES, BlockHeader, checksum
from wtransfer.errors import OffloadingOptionError, StagingMemoryError, TruncatedError
from wtransfer.specs.arena import seat as seat_module
from wtransfer.specs.arena.arena import ArenaPart, make_segment
from wtransfer.specs.arena.headers import HeaderForm, differ
from wtransfer.specs.arena.layout import ArenaLayout
from wtransfer.specs.arena.seat import Seat
from wtransfer.transport.memory import Segment

GEOMETRY = bytes(range(16))


# -- layout


@given(
    nbytes=st.integers(1, 1 << 34),
    part_nbytes=st.integers(1, 1 << 24),
    num_ranks=st.integers(1, 16),
)
@settings(max_examples=300, deadline=None)
def test_a_layout_keeps_within_its_bytes_and_wastes_less_than_a_slot(
    nbytes, part_nbytes, num_ranks
):
    layout = ArenaLayout.within(nbytes, part_nbytes, num_ranks)
    one_more = ArenaLayout(layout.num_slots + 1, part_nbytes, num_ranks)
    if layout.num_slots:
        assert layout.used_nbytes <= nbytes < one_more.used_nbytes
    else:
        assert nbytes < one_more.used_nbytes
    assert layout.stride >= part_nbytes
    assert layout.region_nbytes * num_ranks == layout.nbytes >= layout.used_nbytes
    assert layout.slots_offset >= layout.num_slots * HEADER_NBYTES


def test_large_slots_begin_at_pages_and_small_ones_waste_little():
    assert ArenaLayout(4, 2 << 20).stride == 2 << 20
    assert ArenaLayout(4, (2 << 20) + 1).stride == (2 << 20) + 4096
    assert ArenaLayout(4, 512).stride == 512
    assert ArenaLayout(4, 520).stride == 576
    assert ArenaLayout(1000, 100).slots_offset % 4096 == 0


def test_parts_of_ranks_do_not_touch():
    layout = ArenaLayout(10, 300, 3)
    segment = Segment(layout.nbytes)
    parts = [ArenaPart(segment, layout, rank) for rank in range(3)]
    for rank, part in enumerate(parts):
        part.slots[:] = rank + 1
        part._headers[:] = rank + 101
    for rank, part in enumerate(parts):
        assert (part.slots == rank + 1).all()
        assert (part._headers == rank + 101).all()
        assert part.address - parts[0].address == rank * layout.region_nbytes
    # Gone over again from outside: nothing lies where no part is.
    counts = np.bincount(segment.buffer, minlength=256)
    assert [int(counts[rank + 1]) for rank in range(3)] == [10 * 300] * 3
    assert [int(counts[rank + 101]) for rank in range(3)] == [10 * HEADER_NBYTES] * 3


# -- headers


keys = st.binary(min_size=0, max_size=64)
headers = st.tuples(keys, st.integers(0, 2**63 - 1), st.binary(min_size=16, max_size=16))


@given(st.lists(headers, min_size=1, max_size=5), st.integers(0, 2**16 - 1))
@settings(max_examples=20, deadline=None)
def test_headers_in_columns_are_those_of_block_header(rows, rank):
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


def test_a_key_that_is_too_long_for_a_header_is_refused():
    with pytest.raises(ValueError, match="a block key of 65 bytes; at most 64 fit into a header"):
        HeaderForm(GEOMETRY, 0).expect([bytes(64), bytes(65)], [1, 1])


def test_a_key_that_ends_in_zeros_is_another_one():
    form = HeaderForm(GEOMETRY, 0)
    packed = form.pack([b"a"], [1], [bytes(16)])
    assert differ(packed, form.expect([b"a\0"], [1])).tolist() == [0]


# -- memory


@pytest.fixture
def part():
    layout = ArenaLayout(8, 1 << 19)  # more than a huge page, which is taken in its own way
    segment = make_segment(layout)
    made = ArenaPart(segment, layout, 0)
    made.take_memory()
    yield made
    segment.close()


def test_only_this_user_can_get_at_it(part):
    status = os.fstat(part.segment.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()
    assert status.st_nlink == 0, "it has no name"


def test_memory_is_taken_once_and_bytes_stay(part):
    blocks = os.fstat(part.segment.fd).st_blocks * 512
    assert blocks >= part.layout.used_nbytes
    part.slots[:] = 3
    part._headers[:] = 5
    part.take_memory()
    assert (part.slots == 3).all()
    assert (part._headers == 5).all()
    assert os.fstat(part.segment.fd).st_blocks * 512 == blocks


def test_what_was_closed_meanwhile_gets_no_header(part):
    slots = np.array([1, 2])
    total = checksum(b"")
    header = HeaderForm(GEOMETRY, 0).pack([b"a", b"b"], [0, 0], [total, total])
    opened = part.open(slots)
    part.open(np.array([2]))
    assert not part.close(slots, opened, header)
    assert not part.look(slots).headers.any()
    assert part.close(slots, part.open(slots), header)
    assert np.array_equal(part.look(slots).headers, header)


def test_a_header_that_is_another_one_by_now_is_not_quarantined(part):
    part._headers[3] = 5
    seen = part.look(np.array([3])).headers[0]
    part._headers[3] = 6
    part.quarantine(3, seen)
    assert (part._headers[3] == 6).all()
    part.quarantine(3, part.look(np.array([3])).headers[0])
    assert not part._headers[3].any()


def test_an_arena_that_does_not_fit_is_refused_with_the_numbers(monkeypatch):
    layout = ArenaLayout.within(1 << 50, 2 << 20, 2)
    with pytest.raises(StagingMemoryError) as caught:
        Seat("engine-7", 0, layout)
    text = str(caught.value)
    assert "not enough memory for the arena of rank 0 of engine 'engine-7'" in text
    assert f"{layout.used_nbytes:,} bytes in all; lower cpu_bytes_to_use" in text
    assert "are available to this process" in text
    # What was claimed is free again.
    Seat("engine-7", 0, ArenaLayout(4, 64, 2)).close()


def test_a_kernel_without_memory_is_told_in_the_same_words(monkeypatch):
    def no_memory(self, *_):
        raise StagingMemoryError("taking 7 bytes of shared memory failed: Cannot allocate memory")

    monkeypatch.setattr(seat_module.ArenaPart, "take_memory", no_memory)
    with pytest.raises(StagingMemoryError, match=r"4 slots, 64 bytes each.*Cannot allocate memory"):
        Seat("", 0, ArenaLayout(4, 64))


def test_ranks_without_an_engine_id_cannot_meet():
    with pytest.raises(OffloadingOptionError, match=r"2 ranks share one arena.*set engine_id"):
        Seat("", 0, ArenaLayout(4, 64, 2))


def test_memory_that_is_shared_is_the_same_memory():
    made = Segment(8192)
    other = Segment.of(os.dup(made.fd), 8192)
    made.buffer[5] = 9
    assert other.buffer[5] == 9
    made.close()
    other.buffer[6] = 1
    with pytest.raises(TruncatedError, match="12,288 bytes was announced, it has 8,192"):
        Segment.of(os.dup(other.fd), 12288)
    other.close()
