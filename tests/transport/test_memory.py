import gc
import os
import re
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest

from wtransfer.errors import ClosedError, StagingMemoryError, TruncatedError
from wtransfer.transport import memory
from wtransfer.transport.memory import (
    HUGE_PAGE_NBYTES,
    Segment,
    available_memory,
    map_private,
    require_memory,
)

PAGE = memory.PAGE_NBYTES
NBYTES = 3 * memory.ADVISE_NBYTES + 5 * PAGE + 123


def resident_pages(mapping):
    """Which pages are in this process's page table, as the kernel tells."""
    address = np.frombuffer(mapping, dtype=np.uint8).ctypes.data
    num_pages = -(-len(mapping) // PAGE)
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(address // PAGE * 8)
        entries = np.frombuffer(pagemap.read(8 * num_pages), dtype=np.uint64)
    return (entries >> np.uint64(63)).astype(bool)


@pytest.fixture(autouse=True)
def nothing_left(zygote, leaves_nothing):
    """Look at every test here so; the zygote is the run's."""


@pytest.fixture(params=["huge", "small"])
def pages(request, monkeypatch):
    """Huge pages where the kernel has some, and small ones as on kernels that cannot make them."""
    if request.param == "small":
        monkeypatch.setattr(memory, "_MADV_COLLAPSE", 9997)
    return request.param


@pytest.fixture
def segment(pages, monkeypatch):
    monkeypatch.setattr(memory, "_COLLAPSE_S", 20.0)
    made = Segment(NBYTES)
    yield made
    made.close()


def test_a_segment_is_writable_zeroed_memory_of_its_size(segment):
    assert (segment.nbytes, segment.buffer.shape, segment.buffer.dtype) == (NBYTES, (NBYTES,), "u1")
    assert not segment.buffer.any()
    segment.buffer[:] = 7
    assert segment.buffer.min() == 7


def test_every_page_of_a_segment_is_there_before_it_is_used(segment):
    assert resident_pages(segment.buffer).all()


def huge_nbytes(buffer):
    """Bytes of a segment that this process maps by huge pages."""
    address, found = buffer.ctypes.data, 0
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    for line in lines:
        if line.startswith(f"{address:x}-"):
            found = next(int(each.split()[1]) for each in lines if "ShmemPmdMapped" in each)
    return found * 1024


def test_large_segments_and_their_mappings_consist_of_huge_pages(segment, pages):
    whole = NBYTES - NBYTES % HUGE_PAGE_NBYTES
    if pages == "small":
        assert huge_nbytes(segment.buffer) == 0
        return
    if not huge_nbytes(segment.buffer):
        pytest.skip("this kernel makes no huge pages of shared memory, or has none to give")
    assert huge_nbytes(segment.buffer) == whole
    mapping = map_private(segment.fd, NBYTES)
    memory.populate(mapping, 0, NBYTES)
    assert huge_nbytes(mapping) == whole
    mapping[PAGE] = 1
    assert (segment.buffer[PAGE], mapping[PAGE], mapping[PAGE - 1]) == (0, 1, 0)


def test_a_machine_short_of_huge_pages_costs_no_more_than_the_time_allowed(monkeypatch):
    advices = []
    monkeypatch.setattr(memory, "_COLLAPSE_S", 1e-9)
    monkeypatch.setattr(memory, "_madvise", lambda *each: advices.append(each[2]) or 0)
    Segment(NBYTES).close()
    assert advices.count(memory._MADV_COLLAPSE) == 1


@pytest.mark.parametrize("nbytes", [HUGE_PAGE_NBYTES - 1, HUGE_PAGE_NBYTES, NBYTES])
def test_address_and_file_agree_to_a_huge_page_where_one_fits(nbytes):
    segment = Segment(nbytes)
    aligned = [
        each.ctypes.data % (HUGE_PAGE_NBYTES if nbytes >= HUGE_PAGE_NBYTES else PAGE)
        for each in (segment.buffer, map_private(segment.fd, nbytes))
    ]
    assert aligned == [0, 0]
    segment.close()


def test_a_segment_has_no_name_and_only_its_owner_may_open_it(segment):
    assert os.fstat(segment.fd).st_nlink == 0
    assert os.fstat(segment.fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(segment.fd)


@pytest.mark.parametrize("size", [0, NBYTES - 1, NBYTES + PAGE])
def test_size_of_a_segment_cannot_be_changed(segment, size):
    with pytest.raises(PermissionError):
        os.ftruncate(segment.fd, size)


def test_memory_of_a_closed_segment_lives_with_its_views():
    segment = Segment(PAGE)
    view = segment.buffer[5:10]
    view[:] = 3
    segment.close()
    segment.close()
    assert view.tolist() == [3] * 5
    for closed in (lambda: segment.buffer, lambda: segment.fd):
        with pytest.raises(ClosedError):
            closed()


def test_a_dropped_segment_leaves_nothing_by_no_code_in_which_a_handler_could_strike(python_calls):
    # `nothing_left` looks.
    segment = Segment(PAGE)
    with python_calls() as made:
        del segment
    assert made == []


@pytest.mark.parametrize("nbytes", [0, 1, PAGE - 1, PAGE + 1])
def test_odd_sizes(nbytes):
    segment = Segment(nbytes)
    segment.buffer[:] = 9
    mapping = map_private(segment.fd, nbytes)
    assert bytes(mapping[:nbytes]) == b"\x09" * nbytes
    assert segment.buffer.size == nbytes
    segment.close()


def test_writes_of_a_reader_stay_in_its_own_mapping(segment):
    one, other = (map_private(segment.fd, NBYTES) for _ in range(2))
    one[0] = 1
    assert (segment.buffer[0], other[0], one[0]) == (0, 0, 1)
    segment.buffer[PAGE] = 5
    assert (one[PAGE], other[PAGE]) == (5, 5)


def test_a_mapping_outlives_the_descriptor_it_was_made_from():
    segment = Segment(PAGE)
    segment.buffer[:] = 4
    mapping = map_private(segment.fd, PAGE)
    segment.close()
    assert mapping[PAGE - 1] == 4


@pytest.mark.parametrize("beyond", [1, PAGE, 2**40])
def test_a_segment_smaller_than_announced_is_refused_not_sigbus(segment, beyond):
    with pytest.raises(TruncatedError, match=f"of {NBYTES + beyond:,} bytes was announced, it has"):
        map_private(segment.fd, NBYTES + beyond)
    with pytest.raises(TruncatedError, match=f"of {NBYTES + beyond:,} bytes was announced, it has"):
        Segment.of(os.dup(segment.fd), NBYTES + beyond)


def test_populating_maps_the_range_and_copies_nothing(segment, pages):
    segment.buffer[:] = 1
    mapping = map_private(segment.fd, NBYTES)
    assert not resident_pages(mapping).any()
    memory.populate(mapping, PAGE + 17, 9 * PAGE)
    present = resident_pages(mapping)
    assert present[1:11].all()
    # A page comes in whole, and small ones come with their neighbours.
    assert not present[HUGE_PAGE_NBYTES // PAGE if pages == "huge" else 11 + 16 :].any()
    memory.populate(mapping, 0, NBYTES)
    assert resident_pages(mapping).all()
    # A copied page would not see this: that is what MAP_POPULATE does.
    segment.buffer[:] = 2
    assert set(mapping[:]) == {2}


@pytest.mark.parametrize(("start", "length"), [(0, 0), (NBYTES, 0), (NBYTES - 1, 1), (0, 10**12)])
def test_populating_the_edges(segment, start, length):
    memory.populate(map_private(segment.fd, NBYTES), start, length)


def test_kernels_without_the_advice_get_their_pages_touched(monkeypatch):
    """An advice that no kernel knows takes the same way as one that an old kernel does not know."""
    monkeypatch.setattr(memory, "_MADV_POPULATE_WRITE", 9999)
    monkeypatch.setattr(memory, "_MADV_POPULATE_READ", 9998)
    segment = Segment(NBYTES)
    assert resident_pages(segment.buffer).all()
    segment.buffer[:] = 1
    mapping = map_private(segment.fd, NBYTES)
    memory.populate(mapping, 0, NBYTES)
    assert resident_pages(mapping).all()
    segment.buffer[:] = 2
    assert set(mapping[::PAGE]) == {2}
    segment.close()


def longest_gap_during(work):
    """Return how long a Python thread stood still while `work` ran, as a share of its time."""
    ticks, over = [time.monotonic()], threading.Event()

    def tick():
        while not over.is_set():
            ticks.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.monotonic()
    work()
    seconds = time.monotonic() - start
    over.set()
    thread.join()
    return max(np.diff(ticks)) / seconds


def test_other_threads_run_while_pages_are_populated(monkeypatch):
    """Populating in one call must not hold the interpreter lock: serving would stop for as long."""
    nbytes = 128 << 20
    monkeypatch.setattr(memory, "ADVISE_NBYTES", nbytes)
    shares = [longest_gap_during(lambda: Segment(nbytes).close()) for _ in range(3)]
    assert min(shares) < 0.5


# -- limits


@pytest.mark.parametrize("job", ["too_little_address_space", "too_few_descriptors"])
def test_shortages_are_our_errors_and_pass(zygote, job):
    assert zygote.spawn(f"memory_jobs:{job}").wait(60) == 0


def test_more_than_there_is_is_refused_with_both_numbers():
    with pytest.raises(StagingMemoryError) as caught:
        require_memory(10**15, "staging update 'step-7'")
    assert re.search(
        r"staging update 'step-7' needs 1,000,000,000,000,000 bytes, [\d,]+ are available",
        str(caught.value),
    )
    with pytest.raises(StagingMemoryError, match="a shared segment needs"):
        Segment(10**15)
    require_memory(1 << 20, "a little")


def test_the_machine_is_a_limit():
    total = os.sysconf("SC_PHYS_PAGES") * PAGE
    assert 0 < available_memory() < total


@pytest.fixture
def cgroups(tmp_path):
    """A tree of control groups as the kernel writes them."""

    def group(path, files, **values):
        folder = tmp_path / "fs" / path
        folder.mkdir(parents=True, exist_ok=True)
        inactive = values.get("inactive", 0)
        (folder / "memory.stat").write_text(
            f"anon 1\ninactive_file {inactive}\ntotal_inactive_file {inactive}\nzswap 0\n"
        )
        (folder / files.limit).write_text(f"{values['limit']}\n")
        (folder / files.usage).write_text(f"{values['usage']}\n")

    def free(membership):
        (tmp_path / "cgroup").write_text(membership)
        return sorted(memory._cgroups_free(tmp_path / "cgroup", tmp_path / "fs"))

    (tmp_path / "fs").mkdir()
    group.free = free
    return group


def test_v2_groups_count_at_every_level(cgroups):
    cgroups("pod", memory._V2, limit=1000, usage=900)
    cgroups("pod/box", memory._V2, limit=500, usage=480, inactive=30)
    cgroups("pod/box/leaf", memory._V2, limit="max", usage=7)
    assert cgroups.free("0::/pod/box/leaf\n") == [50, 100]


def test_v1_groups_count_by_their_memory_controller(cgroups):
    cgroups("memory", memory._V1, limit=2**63 - 4096, usage=10)
    cgroups("memory/box", memory._V1, limit=500, usage=480, inactive=30)
    cgroups("cpu/box", memory._V1, limit=5, usage=0)
    lines = "5:cpu:/box\n4:memory,hugetlb:/box\n0::/box\n"
    assert cgroups.free(lines) == [50, 2**63 - 4096 - 10]


def test_a_container_sees_its_own_group_at_the_root(cgroups):
    cgroups("", memory._V2, limit=300, usage=100)
    assert cgroups.free("0::/system.slice/of-the-host.scope\n") == [200]
    assert cgroups.free("0::/../../sibling\n") == [200]


@pytest.mark.parametrize("membership", ["", "0::/\n", "nonsense"])
def test_no_groups_no_limit(cgroups, membership):
    assert cgroups.free(membership) == []


def test_allocation_of_a_segment_reports_its_progress_and_can_be_stopped():
    steps = []
    Segment(3 * memory.ADVISE_NBYTES, steps.append).close()
    assert steps == [n * memory.ADVISE_NBYTES for n in (1, 2, 3)]

    def stop(_nbytes):
        raise RuntimeError("the round is over")

    with pytest.raises(RuntimeError, match="the round is over"):
        Segment(memory.ADVISE_NBYTES, stop)


def test_memory_that_is_populated_ahead_is_there_when_the_wait_for_it_ends():
    go_on = threading.Semaphore(1)
    segment = Segment(3 * memory.ADVISE_NBYTES, populated=False)
    ahead = memory.PopulatingAhead(segment, go_on.acquire)
    for number in range(3):
        there = (number + 1) * memory.ADVISE_NBYTES
        ahead.wait(number * memory.ADVISE_NBYTES + 1)
        assert resident_pages(segment.buffer[:there]).all()
        go_on.release()
    assert not ahead.failed
    segment.close()


def test_segment_that_is_closed_while_it_is_populated_takes_no_more_memory():
    go_on, begun = threading.Semaphore(0), threading.Event()

    def step():
        begun.set()
        go_on.acquire()

    segment = Segment(20 * memory.ADVISE_NBYTES, populated=False)
    ahead = memory.PopulatingAhead(segment, step)
    assert begun.wait(10)
    buffer = weakref.ref(segment.buffer.base)
    segment.close()
    go_on.release(20)
    with pytest.raises(ClosedError):
        ahead.wait(segment.nbytes)
    # Nor does its error, which is kept, hold the memory.
    gc.collect(0)
    limit = time.monotonic() + 10
    while buffer() is not None and time.monotonic() < limit:
        time.sleep(0.01)
    assert buffer() is None
    assert ahead.failed


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_populating_ahead_that_ends_early_fails_every_wait_for_what_is_missing(num_steps):
    steps = iter(range(num_steps))

    def step():
        if next(steps, None) is None:
            raise RuntimeError("the round is over")

    segment = Segment(3 * memory.ADVISE_NBYTES, populated=False)
    ahead = memory.PopulatingAhead(segment, step)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="the round is over"):
            ahead.wait(segment.nbytes)
    ahead.wait(num_steps * memory.ADVISE_NBYTES)
    assert ahead.failed
    segment.close()
