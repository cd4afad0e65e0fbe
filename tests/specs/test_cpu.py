"""The worker as its host sees it: options, jobs, deadlines, ends."""

import gc
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from wtransfer.config import OffloadingConfig
from wtransfer.errors import ForkedError, OffloadingOptionError, StallError
from wtransfer.specs.arena import ArenaLoadStoreSpec
from wtransfer.specs.cpu import CPUOffloadingOptions, CPUOffloadingSpec
from wtransfer.specs.interface import GPULoadStoreSpec


def memory_mappings():
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd:wtransfer" in line for line in maps)


def threads():
    return {each for each in threading.enumerate() if each.name.startswith("wtransfer-")}


@pytest.fixture
def hang(make_rig):
    """A rig whose copies hang until the test ends."""
    rig = make_rig(deadline_s=0.2).fill()
    go_on, copying = threading.Event(), threading.Event()

    def stand_still(*_):
        copying.set()
        go_on.wait(20)

    pages = rig.worker.links[0].copiers[0].pages
    pages.gather = stand_still
    rig.copying = copying
    yield rig
    go_on.set()


# -- options


def test_options_have_the_names_and_defaults_of_the_field(make_rig):
    of_the_host = {"spec_name": "x", "spec_module_path": "y", "block_size": 64}
    extra = {"cpu_bytes_to_use": 1e9, **of_the_host}
    options = CPUOffloadingSpec(replace(make_rig().config, extra_config=extra)).options
    assert options == CPUOffloadingOptions(
        cpu_bytes_to_use=10**9,
        eviction_policy="lru",
        verify_checksums=True,
        num_copy_threads=2,
        deadline_s=30.0,
    )
    assert isinstance(options.cpu_bytes_to_use, int)


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({}, "missing required field `cpu_bytes_to_use`"),
        ({"cpu_bytes_to_use": "much"}, "Expected `int`, got `str` - at `$.cpu_bytes_to_use`"),
        ({"cpu_bytes_to_use": 1.5}, "Expected `int`, got `float` - at `$.cpu_bytes_to_use`"),
        ({"cpu_bytes_to_use": float("inf")}, "got `float` - at `$.cpu_bytes_to_use`"),
        ({"cpu_bytes_to_use": 0}, "Expected `int` >= 1 - at `$.cpu_bytes_to_use`"),
        ({"cpu_bytes_to_use": 9, "deadline_s": -1}, "Expected `float` > 0.0 - at `$.deadline_s`"),
        ({"cpu_bytes_to_use": 9, "num_copy_threads": 65}, "at `$.num_copy_threads`"),
        (
            {"cpu_bytes_to_use": 9, "evict_policy": "arc"},
            "unknown field `evict_policy`; the options are cpu_bytes_to_use (int), ",
        ),
    ],
)
def test_unusable_or_unknown_option_is_refused_by_name(extra, said):
    with pytest.raises(OffloadingOptionError) as caught:
        CPUOffloadingSpec(OffloadingConfig(extra_config=extra))
    assert said in str(caught.value)
    assert str(caught.value).startswith("kv_connector_extra_config of CPUOffloadingSpec: ")


def test_subclass_of_the_spec_may_have_more_options(make_rig, monkeypatch):
    class MoreOptions(CPUOffloadingOptions, frozen=True, kw_only=True):
        folder: str

    class More(CPUOffloadingSpec):
        options_cls = MoreOptions

    config = make_rig().config
    config.extra_config["folder"] = "here"
    assert More(config).options.folder == "here"


def test_too_little_memory_for_one_block_is_refused_with_what_it_takes(arena_rig):
    with pytest.raises(
        OffloadingOptionError, match=r"cpu_bytes_to_use=100 is too little for one block.* 8,192"
    ):
        arena_rig.Rig(cpu_bytes_to_use=100)


def test_rank_out_of_range_is_refused(arena_rig):
    with pytest.raises(OffloadingOptionError, match="rank 2 of 2: ranks begin with 0"):
        arena_rig.Rig(rank=2, world_size=2)


def test_unknown_policy_is_refused_by_get_manager(make_rig):
    with pytest.raises(OffloadingOptionError, match="mru"):
        make_rig(eviction_policy="mru").spec.get_manager()


def test_unknown_block_size_is_refused_with_where_to_set_it(arena_rig):
    with pytest.raises(OffloadingOptionError, match="worker_kv_bytes_per_block=0"):
        arena_rig.Rig(num_layers=0)


def test_cache_with_larger_blocks_than_configured_is_refused(make_rig, arena_rig):
    rig = make_rig(page_nbytes=(512,), num_layers=2)
    larger = arena_rig.Rig(page_nbytes=(1024,), num_layers=2)
    larger.close()
    with pytest.raises(OffloadingOptionError, match=r"2,048 bytes in a chunk.*a slot has 1,024"):
        type(rig.spec)(rig.config).get_worker(larger.caches)


def test_cache_with_other_groups_is_refused(make_rig):
    rig, other = make_rig(), make_rig(page_nbytes=(1024, 512))
    with pytest.raises(OffloadingOptionError, match="has 2 groups of layers, the config 1"):
        type(rig.spec)(rig.config).get_worker(other.caches)


def test_both_sides_are_made_once_and_agree_on_the_slots(make_rig):
    rig = make_rig()
    assert rig.spec.get_worker(rig.caches) is rig.worker
    assert rig.spec.get_manager() is rig.spec.get_manager()
    assert rig.spec.layout == rig.part.layout
    assert rig.part.layout.used_nbytes <= rig.spec.options.cpu_bytes_to_use


def test_worker_that_cannot_be_made_releases_its_rank(make_rig, arena_rig, monkeypatch):
    def no_threads(*_):
        raise RuntimeError("can't start new thread")

    options = {"rank": 0, "world_size": 2, "engine_id": f"engine-{os.getpid()}"}
    with monkeypatch.context() as patch:
        patch.setattr("wtransfer.specs.cpu.Jobs", no_threads)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            arena_rig.Rig(**options)
    make_rig(**options, deadline_s=0.1)


# -- jobs


def test_job_id_in_use_is_refused(hang, arena_rig):
    number = hang.submit_store([1], [1], [arena_rig.key(1)])
    again = ArenaLoadStoreSpec([2], [arena_rig.key(2)])
    assert not hang.worker.submit_store(number, GPULoadStoreSpec([2]), again)
    # Nor does one that makes no sense give a result to the one that runs.
    assert not hang.worker.submit_store(number, GPULoadStoreSpec([1, 2]), again)
    assert hang.worker.get_finished() == []


def test_expedited_load_is_a_load(make_rig, arena_rig):
    rig = make_rig().fill()
    rig.store([1], [1], [arena_rig.key(1)])
    place = ArenaLoadStoreSpec([1], [arena_rig.key(1)])
    assert rig.worker.submit_load(99, place, GPULoadStoreSpec([3]), expedited=True)
    rig.worker.wait({99})
    assert [(each.job_id, each.success) for each in rig.worker.get_finished()] == [(99, True)]
    assert rig.block(3) == rig.block(1)


def test_jobs_bytes_and_failures_are_counted(make_rig, arena_rig):
    rig = make_rig().fill()
    nbytes = len(rig.block(0))
    rig.store([1, 2], [1, 2], [arena_rig.key(1), arena_rig.key(2)])
    rig.load([3], [1], [arena_rig.key(1)])
    rig.load([3], [4], [arena_rig.key(1)])
    assert rig.worker.get_stats() == {
        "stores_total": 1,
        "store_bytes_total": 2 * nbytes,
        "loads_total": 2,
        "load_bytes_total": nbytes,
        "loads_failed_total": 1,
        "loads_failed_absent_total": 1,
        "jobs_running": 0,
    }


def test_wait_names_a_job_without_progress_at_the_deadline(hang, arena_rig):
    number = hang.submit_store([1], [1], [arena_rig.key(1)])
    with pytest.raises(StallError) as caught:
        hang.worker.wait({number})
    assert "rank 0 of engine 'engine': jobs [0] made no progress within 0.2 s" in str(caught.value)
    assert caught.value.seconds == 0.2


def test_wait_goes_on_while_a_job_makes_progress(make_rig, arena_rig, later):
    rig = make_rig(deadline_s=60.0, num_copy_threads=1).fill()
    pages = rig.worker.links[0].copiers[0].pages
    gather = pages.gather

    def slowly(*arguments):
        later(40)
        gather(*arguments)

    pages.gather = slowly
    numbers = [rig.submit_store([n], [n], [arena_rig.key(n)]) for n in range(5)]
    rig.worker.wait(set(numbers))
    assert len(rig.worker.get_finished()) == 5


def test_wait_names_a_job_that_hangs_though_others_end(make_rig, arena_rig, later):
    rig = make_rig(deadline_s=60.0).fill()
    pages = rig.worker.links[0].copiers[0].pages
    gather, go_on, stop = pages.gather, threading.Event(), threading.Event()

    def hang_at_block_7(mark, blocks, *arguments):
        if 7 in blocks:
            go_on.wait(20)
        gather(mark, blocks, *arguments)

    def store_on():
        while not stop.is_set():
            for _ in range(6):
                number = rig.submit_store([1], [1], [arena_rig.key(1)])
                rig.worker.wait({number})
            later(61)

    pages.gather = hang_at_block_7
    hung = rig.submit_store([7], [7], [arena_rig.key(7)])
    others = threading.Thread(target=store_on)
    others.start()
    try:
        with pytest.raises(StallError, match=r"jobs \[0\] made no progress"):
            rig.worker.wait({hung})
        assert len(rig.worker.get_finished()) > 5
    finally:
        stop.set()
        others.join()
        go_on.set()


# -- ends


def test_shutdown_leaves_neither_memory_nor_threads(arena_rig):
    gc.collect()  # what tests before this one have left in cycles
    before = memory_mappings(), threads()
    rig = arena_rig.Rig().fill()
    rig.store([1], [1], [arena_rig.key(1)])
    assert memory_mappings() == before[0] + 1
    assert len(threads() - before[1]) == 4
    rig.close()
    rig.close()
    assert threads() <= before[1]
    arena = ArenaLoadStoreSpec([1], [arena_rig.key(1)])
    assert not rig.worker.submit_store(7, GPULoadStoreSpec([1]), arena)
    assert rig.worker.get_finished() == []
    # Whoever still has the objects does not keep the memory.
    assert memory_mappings() <= before[0]
    assert rig.part.slots.shape == (0, rig.part.layout.part_nbytes)
    assert rig.worker.get_stats()["stores_total"] == 1


def test_shutdown_fails_jobs_in_flight(make_rig, arena_rig, monkeypatch):
    monkeypatch.setattr("wtransfer.kv.copier.TASK_NBYTES", 1)
    rig = make_rig(num_blocks=64, num_slots=64, num_copy_threads=1).fill()
    pages = rig.worker.links[0].copiers[0].pages
    gather, copying = pages.gather, threading.Event()

    def slowly(*arguments):
        copying.set()
        time.sleep(0.2)
        gather(*arguments)

    pages.gather = slowly
    many = rig.submit_store(list(range(64)), list(range(64)), list(map(arena_rig.key, range(64))))
    behind = rig.submit_load([0], [63], [arena_rig.key(63)])
    assert copying.wait(10)
    began = time.monotonic()
    rig.close()
    assert time.monotonic() - began < 6  # all 64 would take twice as long
    results = {each.job_id: each.success for each in rig.worker.get_finished()}
    assert results == {many: False, behind: False}
    assert rig.failures() == {"stores_failed_shutdown": 1, "loads_failed_shutdown": 1}
    rig.worker.wait({many, behind})


def test_shutdown_leaves_a_hanging_copy_and_keeps_its_memory(hang, arena_rig, caplog):
    hang.submit_store([1], [1], [arena_rig.key(1)])
    assert hang.copying.wait(10)
    began = time.monotonic()
    hang.close()
    assert time.monotonic() - began < 10
    assert "rank 0 of engine 'engine': a copy hangs" in caplog.text
    assert len(hang.part.slots), "nobody else may write there"
    hang.close()


def test_forked_child_has_no_worker_and_the_parent_goes_on(make_rig, arena_rig):
    rig = make_rig().fill()
    rig.store([2], [3], [arena_rig.key(0)])
    pid = os.fork()
    if pid == 0:
        code = 0
        for call in (
            lambda: rig.submit_store([1], [1], [arena_rig.key(1)]),
            lambda: rig.submit_load([1], [3], [arena_rig.key(0)]),
            rig.worker.get_finished,
            lambda: rig.worker.wait({1}),
        ):
            try:
                call()
                code |= 1
            except ForkedError as error:  # noqa: PERF203
                code |= 0 if "after fork() make a new one" in str(error) else 2
        rig.worker.shutdown()
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert rig.load([5], [3], [arena_rig.key(0)]).success
    assert rig.block(5) == rig.block(2)


def test_store_threads_are_niced_and_load_threads_are_not(make_rig):
    make_rig()
    nice = {}
    for thread in threads():
        kind = thread.name.split("-")[1]
        nice.setdefault(kind, set()).add(os.getpriority(os.PRIO_PROCESS, thread.native_id))
    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert nice == {"store": {max(mine, 10)}, "load": {mine}}
    assert signal.getsignal(signal.SIGINT) is not None
