"""Specs in the seed's style, driven by hosts of today."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from wtransfer.errors import BlockNotKeptError, OffloadingOptionError
from wtransfer.specs.fenced import FencedSpec
from wtransfer.specs.interface import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingManager,
    OffloadingSpec,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferResult,
)
from wtransfer.specs.manager import CPUOffloadingManager
from wtransfer.specs.older.caches import seed_caches
from wtransfer.specs.older.spec import OlderManager, OlderSpec, todays
from wtransfer.specs.older.worker import HandlersWorker
from wtransfer.testing.spec import SpecConformance
from wtransfer.weights import ProcessWeights

_spec = importlib.util.spec_from_file_location(
    "seed_spec_of_tests", Path(__file__).with_name("seed_spec.py")
)
seed = sys.modules["seed_spec_of_tests"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(seed)

ONE, TWO = ReqContext("one"), ReqContext("two")
HIT, MISS = LookupResult.HIT, LookupResult.MISS
A, B, C = (name * 8 for name in (b"A", b"B", b"C"))


@pytest.mark.slow
class TestSeedSpec(SpecConformance):
    """The kit, with real copies; what the seed's style cannot know is excused."""

    spec_cls = seed.SeedSpec
    size_option = "cpu_bytes_to_use"

    @pytest.mark.xfail(reason="handlers of the seed know no groups", strict=True)
    def test_groups_of_layers_are_kept_apart(self, host):
        super().test_groups_of_layers_are_kept_apart(host)

    @pytest.mark.xfail(reason="handlers of the seed know numbers, and no keys", strict=True)
    def test_load_from_reused_slot_gives_no_other_bytes(self, small_host):
        super().test_load_from_reused_slot_gives_no_other_bytes(small_host)


# -- the manager


@pytest.fixture
def manager():
    return OlderManager(seed.SeedManager(2, 16))


def store(manager, *keys, ctx=ONE, success=True):
    prepared = manager.prepare_store(keys, ctx)
    manager.complete_store(prepared.keys_to_store, ctx, success)
    return prepared


def looked_up(manager, *keys):
    return [manager.lookup(key, ONE) for key in keys]


def test_a_manager_that_is_asked_for_series_is_asked_for_one(manager):
    assert manager.on_new_request(ONE) == RequestOffloadingContext()
    assert looked_up(manager, A) == [MISS]
    prepared = store(manager, A, A, B)
    assert prepared.keys_to_store == [A, B]
    assert looked_up(manager, A, B) == [HIT, HIT]
    assert store(manager, C).evicted_keys == [A]
    manager.touch([B], ONE)
    assert store(manager, A).evicted_keys == [C]


def test_a_manager_that_does_not_know_yet():
    slow = OlderManager(SimpleNamespace(lookup=lambda block_hashes: None))
    assert slow.lookup(A, ONE) is LookupResult.RETRY


@pytest.mark.parametrize(
    ("said", "meant"),
    [(True, HIT), (False, MISS), (None, LookupResult.RETRY), (HIT, HIT), (MISS, MISS)],
)
def test_a_manager_between_the_eras_is_asked_as_it_wants_to_be(said, meant):
    between = OlderManager(SimpleNamespace(lookup=lambda key, req_context: said))
    assert between.lookup(A, ONE) is meant


def test_a_manager_of_today_loses_nothing():
    theirs = CPUOffloadingManager(2, enable_events=True)
    manager = OlderManager(theirs)
    store(manager, A)
    assert theirs.lookup(A, ONE) is HIT
    assert [(e.keys, e.medium, e.removed) for e in manager.take_events()] == [
        ([A], Medium.CPU, False)
    ]
    manager.weights_changed()
    assert manager.get_stats()["blocks_idle"] == 1
    manager.reset_cache()
    assert theirs.lookup(A, ONE) is MISS
    assert manager.has_pending_work() is False


def test_what_it_asserts_is_asked_before(manager):
    store(manager, A)
    with pytest.raises(BlockNotKeptError, match=B.hex()):
        manager.prepare_load([A, B], ONE)
    assert store(manager, B, C).evicted_keys == [A]


def test_completions_that_it_would_assert_are_counted(manager):
    store(manager, A)
    manager.prepare_load([A], ONE)
    manager.prepare_load([A], TWO)
    for _ in range(3):
        manager.complete_load([A], ONE)
        manager.complete_store([A], ONE)
    assert manager.get_stats() == {"unknown_completions_total": 5}
    assert manager.prepare_store([B, C], ONE) is None
    manager.complete_load([A], TWO)
    assert manager.prepare_store([B, C], ONE) is not None


def test_events_are_told_in_todays_form(manager):
    store(manager, A, B)
    store(manager, C)
    told = [(event.keys, event.medium, event.removed) for event in manager.take_events()]
    cpu = Medium.CPU
    assert told == [([A, B], cpu, False), ([A], cpu, True), ([C], cpu, False)]
    assert list(manager.take_events()) == []


def test_media_of_other_names_are_storage():
    event = seed.OffloadingEvent([b"0000" + A], 16, "DISK", removed=False)
    inner = SimpleNamespace(take_events=lambda: [event])
    (told,) = OlderManager(inner).take_events()
    assert (told.keys, told.medium) == ([A], Medium.STORAGE)


# An incident of FIELD section 1: a hit after reset_cache().
def test_a_manager_that_cannot_forget_has_forgotten_all_the_same(manager):
    store(manager, A)
    manager.prepare_load([A], ONE)
    manager.reset_cache()
    assert looked_up(manager, A) == [MISS]
    with pytest.raises(BlockNotKeptError):
        manager.prepare_load([A], TWO)
    store(manager, A)
    assert looked_up(manager, A) == [HIT]
    # The load from before the reset holds the block of then, not the one of now.
    manager.complete_load([A], ONE)
    assert manager.get_stats() == {"unknown_completions_total": 0}
    assert store(manager, B).evicted_keys == [A]
    assert looked_up(manager, A, B) == [HIT, HIT]


def test_stores_across_a_reset_end_under_their_own_names(manager):
    manager.prepare_store([A], ONE)
    manager.reset_cache()
    manager.complete_store([A], ONE)
    assert looked_up(manager, A) == [MISS]
    assert store(manager, A).keys_to_store == [A]


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("on_new_request", (ONE,)),
        ("on_request_finished", (ONE,)),
        ("on_schedule_end", (ScheduleEndContext(),)),
        ("has_pending_work", ()),
        ("weights_changed", ()),
        ("reset_cache", ()),
    ],
)
def test_what_a_manager_wants_to_hear_it_hears(method, arguments):
    heard = []

    def hear(*got):
        heard.append(got)
        return True

    assert getattr(OlderManager(SimpleNamespace(**{method: hear})), method)(*arguments) in (
        True,
        None,
    )
    assert heard == [arguments]
    getattr(OlderManager(SimpleNamespace()), method)(*arguments)


def test_numbers_of_its_own_are_shown():
    manager = OlderManager(SimpleNamespace(get_stats=lambda: {"hits_total": 3}))
    assert manager.get_stats() == {"hits_total": 3, "unknown_completions_total": 0}
    assert OlderManager(SimpleNamespace(has_pending_work=lambda: 1)).has_pending_work() is True
    odd = OlderManager(SimpleNamespace(get_stats=object))
    assert odd.get_stats() == {"unknown_completions_total": 0}


def test_shutting_down_is_passed_on_once():
    calls = []
    manager = OlderManager(SimpleNamespace(shutdown=lambda: calls.append(1)))
    manager.shutdown()
    manager.shutdown()
    assert calls == [1]
    OlderManager(SimpleNamespace()).shutdown()


def test_a_manager_in_the_seeds_style_may_have_our_base():
    assert not inspect.isabstract(seed.SeedManager)
    assert seed.SeedManager(1, 1).on_new_request(ONE) == RequestOffloadingContext()


def test_a_manager_of_today_must_hear_of_requests():
    class Unfinished(OffloadingManager):
        def lookup(self, key, ctx): ...

        def prepare_load(self, keys, req_context): ...

        def prepare_store(self, keys, req_context): ...

    class Odd(Unfinished):
        lookup = property(int)

    assert Odd.__abstractmethods__ == {"on_new_request"}
    assert Unfinished.__abstractmethods__ == {"on_new_request"}


# -- the worker


class Gpu:
    medium = staticmethod(lambda: "GPU")


class Cpu:
    medium = staticmethod(lambda: "CPU")


class Handler:
    def __init__(self, *, begins=True, finished=()):
        self.begins, self.finished = begins, list(finished)
        self.waited, self.shut_down = [], 0

    def transfer_async(self, job_id, spec):
        if isinstance(self.begins, Exception):
            raise self.begins
        self.got = (job_id, *spec)
        return self.begins

    def get_finished(self):
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids):
        self.waited.append(job_ids)

    def shutdown(self):
        self.shut_down += 1


def test_jobs_go_to_the_handler_of_their_direction():
    down, up = Handler(finished=[(1, True)]), Handler(finished=[TransferResult(2, False, 7)])
    worker = HandlersWorker([(Gpu, Cpu, down), (Cpu, Gpu, up)])
    where = Cpu()
    assert worker.submit_store(1, GPULoadStoreSpec([4, 5]), where)
    assert worker.submit_load(2, where, GPULoadStoreSpec([6]))
    number, source, destination = down.got
    assert (number, destination) == (1, where)
    assert source.block_ids.tolist() == [4, 5]
    assert source.block_ids.dtype == "int64"
    assert source.medium() == "GPU"
    assert (source.group_sizes, source.block_indices) == ([2], [0])
    assert up.got[2].block_ids.tolist() == [6]
    assert worker.get_finished() == [TransferResult(1, True), TransferResult(2, False, 7)]
    worker.wait({1, 2})
    assert (down.waited, up.waited) == ([{1, 2}], [{1, 2}])


def test_one_handler_for_both_directions_is_asked_once():
    both = Handler(finished=[(1, True)])
    worker = HandlersWorker([(Gpu, Cpu, both), (Cpu, Gpu, both)])
    assert worker.get_finished() == [TransferResult(1, True)]
    worker.wait({1})
    worker.shutdown()
    worker.shutdown()
    assert (both.waited, both.shut_down) == ([{1}], 1)


def test_a_handler_need_not_know_how_to_shut_down():
    HandlersWorker([(Gpu, Cpu, SimpleNamespace())]).shutdown()


def test_a_handler_that_begins_nothing_fails_the_job_only():
    worker = HandlersWorker([(Gpu, Cpu, Handler(begins=False))])
    assert worker.submit_store(1, GPULoadStoreSpec([1]), Cpu()) is False


def test_a_handler_that_raises_fails_the_job_and_is_heard(caplog):
    worker = HandlersWorker([(Gpu, Cpu, Handler(begins=RuntimeError("full")))])
    assert worker.submit_store(1, GPULoadStoreSpec([1]), Cpu()) is False
    assert "job 1 from GPU to CPU could not be begun" in caplog.text
    assert "RuntimeError: full" in caplog.text


def test_a_direction_without_a_handler_fails_the_job_and_is_heard(caplog):
    worker = HandlersWorker([(Gpu, Cpu, Handler())])
    assert worker.submit_load(2, Cpu(), GPULoadStoreSpec([1])) is False
    assert "no handler copies from CPU to GPU; job 2 failed" in caplog.text
    assert "Traceback" not in caplog.text


# -- the spec


def config():
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"cpu_bytes_to_use": 4096}),
        parallel_config=SimpleNamespace(world_size=1),
        cache_config=SimpleNamespace(block_size=4),
    )


def test_only_specs_that_need_it_are_wrapped():
    cache = SimpleNamespace(bytes_per_block=1024)
    spec = seed.SeedSpec(config(), cache)
    wrapped = todays(spec)
    assert isinstance(wrapped, OlderSpec)
    assert wrapped.spec is spec
    assert todays(wrapped) is wrapped

    class Both(seed.SeedSpec):
        def get_worker(self, kv_caches): ...

    both = Both(config(), cache)
    assert todays(both) is both


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ({}, ((4,), 4, 1)),
        (
            {"tokens_per_block": (32, 16), "tokens_per_hash": 8, "blocks_per_chunk": 3},
            ((32, 16), 8, 3),
        ),
        ({"gpu_block_size": (8,), "offloaded_block_size": None}, ((8,), 8, 1)),
        ({"gpu_block_size": 8, "offloaded_block_size": (24,)}, ((8,), 8, 3)),
        ({"config": None}, ((16,), 16, 1)),
    ],
)
def test_a_wrapped_spec_is_believed_in_whatever_form_it_says_how_blocks_are_kept(said, meant):
    given = {"config": config(), "get_handlers": None, **said}
    wrapped = OlderSpec(SimpleNamespace(**given))
    assert (wrapped.tokens_per_block, wrapped.tokens_per_hash, wrapped.blocks_per_chunk) == meant


@pytest.mark.parametrize("options", [{}, {"block_size": 12}])
def test_a_wrapped_spec_says_how_blocks_are_kept(options):
    given = config()
    given.kv_transfer_config.kv_connector_extra_config |= options
    wrapped = todays(seed.SeedSpec(given, SimpleNamespace(bytes_per_block=1024)))
    assert (wrapped.tokens_per_block, wrapped.tokens_per_hash) == ((4,), 4)
    assert wrapped.blocks_per_chunk == options.get("block_size", 4) // 4


def test_the_fence_stands_around_them_too():
    spec = seed.SeedSpec(config(), SimpleNamespace(bytes_per_block=64))
    weights = ProcessWeights()
    fenced = FencedSpec(spec, weights=weights)
    cache = torch.arange(8 * 64, dtype=torch.int32).to(torch.uint8).view(8, 64)
    page = CanonicalKVCacheTensor(cache, 64)
    caches = CanonicalKVCaches([page], [[CanonicalKVCacheRef(0, 64)]])
    manager, worker = fenced.get_manager(), fenced.get_worker(caches)

    def ended(job):
        worker.wait({job})
        return {each.job_id: each.success for each in worker.get_finished()}[job]

    manager.weights_are([worker.stamp()])
    manager.on_new_request(ONE)
    prepared = manager.prepare_store([A], ONE)
    worker.submit_store(1, GPULoadStoreSpec([1]), prepared.store_spec)
    manager.complete_store([A], ONE, ended(1))
    where = manager.prepare_load([A], ONE)
    cache[1] = 0
    worker.submit_load(2, where, GPULoadStoreSpec([1]))
    assert ended(2)
    assert cache[1].tolist() == list(range(64, 128))
    manager.complete_load([A], ONE)
    weights.hold("others")
    manager.weights_are([worker.stamp()])
    assert manager.lookup(A, ONE) is MISS
    worker.shutdown()
    manager.shutdown()


def test_handlers_that_want_canonical_caches_get_them():
    class Between(OffloadingSpec):
        def get_manager(self): ...

        def get_handlers(self, kv_caches):
            self.got = kv_caches
            return [(Gpu, Cpu, Handler())]

    spec = Between(config(), None)
    caches = CanonicalKVCaches([], [])
    worker = todays(spec).get_worker(caches)
    assert spec.got is caches
    assert worker.submit_store(1, GPULoadStoreSpec([1]), Cpu())


def test_handlers_need_not_know_that_somebody_waits():
    worker = HandlersWorker([(Cpu, Gpu, Handler())])
    assert worker.submit_load(1, Cpu(), GPULoadStoreSpec([1]), expedited=True)


def test_caches_by_layer_are_views_of_the_same_memory():
    tensors = [torch.zeros(5, 2, 4, 6, dtype=torch.bfloat16) for _ in range(2)]
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(each, 96) for each in tensors], [[]])
    by_name, backends = seed_caches(caches, SimpleNamespace(gpu_block_size=4))
    assert list(by_name) == list(backends) == ["layer.0", "layer.1"]
    view = by_name["layer.1"]
    assert (tuple(view.shape), view.dtype) == ((5, 4, 24), torch.uint8)
    view[3] = 255
    assert tensors[1][3].isnan().all()
    assert not tensors[1][2].any()


def test_padding_is_left_alone_and_odd_pages_are_refused():
    tensor = torch.zeros(3, 40, dtype=torch.uint8)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 32)], [[]])
    by_name, _ = seed_caches(caches, SimpleNamespace(gpu_block_size=4))
    by_name["layer.0"][:] = 1
    assert tensor.sum(dim=1).tolist() == [32, 32, 32]
    with pytest.raises(OffloadingOptionError, match="32 bytes cannot be divided among the 5 tok"):
        seed_caches(caches, SimpleNamespace(gpu_block_size=5))
