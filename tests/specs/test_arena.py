"""The arena: its layout, headers and memory, and its ranks, which come, go and are killed."""

import contextlib
import os
import random
import secrets
import signal
import stat
import time
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from wtransfer.errors import OffloadingOptionError, StagingMemoryError
from wtransfer.kv.header import HEADER_NBYTES, checksum
from wtransfer.kv.slots import HeaderForm
from wtransfer.specs.arena import ArenaLayout, SharedRegion

GEOMETRY = bytes(range(16))


# -- layout


@given(
    nbytes=st.integers(1, 1 << 34),
    part_nbytes=st.integers(1, 1 << 24),
    num_ranks=st.integers(1, 16),
)
@settings(max_examples=300, deadline=None)
def test_layout_stays_within_its_bytes_and_wastes_less_than_a_slot(nbytes, part_nbytes, num_ranks):
    layout = ArenaLayout.within(nbytes, part_nbytes, num_ranks)
    one_more = ArenaLayout(layout.num_slots + 1, part_nbytes, num_ranks)
    if layout.num_slots:
        assert layout.used_nbytes <= nbytes < one_more.used_nbytes
    else:
        assert nbytes < one_more.used_nbytes
    assert layout.stride >= part_nbytes
    assert layout.region_nbytes * num_ranks == layout.nbytes >= layout.used_nbytes
    assert layout.slots_offset >= layout.num_slots * HEADER_NBYTES


def test_large_slots_begin_at_pages_and_small_ones_at_cache_lines():
    assert ArenaLayout(4, 2 << 20).stride == 2 << 20
    assert ArenaLayout(4, (2 << 20) + 1).stride == (2 << 20) + 4096
    assert ArenaLayout(4, 512).stride == 512
    assert ArenaLayout(4, 520).stride == 576
    assert ArenaLayout(1000, 100).slots_offset % 4096 == 0


def test_regions_of_ranks_do_not_overlap():
    layout, engine_id = ArenaLayout(10, 300, 3), f"engine-{secrets.token_hex(4)}"
    regions = [SharedRegion.attach(engine_id, rank, layout) for rank in range(3)]
    for rank, region in enumerate(regions):
        region.slots[:] = rank + 1
        region._headers[:] = rank + 101
    for rank, region in enumerate(regions):
        assert (region.slots == rank + 1).all()
        assert (region._headers == rank + 101).all()
    # Gone over again from outside: nothing lies where no region is.
    counts = np.bincount(regions[0].segment.buffer, minlength=256)
    assert [int(counts[rank + 1]) for rank in range(3)] == [10 * 300] * 3
    assert [int(counts[rank + 101]) for rank in range(3)] == [10 * HEADER_NBYTES] * 3
    for region in regions:
        offset = region.address - region.segment.buffer.ctypes.data
        assert offset == region.rank * layout.region_nbytes
        region.detach()


# -- memory


@pytest.fixture
def region():
    # More than a huge page, which is populated in its own way.
    attached = SharedRegion.attach("", 0, ArenaLayout(8, 1 << 19))
    yield attached
    attached.detach()


def test_memory_has_no_name_and_belongs_to_this_user_alone(region):
    status = os.fstat(region.segment.fd)
    assert stat.S_IMODE(status.st_mode) == 0o600
    assert status.st_uid == os.geteuid()
    assert status.st_nlink == 0


def test_memory_is_populated_by_attach_once_and_its_bytes_stay():
    layout, engine_id = ArenaLayout(8, 1 << 19, 2), f"engine-{secrets.token_hex(4)}"
    zero = SharedRegion.attach(engine_id, 0, layout)
    before = os.fstat(zero.segment.fd).st_blocks * 512
    assert layout.used_nbytes // 2 <= before < layout.used_nbytes, "its own region only"
    one = SharedRegion.attach(engine_id, 1, layout)
    one.slots[:] = 3
    one._headers[:] = 5
    blocks = os.fstat(zero.segment.fd).st_blocks
    assert blocks * 512 >= layout.used_nbytes
    one.detach()
    one.detach()
    assert one.slots.shape == (0, layout.part_nbytes)
    one = SharedRegion.attach(engine_id, 1, layout)
    assert (one.slots == 3).all()
    assert (one._headers == 5).all()
    assert os.fstat(zero.segment.fd).st_blocks == blocks
    one.detach()
    zero.detach()


def test_slot_opened_by_two_stores_gets_no_header_from_the_first(region):
    slots = np.array([1, 2])
    total = checksum(b"")
    header = HeaderForm(GEOMETRY, 0).pack([b"a", b"b"], [0, 0], [total, total])
    opened = region.open(slots)
    region.open(np.array([2]))
    assert not region.close(slots, opened, header)
    assert not region.look(slots).headers.any()
    assert region.close(slots, region.open(slots), header)
    assert np.array_equal(region.look(slots).headers, header)


def test_slot_stored_again_with_the_same_header_has_changed(region):
    slots = np.array([1])
    header = HeaderForm(GEOMETRY, 0).pack([b"a"], [0], [checksum(b"")])
    region.close(slots, region.open(slots), header)
    before = region.look(slots)
    assert region.look(slots).openings == before.openings
    region.close(slots, region.open(slots), header)
    assert np.array_equal(region.look(slots).headers, before.headers)
    assert region.look(slots).openings != before.openings


def test_header_that_has_changed_since_is_not_quarantined(region):
    region._headers[3] = 5
    seen = region.look(np.array([3])).headers[0]
    region._headers[3] = 6
    region.quarantine(3, seen)
    assert (region._headers[3] == 6).all()
    region.quarantine(3, region.look(np.array([3])).headers[0])
    assert not region._headers[3].any()


def test_arena_that_does_not_fit_is_refused_with_the_numbers():
    layout = ArenaLayout.within(1 << 50, 2 << 20, 2)
    with pytest.raises(StagingMemoryError) as caught:
        SharedRegion.attach("engine-7", 0, layout)
    text = str(caught.value)
    assert "not enough memory for the arena of rank 0 of engine 'engine-7'" in text
    assert f"{layout.used_nbytes:,} bytes in all; lower cpu_bytes_to_use" in text
    assert "are available to this process" in text
    # What was claimed is free again.
    SharedRegion.attach("engine-7", 0, ArenaLayout(4, 64, 2)).detach()


def test_memory_that_cannot_be_populated_is_refused_in_the_same_words(monkeypatch):
    def no_memory(self, *_):
        raise StagingMemoryError("taking 7 bytes of shared memory failed: Cannot allocate memory")

    monkeypatch.setattr("wtransfer.transport.memory.Segment.populate", no_memory)
    with pytest.raises(StagingMemoryError, match=r"4 slots, 64 bytes each.*Cannot allocate memory"):
        SharedRegion.attach("", 0, ArenaLayout(4, 64))


def test_several_ranks_without_an_engine_id_are_refused():
    with pytest.raises(OffloadingOptionError, match=r"2 ranks share one arena.*set engine_id"):
        SharedRegion.attach("", 0, ArenaLayout(4, 64, 2))


# -- ranks


@pytest.fixture
def engine():
    """What all ranks of one engine have in common."""
    return {
        "engine_id": f"engine-{secrets.token_hex(4)}",
        "world_size": 2,
        "num_slots": 6,
        "num_blocks": 4,
        "deadline_s": 5.0,
    }


@pytest.fixture
def pair(start_rank, engine):
    """Both ranks of an engine."""
    zero, one = start_rank(), start_rank()
    # The one that has to wait for the other comes first.
    one.order("open", rank=1, **engine)
    inode = zero.ask("open", rank=0, **engine)
    assert one.answer() == inode
    return zero, one


def test_ranks_attach_one_arena_and_have_a_region_each(pair):
    for rank in pair:
        assert rank.ask("store", number=3, slot=2)
    for rank in pair:
        assert rank.ask("load", number=3, slot=2) == [True, True]
        assert rank.ask("look")["whole"] == 1


def test_block_stored_by_one_rank_only_is_absent_on_the_other(pair):
    zero, one = pair
    assert zero.ask("store", number=3, slot=2)
    assert one.ask("load", number=3, slot=2) == [False, False]
    assert one.ask("failures") == {"loads_failed_absent": 1}


@pytest.mark.parametrize("killed", [0, 1])
def test_killed_rank_finds_its_blocks_again_and_the_other_keeps_its_own(
    pair, killed, start_rank, engine
):
    for rank in pair:
        assert rank.ask("store", number=3, slot=2)
    pair[killed].kill()
    other = pair[1 - killed]
    assert other.ask("load", number=3, slot=2) == [True, True]
    assert other.ask("store", number=4, slot=3)
    again = start_rank(rank=killed, **engine)
    assert again.ask("load", number=3, slot=2) == [True, True]
    assert again.ask("store", number=4, slot=3)
    assert again.ask("load", number=4, slot=3) == [True, True]
    assert other.ask("load", number=4, slot=3) == [True, True]


def test_arena_outlives_the_rank_that_made_it(start_rank, engine):
    """Nobody who made it is there any more, and it is still the same one."""
    ranks = [start_rank(rank=rank, **{**engine, "world_size": 3}) for rank in range(3)]
    ranks[1].ask("store", number=3, slot=2)
    ranks[0].kill()
    ranks[2].kill()
    ranks[2] = start_rank(rank=2, **{**engine, "world_size": 3})
    ranks[0] = start_rank(rank=0, **{**engine, "world_size": 3})
    ranks[1].kill()
    ranks[1] = start_rank(rank=1, **{**engine, "world_size": 3})
    assert ranks[1].ask("load", number=3, slot=2) == [True, True]


def test_arena_is_empty_after_all_ranks_have_ended(pair, start_rank, engine):
    zero, one = pair
    assert one.ask("store", number=3, slot=2)
    zero.kill()
    one.kill()
    zero = start_rank(rank=0, **engine)
    one = start_rank(rank=1, **engine)
    assert one.ask("look") == {"whole": 0, "empty": one.ask("num_slots"), "begun": 0, "wrong": 0}


def test_rank_with_another_layout_is_refused_and_the_field_named(pair, start_rank, engine):
    pair[1].kill()
    late = start_rank()
    impatient = {**engine, "deadline_s": 0.3}
    with pytest.raises(start_rank.error) as caught:
        late.ask("open", rank=1, **{**impatient, "num_slots": 12})
    assert caught.value.kind == "ProtocolError"
    assert f"rank 1 of engine '{engine['engine_id']}' wants an arena with num_slots" in str(
        caught.value
    )
    with pytest.raises(start_rank.error, match="wants an arena with part_nbytes 4096"):
        late.ask("open", rank=1, **{**impatient, "page_nbytes": [1024], "num_layers": 4})
    with pytest.raises(start_rank.error, match="wants an arena with num_ranks 3"):
        late.ask("open", rank=1, **{**impatient, "world_size": 3})
    late.ask("open", rank=1, **engine)


def test_rank_zero_waits_for_a_rank_with_another_layout_to_end(pair, start_rank, engine):
    """It had another size, and its last rank takes a while to go."""
    zero, one = pair
    zero.kill()
    again = start_rank()
    again.order("open", rank=0, **{**engine, "num_slots": 12})
    time.sleep(0.5)
    one.kill()
    inode = again.answer()
    other = start_rank()
    assert other.ask("open", rank=1, **{**engine, "num_slots": 12}) == inode


def test_second_process_of_a_rank_is_refused_and_the_first_named(pair, start_rank, engine):
    third = start_rank()
    with pytest.raises(start_rank.error) as caught:
        third.ask("open", rank=0, **{**engine, "deadline_s": 0.3})
    assert caught.value.kind == "AddressInUseError"
    assert (
        f"rank 0 of engine '{engine['engine_id']}' is there already, as process {pair[0].pid}"
        in caught.value.text
    )
    with pytest.raises(start_rank.error, match=rf"as process {pair[1].pid} \(this one, made at /"):
        pair[1].ask("open", rank=1, **{**engine, "deadline_s": 0.3})
    assert pair[0].ask("store", number=3, slot=2), "nobody is disturbed"


def test_engines_with_different_ids_have_different_arenas(pair, start_rank, engine):
    other = {**engine, "engine_id": engine["engine_id"] + "-2"}
    third = start_rank(rank=0, **other)
    assert pair[0].ask("store", number=3, slot=2)
    assert third.ask("look")["whole"] == 0


def test_rank_without_rank_zero_stalls_at_its_deadline_and_can_attach_later(start_rank, engine):
    alone = start_rank()
    with pytest.raises(start_rank.error) as caught:
        alone.ask("open", rank=1, **{**engine, "deadline_s": 0.3})
    assert caught.value.kind == "StallError"
    assert "rank 1 of 2" in caught.value.text
    assert "found no arena within 0.3 s: rank 0, which makes it, has not got" in caught.value.text
    # What it had claimed is free again.
    zero = start_rank(rank=0, **engine)
    alone.ask("open", rank=1, **engine)
    assert zero.ask("store", number=3, slot=2)


def test_rank_attaches_though_another_is_stopped(start_rank, engine):
    options = {**engine, "world_size": 3}
    ranks = [start_rank(rank=rank, **options) for rank in range(3)]
    ranks[1].ask("store", number=3, slot=2)
    ranks[1].kill()
    os.kill(ranks[0].pid, signal.SIGSTOP)
    again = start_rank(rank=1, **options)
    assert again.ask("load", number=3, slot=2) == [True, True]
    os.kill(ranks[0].pid, signal.SIGCONT)


# -- kills: FAULTS 34 and 37

ENGINE = {
    "world_size": 2,
    "num_slots": 5,
    "num_blocks": 2,
    "num_layers": 4,
    "page_nbytes": [1 << 16],
    "deadline_s": 10.0,
}
FEW_AND_MANY = [
    4,
    pytest.param(100, marks=[pytest.mark.nightly, pytest.mark.timeout(600)]),
]


def sockets(engine_id):
    """Return the sockets of an engine's arena; others may run beside this test."""
    name = f"wtransfer-arena-{os.geteuid()}-{xxhash.xxh3_64_hexdigest(engine_id.encode())}-"
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if name in line}


def names_in_memory(pid):
    """Return what a process holds that has a name in a file system of memory."""
    proc = Path(f"/proc/{pid}")
    held = [line.split()[-1] for line in (proc / "maps").read_text().splitlines()]
    for descriptor in (proc / "fd").iterdir():
        with contextlib.suppress(OSError):
            held.append(str(descriptor.readlink()))
    assert any("memfd:wtransfer" in name for name in held), "this is where an arena shows"
    return [name for name in held if name.startswith(("/dev/shm", "/run"))]


@pytest.mark.parametrize("times", FEW_AND_MANY)
def test_killing_all_ranks_leaves_nothing(start_rank, times):
    moment = random.Random(5)
    for turn in range(times):
        engine = {**ENGINE, "engine_id": f"engine-{secrets.token_hex(4)}"}
        ranks = [start_rank(rank=rank, **engine) for rank in range(2)]
        for rank in ranks:
            rank.order("churn", start=turn)
        names = sockets(engine["engine_id"])
        assert len(names) >= 2, "else there is nothing to leave behind"
        assert all(name.startswith("@") for name in names), "in no file system"
        assert [name for rank in ranks for name in names_in_memory(rank.pid)] == []
        time.sleep(moment.uniform(0, 0.03))
        for rank in ranks:
            assert rank.kill() == -9
        assert not any(Path(f"/proc/{rank.pid}").exists() for rank in ranks)
        assert sockets(engine["engine_id"]) == set()


@pytest.mark.parametrize("times", FEW_AND_MANY)
def test_rank_killed_while_it_stores_leaves_no_torn_block(start_rank, times):
    """The other rank keeps the arena; what is in it is judged by headers alone."""
    engine = {**ENGINE, "engine_id": f"engine-{secrets.token_hex(4)}"}
    zero = start_rank(rank=0, **engine)
    zero.ask("store", number=1, slot=0)
    moment = random.Random(7)
    seen = {"whole": 0, "empty": 0, "begun": 0, "wrong": 0}
    for turn in range(times):
        victim = start_rank(rank=1, **engine)
        for state, number in victim.ask("look").items():
            seen[state] += number
        victim.order("churn", start=100 * turn)
        while not zero.ask("num_headers_of", rank=1):
            time.sleep(0.001)
        time.sleep(moment.uniform(0, 0.05))
        os.kill(victim.pid, 9)
        victim.kill()
        assert zero.ask("load", number=1, slot=0) == [True, True]
    assert seen["wrong"] == 0
    assert seen["whole"] > 0
    if times == 100:
        assert seen["begun"] > 0, "no kill ever came in the midst of a store"
