"""Specs and configs of the seed's API and of the current one, each for hosts of the other."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from wtransfer import (
    KVCacheConfig,
    KVTransferConfig,
    OffloadingSpecFactory,
    ParallelConfig,
    ServingConfig,
)
from wtransfer.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingParallelConfig,
    tokens_per_block,
)
from wtransfer.errors import BlockNotKeptError, OffloadingOptionError, PluginTypeError
from wtransfer.registry import resolve as registry_module
from wtransfer.registry.hooks import PluginManager
from wtransfer.registry.resolve import Host
from wtransfer.specs.arena_manager import CPUOffloadingManager
from wtransfer.specs.interface import (
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingSpec,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    TransferResult,
)
from wtransfer.specs.seed_adapter import (
    HandlersWorker,
    SeedManagerAdapter,
    SeedSpecAdapter,
    adapt_spec,
    seed_caches,
    to_offloading_config,
    to_serving_config,
)
from wtransfer.testing.spec import SpecConformance

_spec = importlib.util.spec_from_file_location(
    "seed_spec_of_tests", Path(__file__).with_name("seed_spec.py")
)
seed = sys.modules["seed_spec_of_tests"] = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(seed)

ONE, TWO = ReqContext("one"), ReqContext("two")
HIT, MISS = LookupResult.HIT, LookupResult.MISS
A, B, C = (name * 8 for name in (b"A", b"B", b"C"))
SERVING = ServingConfig(
    parallel_config=ParallelConfig(rank=1, world_size=2, tensor_parallel_size=2),
    kv_transfer_config=KVTransferConfig(
        engine_id="e", kv_connector_extra_config={"spec_name": "mine", "block_size": 64}
    ),
)
CACHE = KVCacheConfig(num_blocks=8, block_size=32, bytes_per_block=4096)
CURRENT = OffloadingConfig(
    extra_config={"spec_name": "mine"},
    engine_id="e",
    worker_kv_bytes_per_block=4096,
    groups=(OffloadingGroupConfig(32),),
    cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=2),
    parallel=OffloadingParallelConfig(rank=1, world_size=2, tp_size=2),
)


@pytest.fixture(autouse=True)
def fresh_host(monkeypatch):
    """What is installed, without what other tests registered."""
    monkeypatch.setattr(registry_module, "host", Host({}, board=PluginManager()))


def create(cls, *configs):
    registry_module.registry("specs").register("mine", cls)
    return OffloadingSpecFactory.create_spec(*configs)


# -- constructors


class Base(OffloadingSpec):
    def get_manager(self): ...

    def get_worker(self, kv_caches): ...


class Seed(Base):
    def __init__(self, vllm_config, kv_cache_config):
        self.got = (vllm_config, kv_cache_config)


class SeedWithDefault(Base):
    def __init__(self, config, kv_cache_config=None):
        self.got = (config, kv_cache_config)


class Current(Base):
    def __init__(self, config):
        self.got = (config,)


class CurrentWithOptions(Base):
    def __init__(self, config, clock=None, *, verbose=False):
        self.got = (config,)
        assert clock is None
        assert not verbose


class PassesOn(Current):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class PassesOnToSeed(Seed):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class PassesOnAll(Seed):
    def __init__(*args, **kwargs):
        Seed.__init__(*args, **kwargs)


class FirstAndRest(Seed):
    def __init__(self, config, *rest):
        super().__init__(config, *rest)


def decorated(function):
    @functools.wraps(function)
    def decorator(*args, **kwargs):
        return function(*args, **kwargs)

    return decorator


class Decorated(Base):
    @decorated
    def __init__(self, config):
        self.got = (config,)


@dataclass
class AsDataclass(Base):
    config: Any

    def __post_init__(self):
        self.got = (self.config,)


class Undecided(Base):
    def __init__(self, *args):
        self.got = args


class UndecidedWithHandlers(OffloadingSpec):
    def __init__(self, *args):
        self.got = args

    def get_manager(self): ...

    def get_handlers(self, kv_caches, attn_backends): ...


SEEDS = [
    Seed,
    SeedWithDefault,
    PassesOnToSeed,
    PassesOnAll,
    FirstAndRest,
    UndecidedWithHandlers,
]
CURRENTS = [Current, CurrentWithOptions, PassesOn, Decorated, AsDataclass, Undecided]


@pytest.mark.parametrize("cls", SEEDS)
def test_constructor_of_the_seed_gets_the_serving_configs(cls):
    spec = create(cls, SERVING, CACHE)
    assert type(spec) is cls
    assert spec.got == (SERVING, CACHE)
    adapted = OffloadingSpecFactory.create_spec(CURRENT)
    assert getattr(adapted, "spec", adapted).got == to_serving_config(CURRENT)


@pytest.mark.parametrize("cls", CURRENTS)
def test_current_constructor_gets_the_offloading_config(cls):
    (got,) = create(cls, CURRENT).got
    assert got is CURRENT
    converted = OffloadingSpecFactory.create_spec(SERVING, CACHE)
    assert converted.got == (to_offloading_config(SERVING, CACHE),)


def test_options_of_an_adapter_are_those_of_its_spec(caplog):
    class Handlers(OffloadingSpec):
        def get_manager(self): ...

        def get_handlers(self, kv_caches): ...

    config = replace(CURRENT, extra_config={"depth": 3})
    spec = Handlers(config)
    adapted = adapt_spec(spec, config)
    assert (type(adapted).__name__, dict(adapted.options)) == ("SeedSpecAdapter", {"depth": 3})
    # Of the spec, once, and not of the adapter as well.
    (said,) = caplog.messages
    assert "Handlers has no options_cls" in said


def test_inherited_constructor_takes_an_offloading_config():
    spec = create(Base, CURRENT)
    assert spec.config is CURRENT
    assert spec.extra_config == {"spec_name": "mine"}
    assert (spec.tokens_per_block, spec.tokens_per_hash, spec.blocks_per_chunk) == ((32,), 32, 2)


class TakesThree(Base):
    def __init__(self, config, kv_cache_config, folder): ...


class TakesNone(Base):
    def __init__(self): ...


class TakesOwnName(Base):
    def __init__(self, config, *, folder): ...


class TakesKeywords(Base):
    def __init__(self, *, config, kv_cache_config): ...


@pytest.mark.parametrize("cls", [TakesThree, TakesNone, TakesOwnName, TakesKeywords])
def test_constructor_of_other_arguments_is_refused_before_it_runs(cls):
    with pytest.raises(PluginTypeError, match=f"{cls.__name__} takes ") as caught:
        create(cls, SERVING, CACHE)
    assert caught.value.kind == "specs"


@pytest.mark.parametrize("cls", [Seed, Current])
def test_constructor_runs_once_and_its_type_error_is_raised(cls):
    runs = []

    class Raises(cls):
        def __init__(self, config, *rest):
            runs.append(config)
            raise TypeError("of its own")

    with pytest.raises(TypeError, match=r"^of its own$"):
        create(Raises, SERVING, CACHE)
    assert len(runs) == 1


# -- configs


def test_serving_configs_are_converted():
    found = to_offloading_config(SERVING, CACHE)
    assert found == OffloadingConfig(
        extra_config={"spec_name": "mine", "block_size": 64},
        engine_id="e",
        worker_kv_bytes_per_block=4096,
        groups=(OffloadingGroupConfig(32),),
        cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=2),
        parallel=OffloadingParallelConfig(rank=1, world_size=2, tp_size=2),
    )


def test_config_objects_of_a_serving_engine_are_converted():
    group = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=16), layer_names=["a", "b"])
    theirs = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(engine_id=None, kv_connector_extra_config={}),
        parallel_config=ParallelConfig(),
        model_config=SimpleNamespace(model="m", dtype="torch.float16"),
        kv_events_config=SimpleNamespace(enable_kv_cache_events=True),
    )
    cache = SimpleNamespace(
        num_blocks=10,
        kv_cache_groups=[group],
        kv_cache_tensors=[SimpleNamespace(size=1000), SimpleNamespace(size=3000)],
    )
    found = to_offloading_config(theirs, cache)
    assert found.groups == (OffloadingGroupConfig(16, ("a", "b"), 0),)
    assert found.worker_kv_bytes_per_block == 400
    assert (found.model.name, found.model.dtype) == ("m", "float16")
    assert found.enable_kv_cache_events is True
    assert (found.engine_id, found.cache.blocks_per_chunk) == ("", 1)


def test_chunk_of_partial_blocks_is_refused():
    with pytest.raises(OffloadingOptionError, match=r"block_size=64.*48 tokens"):
        to_offloading_config(SERVING, KVCacheConfig(block_size=48))


def test_conversion_there_and_back_keeps_all_fields():
    config, kv_cache_config = to_serving_config(CURRENT)
    back = to_offloading_config(config, kv_cache_config)
    assert back.extra_config == {"spec_name": "mine", "block_size": 64}
    assert (back.groups, back.cache, back.parallel) == (
        CURRENT.groups,
        CURRENT.cache,
        CURRENT.parallel,
    )
    assert back.worker_kv_bytes_per_block == 4096


@pytest.mark.parametrize(
    ("in_config", "beside", "meant"),
    [(32, 16, 32), (None, 48, 48), (32, None, 32), (None, None, 16)],
)
def test_tokens_per_block_of_the_host_goes_first(in_config, beside, meant):
    """Ours beside it has a default, and connectors name blocks by the host's."""
    holders = [None if size is None else KVCacheConfig(8, size) for size in (in_config, beside)]
    config = ServingConfig(kv_transfer_config=KVTransferConfig("c", "e"), cache_config=holders[0])
    assert tokens_per_block(config, holders[1]) == meant
    assert to_offloading_config(config, holders[1]).groups[0].tokens_per_block == meant


class TestSeedSpec(SpecConformance):
    """The kit, with real copies; what the seed's style cannot know is excused."""

    spec_cls = seed.SeedSpec
    size_option = "cpu_bytes_to_use"
    expected_failures: ClassVar = {
        "test_groups_of_layers_are_kept_apart": "handlers of the seed know no groups",
        "test_load_from_reused_slot_gives_no_other_bytes": (
            "handlers of the seed know numbers, and no keys"
        ),
    }


# -- the manager


@pytest.fixture
def manager():
    return SeedManagerAdapter(seed.SeedManager(2, 16))


def store(manager, *keys, ctx=ONE, success=True):
    prepared = manager.prepare_store(keys, ctx)
    manager.complete_store(prepared.keys_to_store, ctx, success)
    return prepared


def looked_up(manager, *keys):
    return [manager.lookup(key, ONE) for key in keys]


def test_use_is_passed_on(manager):
    store(manager, A, B)
    assert store(manager, C).evicted_keys == [A]
    manager.touch([B], ONE)
    assert store(manager, A).evicted_keys == [C]


@pytest.mark.parametrize(
    ("said", "meant"),
    [(True, HIT), (False, MISS), (None, LookupResult.RETRY), (HIT, HIT), (MISS, MISS)],
)
def test_lookup_is_called_by_its_signature(said, meant):
    between = SeedManagerAdapter(SimpleNamespace(lookup=lambda key, req_context: said))
    assert between.lookup(A, ONE) is meant


def test_current_manager_is_passed_through():
    theirs = CPUOffloadingManager(2, enable_events=True)
    manager = SeedManagerAdapter(theirs)
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


def test_duplicate_completions_are_counted_and_not_passed_on(manager):
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


def test_events_are_converted(manager):
    store(manager, A, B)
    store(manager, C)
    told = [(event.keys, event.medium, event.removed) for event in manager.take_events()]
    cpu = Medium.CPU
    assert told == [([A, B], cpu, False), ([A], cpu, True), ([C], cpu, False)]
    assert list(manager.take_events()) == []


def test_unknown_medium_is_storage():
    event = seed.OffloadingEvent([bytes(4) + A], 16, "DISK", removed=False)
    inner = SimpleNamespace(take_events=lambda: [event])
    (told,) = SeedManagerAdapter(inner).take_events()
    assert (told.keys, told.medium) == ([A], Medium.STORAGE)


# An incident of FIELD section 1: a hit after reset_cache().
def test_reset_of_a_manager_without_reset_makes_all_blocks_misses(manager):
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


def test_store_across_a_reset_completes_under_its_old_name(manager):
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
def test_notifications_are_passed_on_where_the_manager_has_a_method(method, arguments):
    heard = []

    def hear(*got):
        heard.append(got)
        return True

    assert getattr(SeedManagerAdapter(SimpleNamespace(**{method: hear})), method)(*arguments) in (
        True,
        None,
    )
    assert heard == [arguments]
    getattr(SeedManagerAdapter(SimpleNamespace()), method)(*arguments)


def test_stats_of_the_manager_are_included():
    manager = SeedManagerAdapter(SimpleNamespace(get_stats=lambda: {"hits_total": 3}))
    assert manager.get_stats() == {"hits_total": 3, "unknown_completions_total": 0}
    odd = SeedManagerAdapter(SimpleNamespace(get_stats=object))
    assert odd.get_stats() == {"unknown_completions_total": 0}


def test_shutdown_is_passed_on_once():
    calls = []
    manager = SeedManagerAdapter(SimpleNamespace(shutdown=lambda: calls.append(1)))
    manager.shutdown()
    manager.shutdown()
    assert calls == [1]
    SeedManagerAdapter(SimpleNamespace()).shutdown()


def test_seed_manager_may_subclass_the_current_base():
    assert not inspect.isabstract(seed.SeedManager)
    assert seed.SeedManager(1, 1).on_new_request(ONE) == RequestOffloadingContext()


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


def test_jobs_are_submitted_to_the_handler_of_their_direction():
    down, up = Handler(finished=[(1, True)]), Handler(finished=[TransferResult(2, False, 7)])
    worker = HandlersWorker([(Gpu, Cpu, down), (Cpu, Gpu, up)])
    where = Cpu()
    assert worker.submit_store(1, GPULoadStoreSpec([4, 5]), where)
    assert worker.submit_load(2, where, GPULoadStoreSpec([6]), expedited=True)
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


def test_handler_of_both_directions_is_called_once():
    both = Handler(finished=[(1, True)])
    worker = HandlersWorker([(Gpu, Cpu, both), (Cpu, Gpu, both)])
    assert worker.get_finished() == [TransferResult(1, True)]
    worker.wait({1})
    worker.shutdown()
    worker.shutdown()
    assert (both.waited, both.shut_down) == ([{1}], 1)


def test_handler_that_refuses_or_raises_fails_the_job_and_is_logged(caplog):
    worker = HandlersWorker([(Gpu, Cpu, Handler(begins=False))])
    assert worker.submit_store(1, GPULoadStoreSpec([1]), Cpu()) is False
    worker = HandlersWorker([(Gpu, Cpu, Handler(begins=RuntimeError("full")))])
    assert worker.submit_store(1, GPULoadStoreSpec([1]), Cpu()) is False
    assert "job 1 from GPU to CPU could not be begun" in caplog.text
    assert "RuntimeError: full" in caplog.text


def test_direction_without_a_handler_fails_the_job_and_is_logged(caplog):
    worker = HandlersWorker([(Gpu, Cpu, Handler())])
    assert worker.submit_load(2, Cpu(), GPULoadStoreSpec([1])) is False
    assert "no handler copies from CPU to GPU; job 2 failed" in caplog.text
    assert "Traceback" not in caplog.text


# -- the spec


def config():
    return ServingConfig(
        kv_transfer_config=KVTransferConfig(kv_connector_extra_config={"cpu_bytes_to_use": 4096}),
        cache_config=KVCacheConfig(block_size=4),
    )


def test_spec_with_handlers_is_adapted_for_an_offloading_config():
    spec = create(UndecidedWithHandlers, CURRENT)
    assert isinstance(spec, SeedSpecAdapter)
    assert spec.config is CURRENT
    assert (spec.tokens_per_block, spec.tokens_per_hash, spec.blocks_per_chunk) == ((32,), 32, 2)


def test_only_specs_without_a_worker_are_adapted():
    cache = SimpleNamespace(bytes_per_block=1024)
    spec = seed.SeedSpec(config(), cache)
    wrapped = adapt_spec(spec)
    assert isinstance(wrapped, SeedSpecAdapter)
    assert wrapped.spec is spec
    assert (wrapped.tokens_per_block, wrapped.blocks_per_chunk) == ((4,), 1)
    assert adapt_spec(wrapped) is wrapped

    class Both(seed.SeedSpec):
        def get_worker(self, kv_caches): ...

    both = Both(config(), cache)
    assert adapt_spec(both) is both


def test_handlers_of_one_argument_get_canonical_caches():
    class Between(OffloadingSpec):
        def get_manager(self): ...

        def get_handlers(self, kv_caches):
            self.got = kv_caches
            return [(Gpu, Cpu, Handler())]

    spec = Between(config(), None)
    caches = CanonicalKVCaches([], [])
    worker = adapt_spec(spec).get_worker(caches)
    assert spec.got is caches
    assert worker.submit_store(1, GPULoadStoreSpec([1]), Cpu())


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


def test_padding_stays_untouched_and_odd_pages_are_refused():
    tensor = torch.zeros(3, 40, dtype=torch.uint8)
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(tensor, 32)], [[]])
    by_name, _ = seed_caches(caches, SimpleNamespace(gpu_block_size=4))
    by_name["layer.0"][:] = 1
    assert tensor.sum(dim=1).tolist() == [32, 32, 32]
    with pytest.raises(OffloadingOptionError, match="32 bytes cannot be divided among the 5 tok"):
        seed_caches(caches, SimpleNamespace(gpu_block_size=5))
