"""The seed's contract of connectors: every name, signature and text of DESIGN section 2."""

from __future__ import annotations

import inspect
import logging
import sys
from dataclasses import dataclass
from types import ModuleType

import pytest

import wtransfer
from wtransfer import KVConnectorFactory, KVTransferConfig, ServingConfig
from wtransfer.connectors.interface import (
    KVConnectorBase,
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from wtransfer.errors import (
    AlreadyRegisteredError,
    ConnectorGenerationError,
    PluginBrokenError,
    PluginTypeError,
    RegistrationError,
    UnknownBackendError,
)
from wtransfer.registry import hooks
from wtransfer.registry import resolve as registry_module
from wtransfer.registry.hooks import PluginManager as Board
from wtransfer.registry.hooks import hookimpl
from wtransfer.registry.resolve import Host

SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


@dataclass
class Metadata(KVConnectorMetadata):
    number: int


class Seven(KVConnectorBase_V1):
    """In the style of the seed: both sides in one class."""

    def __init__(self, config, role, kv_cache_config=None):
        super().__init__(config, role, kv_cache_config)
        self.got = (config, role, kv_cache_config)

    def start_load_kv(self, forward_context, **kwargs):
        self.loading = self._get_connector_metadata()

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 3, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return Metadata(7)


class OfTwoArguments(Seven):
    def __init__(self, vllm_config, role):
        super().__init__(vllm_config, role)
        self.got = (vllm_config, role)


class BaseByKeywords(Seven):
    """As connectors in the field call their base."""

    def __init__(self, vllm_config, role, kv_cache_config=None):
        KVConnectorBase_V1.__init__(
            self, vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config
        )
        self.got = (vllm_config, role, kv_cache_config)


class OfAnyKeyword(Seven):
    def __init__(self, config, role, **kwargs):
        super().__init__(config, role, **kwargs)


class OfKeywords(Seven):
    def __init__(self, config, role, *, kv_cache_config):
        super().__init__(config, role, kv_cache_config)


class OfAnything(Seven):
    def __init__(self, *args):
        super().__init__(*args)
        self.got = args


class First(KVConnectorBase):
    def __init__(self, rank, local_rank, config):
        self.got = (rank, local_rank, config)
        self.sent = []

    def send_kv_caches_and_hidden_states(
        self, model_executable, model_input, kv_caches, hidden_or_intermediate_states
    ):
        self.sent.append((kv_caches, hidden_or_intermediate_states))

    def recv_kv_caches_and_hidden_states(self, model_executable, model_input, kv_caches):
        return self.sent[-1][1], True, model_input

    def close(self):
        self.sent.clear()


class NoConnector:
    pass


class Unfinished(KVConnectorBase_V1):
    def wait_for_save(self):
        pass


@pytest.fixture(autouse=True)
def fresh_host(monkeypatch):
    """What is installed, without what other tests registered."""
    monkeypatch.setattr(registry_module, "host", Host({}, board=Board()))


@pytest.fixture
def module(monkeypatch):
    """These classes under a path that a configuration can name."""
    made = ModuleType("tests_connectors")
    for each in (
        Seven,
        OfTwoArguments,
        BaseByKeywords,
        OfAnyKeyword,
        OfKeywords,
        OfAnything,
        First,
        NoConnector,
        Unfinished,
    ):
        setattr(made, each.__name__, each)
    monkeypatch.setitem(sys.modules, made.__name__, made)
    return made.__name__


@pytest.fixture
def first_generation(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V1", "0")


def config(name, module_path=None, **more):
    transfer = KVTransferConfig(
        kv_connector=name, engine_id="engine-1", kv_connector_module_path=module_path, **more
    )
    return ServingConfig(kv_transfer_config=transfer)


def create(name, module_path=None, role=WORKER):
    return KVConnectorFactory.create_connector_v1(config(name, module_path), role)


def create_first(name):
    return KVConnectorFactory.create_connector_v0(0, 0, config(name))


# -- names, signatures, texts


def test_the_public_names_are_those_of_the_seed():
    assert wtransfer.KVConnectorFactory is KVConnectorFactory
    register = inspect.signature(KVConnectorFactory.register_connector)
    assert list(register.parameters) == ["name", "module_path", "class_name"]
    v0 = inspect.signature(KVConnectorFactory.create_connector_v0)
    assert list(v0.parameters) == ["rank", "local_rank", "config"]
    v1 = inspect.signature(KVConnectorFactory.create_connector_v1)
    assert list(v1.parameters)[:2] == ["config", "role"]
    assert v1.parameters["kv_cache_config"].default is None


def test_a_name_is_registered_once(module):
    KVConnectorFactory.register_connector("mine", module, "Seven")
    with pytest.raises(ValueError, match=r"^Connector 'mine' is already registered\.$") as caught:
        KVConnectorFactory.register_connector("mine", module, "Seven")
    assert isinstance(caught.value, AlreadyRegisteredError)


def test_registering_imports_nothing():
    KVConnectorFactory.register_connector("absent", "no_such_module", "Some")
    with pytest.raises(PluginBrokenError, match="no_such_module"):
        create("absent")


@pytest.mark.parametrize("make", [create_first, create])
def test_an_unknown_name_is_refused_with_what_exists(make, module, monkeypatch):
    KVConnectorFactory.register_connector("mine", module, "Seven")
    monkeypatch.setenv("VLLM_USE_V1", "0" if make is create_first else "1")
    with pytest.raises(ValueError, match=r"^Unsupported connector type: x\. ") as caught:
        make("x")
    assert isinstance(caught.value, UnknownBackendError)
    assert "mine" in caught.value.available
    assert "Available connectors: [" in str(caught.value)


# -- the switch between the generations


def test_v0_is_refused_where_v1_runs(module):
    text = r"^Attempting to initialize a V0 Connector, but found envs\.VLLM_USE_V1=True$"
    with pytest.raises(ValueError, match=text) as caught:
        KVConnectorFactory.create_connector_v0(0, 0, config("mine"))
    assert isinstance(caught.value, ConnectorGenerationError)


def test_v1_is_refused_where_v0_runs(first_generation):
    text = r"^Attempting to initialize a V1 Connector, but found envs\.VLLM_USE_V1=False$"
    with pytest.raises(ValueError, match=text):
        create("mine")


@pytest.mark.parametrize(
    ("text", "runs_v1"), [("1", True), ("2", True), ("0", False), ("00", False)]
)
def test_the_switch_is_read_in_every_call(module, monkeypatch, text, runs_v1):
    KVConnectorFactory.register_connector("mine", module, "Seven")
    monkeypatch.setenv("VLLM_USE_V1", text)
    if runs_v1:
        assert isinstance(create("mine"), Seven)
    else:
        with pytest.raises(ConnectorGenerationError):
            create("mine")


def test_a_switch_that_is_no_number_is_named(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V1", "yes")
    with pytest.raises(ConnectorGenerationError, match="VLLM_USE_V1 is 'yes'"):
        create("mine")


# -- the first generation


def test_v0_is_made_by_name_with_both_ranks(first_generation, module):
    KVConnectorFactory.register_connector("first", module, "First")
    serving = config("first")
    made = KVConnectorFactory.create_connector_v0(3, 1, serving)
    assert made.got == (3, 1, serving)
    made.send_kv_caches_and_hidden_states(None, "input", ["kv"], "hidden")
    assert made.recv_kv_caches_and_hidden_states(None, "input", []) == ("hidden", True, "input")
    made.close()
    assert made.sent == []


def test_v0_knows_no_module_path(first_generation, module):
    with pytest.raises(UnknownBackendError, match="Unsupported connector type: First"):
        KVConnectorFactory.create_connector_v0(0, 0, config("First", module))


def test_v0_takes_no_class_of_v1(first_generation, module):
    KVConnectorFactory.register_connector("seven", module, "Seven")
    with pytest.raises(TypeError, match="Seven is no subclass of KVConnectorBase") as caught:
        KVConnectorFactory.create_connector_v0(0, 0, config("seven"))
    assert isinstance(caught.value, (PluginTypeError, AssertionError))


def test_v0_must_be_whole():
    with pytest.raises(TypeError, match="abstract"):
        KVConnectorBase(0, 0, config("first"))


# -- today's generation


def test_v1_is_made_by_name(module, caplog):
    KVConnectorFactory.register_connector("seven", module, "Seven")
    serving = config("seven")
    with caplog.at_level(logging.INFO, "wtransfer"):
        made = KVConnectorFactory.create_connector_v1(serving, SCHEDULER)
    assert made.got == (serving, SCHEDULER, None)
    assert made.role is SCHEDULER
    assert "Creating v1 connector with name: seven and engine_id: engine-1" in caplog.messages


def test_both_sides_are_objects_of_their_own(module):
    KVConnectorFactory.register_connector("seven", module, "Seven")
    assert create("seven", role=SCHEDULER) is not create("seven", role=WORKER)


def test_v1_is_made_by_module_path_alone(module):
    assert type(create("Seven", module)) is Seven


def test_a_name_goes_before_a_module_path(module):
    KVConnectorFactory.register_connector("Seven", module, "OfTwoArguments")
    assert type(create("Seven", module)) is OfTwoArguments


def test_a_module_without_the_class_is_named(module):
    with pytest.raises(PluginBrokenError, match=f"{module}:Absent") as caught:
        create("Absent", module)
    assert isinstance(caught.value.__cause__, AttributeError)


@pytest.mark.parametrize("name", ["OfTwoArguments", "OfAnything", "Seven", "BaseByKeywords"])
def test_the_signature_decides_on_the_third_argument(module, name):
    serving, cache = config(name, module), object()
    made = KVConnectorFactory.create_connector_v1(serving, WORKER, cache)
    expected = (serving, WORKER) if name == "OfTwoArguments" else (serving, WORKER, cache)
    assert made.got == expected


def test_an_error_in_a_constructor_is_not_taken_for_a_signature(module, monkeypatch):
    def fails(self, config, role, kv_cache_config=None):
        raise TypeError("my own")

    monkeypatch.setattr(Seven, "__init__", fails)
    with pytest.raises(TypeError, match=r"^my own$"):
        create("Seven", module)


@pytest.mark.parametrize("name", ["OfKeywords", "OfAnyKeyword"])
def test_a_third_argument_by_keyword_only_is_given_by_keyword(module, name):
    cache = object()
    made = KVConnectorFactory.create_connector_v1(config(name, module), WORKER, cache)
    assert made.kv_cache_config is cache


def test_todays_name_makes_the_same(module):
    made = KVConnectorFactory.create_connector(config("Seven", module), WORKER, None)
    assert type(made) is Seven


def test_the_class_alone_may_be_asked_for(module):
    found = KVConnectorFactory.get_connector_class(config("Seven", module).kv_transfer_config)
    assert found is Seven


@pytest.mark.parametrize("name", ["First", "NoConnector"])
def test_a_class_of_another_base_is_refused_by_both_names(module, name):
    with pytest.raises(AssertionError, match=name) as caught:
        create(name, module)
    assert isinstance(caught.value, PluginTypeError)
    assert isinstance(caught.value, TypeError)
    assert "onnector" in str(caught.value).replace(name, "")


def test_an_unfinished_class_is_refused_with_what_is_missing(module):
    with pytest.raises(PluginTypeError, match="get_num_new_matched_tokens") as caught:
        create("Unfinished", module)
    assert "wait_for_save" not in str(caught.value)


def test_without_a_transfer_config_there_is_no_connector():
    with pytest.raises(ValueError, match="kv_transfer_config must be set") as caught:
        KVConnectorFactory.create_connector_v1(ServingConfig(), WORKER)
    assert isinstance(caught.value, RegistrationError)


def test_without_a_name_there_is_no_connector(module):
    with pytest.raises(ValueError, match="kv_connector must name a connector"):
        create(None, module)


def test_hooks_of_a_connector_are_called_until_its_shutdown(module, monkeypatch):
    heard = []

    def committed(self, version):
        heard.append(version)

    board = Board()
    monkeypatch.setattr(hooks, "board", board)
    monkeypatch.setattr(Seven, "wtransfer_weights_committed", hookimpl(committed), raising=False)
    made = create("Seven", module)
    facts = {"fingerprint": "f", "round_id": "r", "worker": "w"}
    board.notify("wtransfer_weights_committed", version="v1", **facts)
    made.shutdown()
    board.notify("wtransfer_weights_committed", version="v2", **facts)
    assert heard == ["v1"]
