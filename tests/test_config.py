"""Options are decoded by the class that a backend declares, also by several threads at once."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import pytest

from wtransfer import KVConnectorBase_V1, OffloadingConfig, OffloadingSpec
from wtransfer.config import KVCacheConfig, KVTransferConfig, ServingConfig, decode_options
from wtransfer.connectors.interface import ConnectorScheduler, ConnectorWorker, KVConnectorRole
from wtransfer.errors import ConnectorOptionError, OffloadingOptionError
from wtransfer.specs.tier import open_tier
from wtransfer.testing.fakes import MemoryTier

if TYPE_CHECKING:
    from unknown_to_python import Mystery

# Threads that meet a struct for the first time together: with msgspec alone the process ends.
TOGETHER = """
from __future__ import annotations

import sys
import threading
from typing import Annotated

import msgspec
from wtransfer.config import decode_options

sys.setswitchinterval(1e-6)


def struct():
    class Options(msgspec.Struct):
        one: Annotated[int, msgspec.Meta(gt=0)] = 1
        two: Annotated[int, msgspec.Meta(gt=0)] = 2
        three: Annotated[int, msgspec.Meta(gt=0)] = 3
        four: Annotated[int, msgspec.Meta(gt=0)] = 4

    return Options


def read(cls, barrier):
    barrier.wait()
    found.append(decode_options({"one": 5, "four": 6}, cls, ValueError, "options"))


found = []
for _ in range(200):
    cls, barrier = struct(), threading.Barrier(3)
    threads = [threading.Thread(target=read, args=(cls, barrier)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(len(found), {(each.one, each.two, each.four) for each in found})
"""


def test_threads_read_options_of_one_kind_for_the_first_time_at_once(tmp_path):
    command = [sys.executable, "-c", TOGETHER]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "600 {(5, 2, 6)}\n"), done.stderr


# -- the decoder


@dataclass(kw_only=True)
class Plain:
    path: str
    number: int = 3
    share: float | None = None
    fast: bool = False
    names: list[str] = field(default_factory=list)
    known_here: int = field(init=False, default=0)

    def __post_init__(self):
        if self.number < 0:
            raise ValueError(f"number is {self.number}")


class Struct(msgspec.Struct, kw_only=True):
    path: str
    number: Annotated[int, msgspec.Meta(ge=0)] = 3
    share: float | None = None
    fast: bool = False
    names: list[str] = msgspec.field(default_factory=list)


EITHER = pytest.mark.parametrize("cls", [Plain, Struct])
THERE_ARE = "path (str), number (int), share (float | None), fast (bool), names (list[str])"


@EITHER
def test_options_become_an_object_of_the_declared_class(cls):
    given = {"path": "/a", "number": 5, "share": 1, "names": ["x"]}
    made = decode_options(given, cls, ValueError, "options")
    assert made == cls(path="/a", number=5, share=1.0, names=["x"])
    assert type(made.share) is float


@EITHER
@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "missing required field `path`"),
        ({"path": "/a", "nubmer": 3}, "unknown field `nubmer`"),
        ({"path": 1}, "Expected `str`, got `int` - at `$.path`"),
        ({"path": "/a", "number": "5"}, "Expected `int`, got `str` - at `$.number`"),
        ({"path": "/a", "names": [1]}, "Expected `str`, got `int` - at `$.names[0]`"),
        ({"path": "/a", "number": -1}, "number"),
    ],
)
def test_option_at_fault_is_refused_by_name_with_those_there_are(cls, given, text):
    with pytest.raises(OffloadingOptionError) as caught:
        decode_options(given, cls, OffloadingOptionError, "of a test")
    assert text in str(caught.value)
    assert str(caught.value).startswith("of a test: ")
    assert str(caught.value).endswith(f"; the options are {THERE_ARE}")


def test_field_that_the_class_sets_itself_is_no_option():
    with pytest.raises(ValueError, match="unknown field `known_here`"):
        decode_options({"path": "/a", "known_here": 1}, Plain, ValueError, "options")


@EITHER
def test_texts_of_a_command_line_are_read_as_what_the_fields_are(cls):
    texts = {"path": "5", "number": "5", "share": "0.5", "fast": "true"}
    made = decode_options(texts, cls, ValueError, "options", strict=False)
    assert made == cls(path="5", number=5, share=0.5, fast=True)


@dataclass(kw_only=True)
class Unusual:
    place: str | Path
    sign: Mystery = None
    number: int = 0


def test_values_whose_types_only_the_class_knows_are_left_to_it():
    sign = object()
    given = {"place": Path("/a"), "sign": sign}
    assert decode_options(given, Unusual, ValueError, "options").sign is sign
    with pytest.raises(ValueError, match="unknown field `plaec`; the options are place"):
        decode_options({"plaec": "/a"}, Unusual, ValueError, "options")


# -- backends of each kind


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
