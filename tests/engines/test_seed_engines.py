"""The seed's contract of weight engines: every name, signature and text of DESIGN section 2."""

from __future__ import annotations

import inspect
import logging
import sys
from dataclasses import dataclass, field, fields
from types import SimpleNamespace
from typing import Any

import pytest

import wtransfer
from wtransfer import (
    ParallelConfig,
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferConfig,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferInitInfo,
    WeightTransferInitRequest,
    WeightTransferTrainerFactory,
    WeightTransferUpdateInfo,
    WeightTransferUpdateRequest,
)
from wtransfer.errors import (
    PluginBrokenError,
    PluginNotInstalledError,
    PluginTypeError,
    RegistrationError,
)
from wtransfer.registry import hooks
from wtransfer.registry import resolve as registry_module
from wtransfer.registry.hooks import PluginManager as Board
from wtransfer.registry.hooks import hookimpl
from wtransfer.registry.resolve import Host


@dataclass
class InitInfo(WeightTransferInitInfo):
    port: int
    host: str = "localhost"


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    names: list[str] = field(default_factory=list)


class SeedEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, config, parallel_config):
        super().__init__(config, parallel_config)
        self.got = (config, parallel_config)

    def init_transfer_engine(self, init_info):
        self.port = init_info.port

    def receive_weights(self, update_info, load_weights):
        for name in update_info.names:
            load_weights([(name, object())])

    def shutdown(self):
        self.port = None


@pytest.fixture(autouse=True)
def fresh_host(monkeypatch):
    """What is installed, without what other tests registered."""
    monkeypatch.setattr(registry_module, "host", Host({}, board=Board()))


def create(backend: Any, parallel_config=None):
    return WeightTransferEngineFactory.create_engine(
        SimpleNamespace(backend=backend), parallel_config or ParallelConfig()
    )


def named(function) -> list[str]:
    return list(inspect.signature(function).parameters)


def test_the_factorys_signatures():
    register = inspect.signature(WeightTransferEngineFactory.register_engine)
    assert list(register.parameters) == ["name", "module_path_or_cls", "class_name"]
    assert register.parameters["class_name"].default is None
    assert named(WeightTransferEngineFactory.create_engine) == ["config", "parallel_config"]


def test_a_class_is_registered_directly():
    WeightTransferEngineFactory.register_engine("mine", SeedEngine)
    assert type(create("mine")) is SeedEngine


def test_a_module_path_is_registered_lazily(tmp_path, monkeypatch):
    (tmp_path / "seed_lazy.py").write_text(
        "class Engine:\n"
        "    def __init__(self, config, parallel_config): ...\n"
        "    def init_transfer_engine(self, init_info): ...\n"
        "    def receive_weights(self, update_info, load_weights): ...\n"
        "    def shutdown(self): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    WeightTransferEngineFactory.register_engine("lazy", "seed_lazy", "Engine")
    assert "seed_lazy" not in sys.modules
    assert type(create("lazy")) is sys.modules.pop("seed_lazy").Engine


@pytest.mark.parametrize("name", ["mine", "shm", "nccl"])
def test_a_name_that_is_taken(name):
    WeightTransferEngineFactory.register_engine("mine", SeedEngine)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        WeightTransferEngineFactory.register_engine(name, "module", "Class")
    assert str(caught.value) == f"Weight transfer engine '{name}' is already registered."


def test_a_path_without_a_class():
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        WeightTransferEngineFactory.register_engine("mine", "module")
    assert str(caught.value) == "class_name is required when registering with module path"


def test_the_engine_gets_both_configs():
    WeightTransferEngineFactory.register_engine("mine", SeedEngine)
    config, parallel_config = WeightTransferConfig(backend="mine"), ParallelConfig(rank=3)
    engine = WeightTransferEngineFactory.create_engine(config, parallel_config)
    assert engine.got == (config, parallel_config)
    assert engine.got[0] is config
    assert engine.got[1] is parallel_config
    assert engine.config is config
    assert engine.parallel_config is parallel_config


def test_an_unknown_backend():
    WeightTransferEngineFactory.register_engine("mine", SeedEngine)
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        create("x")
    available = registry_module.registry("engines").names()
    assert {"mine", "shm"} <= set(available)
    start = f"Invalid weight transfer backend: x. Available engines: {available}"
    assert str(caught.value).startswith(start)


def test_creating_is_logged(caplog):
    WeightTransferEngineFactory.register_engine("mine", SeedEngine)
    with caplog.at_level(logging.INFO):
        create("mine")
    assert "Creating weight transfer engine: SeedEngine" in [r.getMessage() for r in caplog.records]


def test_the_default_backend_is_nccl_and_says_what_to_install():
    assert WeightTransferConfig().backend == "nccl"
    if "nccl" in registry_module.registry("engines").names():
        pytest.skip("wtransfer-nccl is installed: its own tests create it")
    with pytest.raises(PluginNotInstalledError) as caught:
        WeightTransferEngineFactory.create_engine(WeightTransferConfig(), ParallelConfig())
    assert str(caught.value).startswith("Invalid weight transfer backend: nccl. Available engines:")
    assert "pip install wtransfer-nccl" in str(caught.value)
    assert isinstance(caught.value, ValueError)


def test_an_engine_that_raises_in_its_constructor_raises_the_same_here():
    class Raises(SeedEngine):
        def __init__(self, config, parallel_config):
            raise ZeroDivisionError

    WeightTransferEngineFactory.register_engine("mine", Raises)
    with pytest.raises(ZeroDivisionError):
        create("mine")


def test_an_engine_with_hooks_hears_until_its_shutdown():
    class Listens(SeedEngine):
        heard = 0

        @hookimpl
        def wtransfer_weights_committed(self):
            self.heard += 1

    WeightTransferEngineFactory.register_engine("mine", Listens)
    engine = create("mine")
    facts = {"version": "v", "fingerprint": "f", "round_id": "r", "worker": None}
    hooks.notify("wtransfer_weights_committed", **facts)
    engine.shutdown()
    hooks.notify("wtransfer_weights_committed", **facts)
    assert engine.heard == 1
    assert engine.port is None


def test_what_an_engine_must_write():
    assert inspect.isabstract(WeightTransferEngine)
    assert WeightTransferEngine.__abstractmethods__ == {
        "init_transfer_engine",
        "receive_weights",
        "shutdown",
    }
    assert len(WeightTransferEngine.__parameters__) == 2


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("__init__", ["self", "config", "parallel_config"]),
        ("parse_init_info", ["self", "init_dict"]),
        ("parse_update_info", ["self", "update_dict"]),
        ("init_transfer_engine", ["self", "init_info"]),
        ("receive_weights", ["self", "update_info", "load_weights"]),
        ("shutdown", ["self"]),
    ],
)
def test_the_engines_signatures(method, arguments):
    assert named(getattr(WeightTransferEngine, method)) == arguments


def test_infos_are_parsed_into_the_engines_own_classes():
    engine = SeedEngine(WeightTransferConfig(), ParallelConfig())
    assert engine.parse_init_info({"port": 7}) == InitInfo(port=7)
    parsed = engine.parse_update_info({"names": ["a"], "is_checkpoint_format": False})
    assert parsed == UpdateInfo(names=["a"], is_checkpoint_format=False)


@pytest.mark.parametrize(
    ("method", "values", "start"),
    [
        ("parse_init_info", {}, "Invalid init_info for SeedEngine: "),
        ("parse_init_info", {"port": 1, "colour": 2}, "Invalid init_info for SeedEngine: "),
        ("parse_update_info", {"colour": 2}, "Invalid update_info for SeedEngine: "),
    ],
)
def test_infos_that_do_not_fit(method, values, start):
    engine = SeedEngine(WeightTransferConfig(), ParallelConfig())
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the text is compared below
        getattr(engine, method)(values)
    assert str(caught.value).startswith(start)
    assert caught.value.__cause__ is not None


def test_is_checkpoint_format_is_true_and_by_keyword_only():
    (only,) = fields(WeightTransferUpdateInfo)
    assert (only.name, only.default, only.kw_only) == ("is_checkpoint_format", True, True)
    assert UpdateInfo(["a"]).names == ["a"]


def test_requests_hold_a_dictionary_of_their_own():
    assert WeightTransferInitRequest() == WeightTransferInitRequest(init_info={})
    assert WeightTransferUpdateRequest() == WeightTransferUpdateRequest(update_info={})
    assert WeightTransferInitRequest().init_info is not WeightTransferInitRequest().init_info


def test_weights_are_loaded_as_they_come():
    batches = []
    engine = SeedEngine(WeightTransferConfig(), ParallelConfig())
    engine.receive_weights(UpdateInfo(["a", "b"]), batches.append)
    assert [[name for name, _ in batch] for batch in batches] == [["a"], ["b"]]


@dataclass
class TrainerInfo(TrainerInitInfo):
    backend = "mine"


class Trainer(TrainerWeightTransferEngine[TrainerInfo]):
    init_info_cls = TrainerInfo

    def send_weights(self): ...


class OtherTrainer(Trainer): ...


class Client:
    def __init__(self):
        self.init_infos = []

    def init_weight_transfer_engine(self, init_info):
        self.init_infos.append(init_info)


def engine_with(trainer_cls) -> type:
    return type("Engine", (SeedEngine,), {"trainer_cls": trainer_cls})


def test_the_trainer_is_the_worker_engines_twin():
    WeightTransferEngineFactory.register_engine("mine", engine_with(Trainer))
    assert WeightTransferTrainerFactory.trainer_class("mine") is Trainer


def test_the_twin_may_be_a_path(tmp_path, monkeypatch):
    (tmp_path / "seed_twin.py").write_text(
        "class Twin:\n def trainer_init(self): ...\n def send_weights(self): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    WeightTransferEngineFactory.register_engine("mine", engine_with("seed_twin:Twin"))
    assert WeightTransferTrainerFactory.trainer_class("mine").__name__ == "Twin"
    del sys.modules["seed_twin"]


def test_a_registered_trainer_beats_the_twin():
    WeightTransferEngineFactory.register_engine("mine", engine_with(Trainer))
    WeightTransferTrainerFactory.register_engine("mine", OtherTrainer)
    assert WeightTransferTrainerFactory.trainer_class("mine") is OtherTrainer
    with pytest.raises(ValueError, match="'mine' is already registered"):
        WeightTransferTrainerFactory.register_engine("mine", Trainer)


@pytest.mark.parametrize(
    ("twin", "cls", "text"),
    [
        (None, PluginTypeError, "has no trainer side: set trainer_cls in Engine"),
        (SeedEngine, PluginTypeError, "without trainer_init, send_weights"),
        (3, PluginTypeError, "is an object of type int"),
        ("no_such_module:Twin", PluginBrokenError, "No module named 'no_such_module'"),
        ("Twin", PluginBrokenError, "its place 'Twin' is not of the form 'module:Class'"),
    ],
)
def test_a_twin_that_cannot_be_used(twin, cls, text):
    WeightTransferEngineFactory.register_engine("mine", engine_with(twin))
    with pytest.raises(cls, match="weight transfer") as caught:
        WeightTransferTrainerFactory.trainer_class("mine")
    assert text in str(caught.value)


def test_trainer_init_reads_the_backend_of_the_infos_class(caplog):
    WeightTransferEngineFactory.register_engine("mine", engine_with(Trainer))
    client, info, source = Client(), TrainerInfo(), object()
    with caplog.at_level(logging.INFO):
        trainer = WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)
    assert type(trainer) is Trainer
    assert (trainer.init_info, trainer.client, trainer.source) == (info, client, source)
    assert client.init_infos == [{}]
    assert "Creating weight transfer trainer engine: Trainer" in caplog.text


def test_trainer_init_without_a_backend():
    with pytest.raises(RegistrationError, match="TrainerInitInfo names no backend"):
        WeightTransferTrainerFactory.trainer_init(TrainerInitInfo(), client=Client())


def test_every_public_name_is_there():
    for name in wtransfer.__all__:
        assert getattr(wtransfer, name) is not None
    assert set(wtransfer.__all__) <= set(dir(wtransfer))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = wtransfer.nonsense
