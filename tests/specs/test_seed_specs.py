"""The seed's contract of offloading specs: every name, signature and text of DESIGN section 2."""

from __future__ import annotations

import inspect
import logging
import sys
from types import SimpleNamespace

import pytest

from wtransfer import KVCacheConfig, KVTransferConfig, OffloadingSpecFactory, ServingConfig
from wtransfer.errors import KVTransferConfigError, PluginTypeError, WTransferError
from wtransfer.registry import resolve as registry_module
from wtransfer.registry.hooks import PluginManager as Board
from wtransfer.registry.resolve import Host
from wtransfer.specs.interface import OffloadingSpec

MODULE = """
from wtransfer.specs.interface import OffloadingSpec

class SeedSpec(OffloadingSpec):
    def __init__(self, vllm_config, kv_cache_config):
        super().__init__(vllm_config, kv_cache_config)
        self.got = (vllm_config, kv_cache_config)
    def get_manager(self): ...
    def get_handlers(self, kv_caches, attn_backends): ...

class OtherSpec(SeedSpec): ...

class NoSpec: ...

class Unfinished(OffloadingSpec):
    def get_manager(self): ...
"""


@pytest.fixture(autouse=True)
def fresh_host(monkeypatch):
    """What is installed, without what other tests registered."""
    monkeypatch.setattr(registry_module, "host", Host({}, board=Board()))


@pytest.fixture(autouse=True)
def seed_module(tmp_path, monkeypatch):
    """A module with specs that is not imported yet."""
    (tmp_path / "seed_specs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("seed_specs", None)


def config(**extra):
    return ServingConfig(kv_transfer_config=KVTransferConfig(kv_connector_extra_config=extra))


def register(name="mine", class_name="SeedSpec"):
    OffloadingSpecFactory.register_spec(name, "seed_specs", class_name)


def create(**extra):
    return OffloadingSpecFactory.create_spec(config(**extra), KVCacheConfig())


def test_the_factorys_signatures():
    parameters = inspect.signature(OffloadingSpecFactory.register_spec).parameters
    assert list(parameters) == ["name", "module_path", "class_name"]
    assert all(each.default is inspect.Parameter.empty for each in parameters.values())
    parameters = inspect.signature(OffloadingSpecFactory.create_spec).parameters
    assert list(parameters) == ["config", "kv_cache_config"]


def test_a_spec_is_registered_lazily_and_made_as_its_own_class():
    register()
    assert "seed_specs" not in sys.modules
    assert type(create(spec_name="mine")) is sys.modules["seed_specs"].SeedSpec


def test_the_spec_gets_both_configs_themselves():
    register()
    given = config(spec_name="mine", depth=3), KVCacheConfig()
    spec = OffloadingSpecFactory.create_spec(*given)
    assert spec.got[0] is given[0]
    assert spec.got[1] is given[1]
    assert spec.vllm_config is given[0]
    assert spec.kv_cache_config is given[1]
    assert spec.extra_config == {"spec_name": "mine", "depth": 3}
    assert (spec.gpu_block_size, spec.offloaded_block_size) == (16, 16)


def test_a_kv_cache_config_that_is_none_is_passed_on():
    register()
    spec = OffloadingSpecFactory.create_spec(config(spec_name="mine"), None)
    assert spec.got[1] is None


def test_a_serving_engines_own_objects_will_do():
    register()
    extra = {"spec_name": "mine", "block_size": 64}
    theirs = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config=extra),
        cache_config=SimpleNamespace(block_size=32),
    )
    spec = OffloadingSpecFactory.create_spec(theirs, None)
    assert (spec.gpu_block_size, spec.offloaded_block_size) == (32, 64)


@pytest.mark.parametrize("name", ["mine", "CPUOffloadingSpec"])
def test_a_name_that_is_taken(name):
    register()
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        register(name)
    # "Connector": so does the seed.
    assert str(caught.value) == f"Connector '{name}' is already registered."


def test_the_default_is_the_cpu_spec():
    registry = registry_module.registry("specs")
    assert OffloadingSpecFactory.get_spec_cls({}) is registry.get("CPUOffloadingSpec")


def test_an_unknown_name_lists_what_exists():
    register()
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        create(spec_name="x")
    available = registry_module.registry("specs").names()
    assert "mine" in available
    start = f"Unsupported spec type: x. Available specs: {available}"
    assert str(caught.value).startswith(start)


def test_a_module_path_serves_names_that_nobody_offers():
    spec = create(spec_name="SeedSpec", spec_module_path="seed_specs")
    assert type(spec) is sys.modules["seed_specs"].SeedSpec


def test_the_registry_beats_the_module_path():
    register("SeedSpec", "OtherSpec")
    spec = create(spec_name="SeedSpec", spec_module_path="seed_specs")
    assert type(spec) is sys.modules["seed_specs"].OtherSpec


@pytest.mark.parametrize("by_path", [True, False])
def test_a_class_with_another_base(by_path):
    if by_path:
        extra = {"spec_name": "NoSpec", "spec_module_path": "seed_specs"}
    else:
        register("NoSpec", "NoSpec")
        extra = {"spec_name": "NoSpec"}
    with pytest.raises(AssertionError) as caught:
        create(**extra)
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, WTransferError)
    assert "the class NoSpec" in str(caught.value)
    assert "a subclass of wtransfer.specs.interface:OffloadingSpec" in str(caught.value)


def test_a_class_that_defines_neither_worker_nor_handlers():
    register("unfinished", "Unfinished")
    with pytest.raises(PluginTypeError, match="abstract methods left: get_worker"):
        create(spec_name="unfinished")


@pytest.mark.parametrize("given", [ServingConfig(), SimpleNamespace()])
def test_a_config_that_says_nothing_of_kv_transfer(given):
    with pytest.raises(AssertionError, match="kv_transfer_config") as caught:
        OffloadingSpecFactory.create_spec(given, None)
    assert isinstance(caught.value, KVTransferConfigError)


def test_creating_is_logged(caplog):
    register()
    with caplog.at_level(logging.INFO):
        create(spec_name="mine")
    texts = [record.getMessage() for record in caplog.records]
    assert "Creating offloading spec with name: mine" in texts


def test_what_a_spec_must_write():
    assert OffloadingSpec.__abstractmethods__ == {"get_manager", "get_worker"}


def test_handlers_stand_for_a_worker():
    class Older(OffloadingSpec):
        def get_manager(self): ...

        def get_handlers(self, kv_caches, attn_backends): ...

    assert not inspect.isabstract(Older)
    with pytest.raises(NotImplementedError, match=r"Older is a spec in the seed's style"):
        Older(config(), None).get_worker(None)


def test_handlers_that_are_promised_only_are_still_missed():
    from abc import abstractmethod

    class Promises(OffloadingSpec):
        @abstractmethod
        def get_handlers(self, kv_caches, attn_backends): ...

    assert Promises.__abstractmethods__ == {"get_manager", "get_handlers"}


def test_a_worker_of_ones_own_is_left_alone():
    class Both(OffloadingSpec):
        def get_manager(self): ...

        def get_worker(self, kv_caches):
            return "mine"

        def get_handlers(self, kv_caches, attn_backends): ...

    assert Both(config(), None).get_worker(None) == "mine"
