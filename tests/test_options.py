"""A backend of any kind declares its options by a class, and gets an object of it."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
import pytest

from wtransfer import KVConnectorBase_V1, OffloadingConfig, OffloadingSpec
from wtransfer.config import KVCacheConfig, KVTransferConfig, ServingConfig
from wtransfer.connectors.interface import ConnectorScheduler, ConnectorWorker, KVConnectorRole
from wtransfer.errors import ConnectorOptionError, OffloadingOptionError
from wtransfer.specs.tier import open_tier
from wtransfer.testing.fakes import MemoryTier


@dataclass(kw_only=True)
class Plain:
    path: str
    number: int = 3


class Struct(msgspec.Struct, kw_only=True):
    path: str
    number: int = 3


def make_spec(**members):
    base = {name: lambda *_: None for name in ("get_manager", "get_worker")}
    cls = type("Mine", (OffloadingSpec,), {**base, **members})
    host = {"spec_name": "mine", "block_size": 16}
    return lambda options: cls(OffloadingConfig(extra_config={**host, **options})).options


def make_tier(**members):
    cls = type("Mine", (MemoryTier,), {"options_cls": (), "__init__": keep_options, **members})
    return lambda options: open_tier(cls, options).options


def keep_options(self, options):
    self.options = options


def side_of(base):
    def init(self, config, kv_cache_config=None):
        self.seen = self.options
        base.__init__(self, config, kv_cache_config)

    names = {name: lambda *_: None for name in base.__abstractmethods__}
    return type("Side", (base,), {**names, "__init__": init})


def make_connector(role, **members):
    sides = {"scheduler_cls": side_of(ConnectorScheduler), "worker_cls": side_of(ConnectorWorker)}
    cls = type("Mine", (KVConnectorBase_V1,), {**sides, "names_weights": True, **members})

    def options_of(options):
        transfer = KVTransferConfig("Mine", "e", None, None, options)
        config = ServingConfig(kv_transfer_config=transfer, cache_config=KVCacheConfig(8, 4))
        made = cls(config, role)
        assert made.side.seen is made.options
        return made.options

    return options_of


def make_scheduler(**members):
    return make_connector(KVConnectorRole.SCHEDULER, **members)


def make_worker(**members):
    return make_connector(KVConnectorRole.WORKER, **members)


KINDS = pytest.mark.parametrize("make", [make_spec, make_tier, make_scheduler, make_worker])


@KINDS
@pytest.mark.parametrize("options_cls", [Plain, Struct, f"{__name__}:Plain"])
def test_backend_that_declares_its_options_gets_them_decoded(make, options_cls, caplog):
    options_of = make(options_cls=options_cls)
    made = options_of({"path": "/a", "number": 4})
    assert (type(made).__name__ in {"Plain", "Struct"}, made.path, made.number) == (True, "/a", 4)
    with pytest.raises(
        (ConnectorOptionError, OffloadingOptionError),
        match="kv_connector_extra_config of Mine: unknown field `paht`; the options are path",
    ):
        options_of({"paht": "/a"})
    assert caplog.records == []


@KINDS
def test_backend_that_declares_nothing_gets_the_mapping_and_is_warned_of_once(make, caplog):
    options_of = make()
    with caplog.at_level(logging.WARNING):
        assert dict(options_of({})) == {}
        assert caplog.records == []
        for _ in range(2):
            assert dict(options_of({"path": "/a"})) == {"path": "/a"}
    (said,) = caplog.messages
    assert "Mine has no options_cls: its options (path) are not checked. Set options_cls" in said


@KINDS
def test_options_of_several_classes_come_as_the_mapping(make, caplog):
    assert dict(make(options_cls=(Plain, Struct))({"other": 1})) == {"other": 1}
    assert caplog.records == []


@pytest.mark.parametrize("options_cls", [(), Plain])
def test_deadline_of_the_offloading_connector_is_no_unknown_option_of_a_spec(options_cls):
    options = make_spec(options_cls=options_cls)({"path": "/a", "deadline_s": 5.0})
    assert options == (Plain(path="/a") if options_cls else {"path": "/a", "deadline_s": 5.0})


@dataclass
class Timed:
    deadline_s: int = 10


def test_deadline_is_an_option_of_a_spec_that_declares_it():
    assert make_spec(options_cls=Timed)({"deadline_s": 5}) == Timed(5)


OWN = {"options": property(lambda self: "own")}


def test_spec_keeps_options_of_its_own():
    assert make_spec(**OWN)({"path": "/a"}) == "own"


@pytest.mark.parametrize("role", KVConnectorRole)
def test_connector_and_its_sides_keep_options_of_their_own(role):
    sides = {
        name: type("Own", (side_of(base),), OWN)
        for name, base in [("scheduler_cls", ConnectorScheduler), ("worker_cls", ConnectorWorker)]
    }
    assert make_connector(role, **sides, **OWN)({"path": "/a"}) == "own"


def test_tier_without_a_class_of_options_says_which_it_needs():
    def init(self, options):
        self.options = options["path"]

    with pytest.raises(OffloadingOptionError, match="Mine needs the option 'path'"):
        make_tier(__init__=init)({})
