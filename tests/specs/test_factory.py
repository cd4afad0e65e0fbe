"""What the factory gives to a constructor, and whose hooks it lets be called."""

from __future__ import annotations

import functools
import inspect
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from wtransfer import KVCacheConfig, KVTransferConfig, ParallelConfig, ServingConfig
from wtransfer.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingParallelConfig,
    tokens_per_block,
)
from wtransfer.errors import OffloadingOptionError, PluginTypeError
from wtransfer.registry import hooks
from wtransfer.registry import registry as registry_module
from wtransfer.registry.hooks import PluginManager as Board
from wtransfer.registry.hooks import hookimpl
from wtransfer.registry.registry import Host
from wtransfer.specs.configs import to_offloading_config, to_serving_config
from wtransfer.specs.constructors import constructor_of
from wtransfer.specs.factory import OffloadingSpecFactory
from wtransfer.specs.interface import OffloadingManager, OffloadingSpec
from wtransfer.specs.manager import CPUOffloadingManager
from wtransfer.specs.older.spec import OlderSpec

SERVING = ServingConfig(
    parallel_config=ParallelConfig(rank=1, world_size=2, tensor_parallel_size=2),
    kv_transfer_config=KVTransferConfig(
        engine_id="e", kv_connector_extra_config={"spec_name": "mine", "block_size": 64}
    ),
)
CACHE = KVCacheConfig(num_blocks=8, block_size=32, bytes_per_block=4096)
TODAY = OffloadingConfig(
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
    monkeypatch.setattr(registry_module, "host", Host({}, board=Board()))


class Base(OffloadingSpec):
    def get_manager(self): ...

    def get_worker(self, kv_caches): ...


class Inherits(Base):
    """The constructor of the interface."""


class Seed(Base):
    def __init__(self, vllm_config, kv_cache_config):
        self.got = (vllm_config, kv_cache_config)


class SeedWithDefault(Base):
    def __init__(self, config, kv_cache_config=None):
        self.got = (config, kv_cache_config)


class SeedByName(Base):
    def __init__(self, *, vllm_config, kv_cache_config):
        self.got = (vllm_config, kv_cache_config)


class SeedHalfByName(Base):
    def __init__(self, config, *, kv_cache_config):
        self.got = (config, kv_cache_config)


class Today(Base):
    def __init__(self, config):
        self.got = (config,)


class TodayWithOptions(Base):
    def __init__(self, config, clock=None, *, verbose=False):
        self.got = (config,)
        assert clock is None
        assert not verbose


class TodayByName(Base):
    def __init__(self, *, config):
        self.got = (config,)


class HandsOn(Today):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class HandsOnToSeed(Seed):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class HandsOnNamesOnly(TodayByName):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


class FirstAndRest(Seed):
    def __init__(self, config, *rest):
        super().__init__(config, *rest)


class ByNew(Base):
    def __new__(cls, config, kv_cache_config):
        made = super().__new__(cls)
        made.got = (config, kv_cache_config)
        return made

    def __init__(self, *_): ...


def decorated(function):
    @functools.wraps(function)
    def decorator(*args, **kwargs):
        return function(*args, **kwargs)

    return decorator


class Decorated(Base):
    @decorated
    def __init__(self, config):
        self.got = (config,)


class Meta(type(OffloadingSpec)):
    def __call__(cls, *args, **kwargs):
        return super().__call__(*args, **kwargs)


class WithMeta(Seed, metaclass=Meta):
    """A metaclass whose call says nothing."""


@dataclass
class AsDataclass(Base):
    config: Any

    def __post_init__(self):
        self.got = (self.config,)


class Unreadable(Today):
    __signature__ = "no signature"


class Lonely(Base):
    def __init__(self, *args):
        self.got = args


class LonelyOlder(OffloadingSpec):
    def __init__(self, *args):
        self.got = args

    def get_manager(self): ...

    def get_handlers(self, kv_caches, attn_backends): ...


SEED = [
    Seed,
    SeedWithDefault,
    SeedByName,
    SeedHalfByName,
    HandsOnToSeed,
    FirstAndRest,
    ByNew,
    WithMeta,
    LonelyOlder,
]
TODAYS = [
    Today,
    TodayWithOptions,
    TodayByName,
    HandsOn,
    HandsOnNamesOnly,
    Decorated,
    AsDataclass,
    Unreadable,
    Lonely,
]


def create(cls, *arguments):
    registry_module.registry("specs").register("mine", cls)
    spec = OffloadingSpecFactory.create_spec(*arguments)
    return spec.spec if isinstance(spec, OlderSpec) else spec


@pytest.mark.parametrize("cls", SEED)
def test_a_constructor_of_two_gets_the_seeds_configs(cls):
    assert create(cls, SERVING, CACHE).got == (SERVING, CACHE)


@pytest.mark.parametrize("cls", TODAYS)
def test_a_constructor_of_one_gets_todays_config(cls):
    (got,) = create(cls, TODAY).got
    assert got is TODAY


@pytest.mark.parametrize("cls", TODAYS)
def test_a_constructor_of_one_gets_what_the_seeds_configs_say(cls):
    (got,) = create(cls, SERVING, CACHE).got
    assert got == to_offloading_config(SERVING, CACHE)


@pytest.mark.parametrize("cls", SEED)
def test_a_constructor_of_two_gets_what_todays_config_says(cls):
    config, kv_cache_config = create(cls, TODAY).got
    assert (config, kv_cache_config) == to_serving_config(TODAY)


def test_the_interfaces_constructor_takes_either():
    spec = create(Inherits, TODAY)
    assert spec.config is TODAY
    assert spec.extra_config == {"spec_name": "mine"}
    assert (spec.tokens_per_block, spec.tokens_per_hash, spec.blocks_per_chunk) == ((32,), 32, 2)


class TakesThree(Base):
    def __init__(self, config, kv_cache_config, folder): ...


class TakesNone(Base):
    def __init__(self): ...


class TakesOwnName(Base):
    def __init__(self, config, *, folder): ...


@pytest.mark.parametrize("cls", [TakesThree, TakesNone, TakesOwnName])
def test_a_constructor_that_cannot_be_served_is_refused_before_it_runs(cls):
    with pytest.raises(PluginTypeError, match=f"{cls.__name__} takes ") as caught:
        create(cls, SERVING, CACHE)
    assert caught.value.kind == "specs"


@pytest.mark.parametrize("cls", [Seed, Today])
def test_a_constructor_runs_once_and_its_errors_are_its_own(cls):
    runs = []

    class Raises(cls):
        def __init__(self, config, *rest):
            runs.append(config)
            raise TypeError("of its own")

    with pytest.raises(TypeError, match=r"^of its own$"):
        create(Raises, SERVING, CACHE)
    assert len(runs) == 1


def test_a_hopeless_signature_is_survived():
    with pytest.raises((TypeError, ValueError)):
        inspect.signature(Unreadable)
    assert constructor_of(Unreadable).style == "today"


# -- from one config to the other


def test_the_seeds_configs_boiled_down():
    found = to_offloading_config(SERVING, CACHE)
    assert found == OffloadingConfig(
        extra_config={"spec_name": "mine", "block_size": 64},
        engine_id="e",
        worker_kv_bytes_per_block=4096,
        groups=(OffloadingGroupConfig(32),),
        cache=OffloadingCacheConfig(tokens_per_hash=32, blocks_per_chunk=2),
        parallel=OffloadingParallelConfig(rank=1, world_size=2, tp_size=2),
    )


def test_a_serving_engines_own_configs_boiled_down():
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


def test_a_chunk_must_consist_of_whole_blocks():
    with pytest.raises(OffloadingOptionError, match=r"block_size=64.*48 tokens"):
        to_offloading_config(SERVING, KVCacheConfig(block_size=48))


def test_there_and_back_says_the_same():
    config, kv_cache_config = to_serving_config(TODAY)
    back = to_offloading_config(config, kv_cache_config)
    assert back.extra_config == {"spec_name": "mine", "block_size": 64}
    assert (back.groups, back.cache, back.parallel) == (TODAY.groups, TODAY.cache, TODAY.parallel)
    assert back.worker_kv_bytes_per_block == 4096


# -- hooks


class Manager(OffloadingManager):
    heard = 0

    def on_new_request(self, req_context): ...

    def lookup(self, key, req_context): ...

    def prepare_load(self, keys, req_context): ...

    def prepare_store(self, keys, req_context): ...

    @hookimpl
    def wtransfer_weights_committed(self):
        self.heard += 1


class Listens(Base):
    heard = 0

    def __init__(self, config):
        self.manager = Manager()

    def get_manager(self):
        return self.manager

    def get_worker(self, kv_caches):
        return self.manager

    @hookimpl
    def wtransfer_weights_committed(self):
        self.heard += 1


def commit():
    facts = {"version": "v", "fingerprint": "f", "round_id": "r", "worker": None}
    hooks.notify("wtransfer_weights_committed", **facts)


@pytest.mark.parametrize("arguments", [(), (None,)])
def test_a_spec_and_a_side_of_it_hear_until_that_side_is_shut_down(arguments):
    spec = create(Listens, TODAY)
    make = spec.get_worker if arguments else spec.get_manager
    side = make(*arguments)
    assert make(*arguments) is side
    commit()
    side.shutdown()
    commit()
    assert (spec.heard, side.heard) == (1, 1)


def test_side_with_slots_is_returned_and_ends_the_notifications_of_its_spec(caplog):
    class Slotted:
        __slots__ = ()

        def shutdown(self): ...

    class Observing(Listens):
        def __init__(self, config):
            self.manager = Slotted()

    spec = create(Observing, TODAY)
    assert spec.get_manager() is spec.manager
    commit()
    assert spec.heard == 0
    assert "has __slots__" in caplog.text


def test_a_side_that_cannot_be_shut_down_is_handed_on_as_it_is():
    class Bare(Listens):
        def __init__(self, config):
            self.manager = object()

    spec = create(Bare, TODAY)
    assert spec.get_manager() is spec.manager


def test_a_side_without_hooks_is_handed_on_as_it_is():
    class Quiet(Listens):
        wtransfer_weights_committed = None

        def __init__(self, config):
            self.manager = CPUOffloadingManager(1)

    spec = create(Quiet, TODAY)
    assert spec.get_manager() is spec.manager
    assert "shutdown" not in vars(spec.manager)


def test_a_spec_without_hooks_is_not_registered():
    before = set(map(id, hooks.board.get_plugins()))
    spec = create(Seed, SERVING, CACHE)
    assert spec.get_manager() is None
    assert set(map(id, hooks.board.get_plugins())) == before


def test_a_spec_that_takes_no_attributes_is_served_all_the_same():
    class Slotted(Today):
        def __setattr__(self, name, value):
            if name != "got":
                raise AttributeError(name)
            super().__setattr__(name, value)

    assert create(Slotted, TODAY).got == (TODAY,)


@pytest.mark.parametrize(
    ("in_config", "beside", "meant"),
    [(32, 16, 32), (None, 48, 48), (32, None, 32), (None, None, 16)],
)
def test_the_hosts_own_word_on_tokens_per_block_goes_first(in_config, beside, meant):
    """Ours beside it has a default, and connectors name blocks by the host's."""
    holders = [None if size is None else KVCacheConfig(8, size) for size in (in_config, beside)]
    config = ServingConfig(kv_transfer_config=KVTransferConfig("c", "e"), cache_config=holders[0])
    assert tokens_per_block(config, holders[1]) == meant
    assert to_offloading_config(config, holders[1]).groups[0].tokens_per_block == meant
