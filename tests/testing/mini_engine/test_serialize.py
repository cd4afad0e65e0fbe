"""Data of every kind is serialized, and nothing that runs."""

from __future__ import annotations

import collections
import functools
import subprocess
import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
import torch

from wtransfer.connectors.fenced import WeightHandshake, WeightReport
from wtransfer.connectors.interface import KVConnectorMetadata
from wtransfer.specs.interface import GPULoadStoreSpec
from wtransfer.testing.mini_engine.serialize import deserialize, serialize
from wtransfer.weight_version import WeightVersion


def over_the_wire(value):
    return deserialize(msgspec.msgpack.decode(msgspec.msgpack.encode(serialize(value))))


class Point(NamedTuple):
    x: int
    y: object = None


@dataclass(frozen=True)
class Frozen:
    text: str
    points: list[Point] = field(default_factory=list)


@dataclass(slots=True)
class Slotted:
    number: float
    inner: object = None


@dataclass(frozen=True, slots=True)
class FrozenSlotted(KVConnectorMetadata):
    names: frozenset


class Bare(KVConnectorMetadata):
    """In the seed's style: attributes, and no dataclass."""

    def __init__(self):
        self.requests = []

    class Inner(KVConnectorMetadata):
        pass


@dataclass
class Grown:
    number: int = 1


class Loose(KVConnectorMetadata):
    """Has slots, and is no dataclass."""

    __slots__ = ("number",)


class More(Grown):
    """Has an attribute that is no field."""

    def __init__(self):
        super().__init__(2)
        self.more = "said"


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(1 << 63),
        (1 << 64) - 1,
        0.1,
        "text \U0001f9ca",
        b"\0\xff",
        [],
        (),
        set(),
        frozenset(),
        {},
        [1, (2, [3, {4}]), {"five": frozenset({b"6", (7, 8)})}],
        {("a", 1): [Point(1)], Point(2, 3): None},
        Point(1, Point(2, [None])),
        WeightVersion("A", 1 << 47),
        Frozen("a", [Point(1, Frozen("b"))]),
        Slotted(0.5, Slotted(1.5)),
        FrozenSlotted(frozenset({"r"})),
        WeightReport({0: ("A", 1), 1: None}),
        WeightHandshake(("A", 1)),
    ],
)
def test_data_round_trips(value):
    arrived = over_the_wire(value)
    assert arrived == value
    assert type(arrived) is type(value)


def test_attributes_of_plain_objects_round_trip():
    bare = Bare()
    bare.requests.append(GPULoadStoreSpec([5, 6], [1, 1], [0, 3]))
    bare.inner = Bare.Inner()
    arrived = over_the_wire(bare)
    assert (type(arrived), type(arrived.inner)) == (Bare, Bare.Inner)
    (spec,) = arrived.requests
    assert (type(spec), vars(spec)) == (GPULoadStoreSpec, vars(bare.requests[0]))
    assert vars(over_the_wire(More())) == {"number": 2, "more": "said"}
    loose = Loose()
    loose.number = 7
    assert over_the_wire(loose).number == 7


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "float32", ">i4", "float64"])
def test_arrays_of_numbers_round_trip(dtype):
    array = np.arange(6).astype(dtype).reshape(2, 3)
    arrived = over_the_wire(array)
    assert (arrived.dtype, arrived.shape) == (array.dtype, (2, 3))
    np.testing.assert_array_equal(arrived, array)
    arrived[0, 0] = 1  # its own memory


class Door:
    def __call__(self):
        return "ran"


@pytest.mark.parametrize(
    "value",
    [
        print,
        lambda: None,
        functools.partial(print, 1),
        Door(),
        Door,
        sys,
        subprocess,
        object(),
        1j,
        range(3),
        collections.Counter("a"),
        np.array([print]),
        np.array(["text"]),
        np.int64(1),
        type("Text", (str,), {})("text"),
        torch.empty(1, device="meta"),
        torch.ones(2, 2).to_sparse(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_serialize_refuses_what_is_not_data(value):
    for holder in (value, [value], {"key": value}, Frozen("a", [value]), Point(value)):
        with pytest.raises(TypeError, match="does not travel between scheduler and worker"):
            serialize(holder)


@pytest.mark.parametrize(
    ("plain", "error"),
    [
        (["object", "subprocess:Popen", {"args": ["list", "true"]}], TypeError),
        (["object", "functools:partial", {}], TypeError),
        (["object", "builtins:object", {}], TypeError),
        (["record", "subprocess:Popen", 1], TypeError),
        (["record", f"{__name__}:Point", 1], TypeError),
        (["record", f"{__name__}:Frozen", "a", []], TypeError),
        (["array", "|O", [1], b"\0" * 8], TypeError),
        (["array", "i8", [1], b"\0" * 8], TypeError),
        (["call", f"{__name__}:Point", 1], TypeError),
        ([], TypeError),
        ([["list"]], TypeError),
        (["object", "os:nothing", {}], LookupError),
        (["object", "os.path:join", {}], LookupError),
        (["object", "os:path.join", {}], LookupError),
        (["object", f"{__name__}:Bare.nothing", {}], LookupError),
        (["object", "no_such_module:Class", {}], LookupError),
        (["object", "msgspec:Struct.__class__", {}], LookupError),
    ],
)
def test_deserialize_refuses_what_is_not_data(plain, error):
    with pytest.raises(error):
        deserialize(plain)
    with pytest.raises(error):
        deserialize(["list", 1, ["dict", ["key", plain]]])


def test_deserialize_imports_nothing(monkeypatch, tmp_path):
    (tmp_path / "not_loaded.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(LookupError, match="not_loaded:Class is no class of this process"):
        deserialize(["object", "not_loaded:Class", {}])
    # A module that imports what it is asked for is not asked.
    lazy = ModuleType("lazy")
    lazy.__getattr__ = lambda name: pytest.fail(f"{name} was asked for")
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    with pytest.raises(LookupError, match="lazy:Class is no class of this process"):
        deserialize(["object", "lazy:Class", {}])


RAN = []


@dataclass(eq=False)
class Trap:
    number: int = 0

    def __init__(self):
        RAN.append("__init__")

    def __new__(cls):
        RAN.append("__new__")
        return super().__new__(cls)

    @property
    def door(self):
        return None

    @door.setter
    def door(self, value):
        RAN.append("door")


def test_deserialize_runs_no_code_of_a_class():
    trap = Trap()
    trap.number = 3
    RAN.clear()
    assert over_the_wire(trap).number == 3
    name = f"{__name__}:Trap"
    made = deserialize(["object", name, {"door": 1, "__class__": 2, "number": 4}])
    assert (type(made), made.number, RAN) == (Trap, 4, [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_tensors_round_trip(dtype):
    tensor = torch.arange(12).reshape(3, 4).to(dtype).T
    arrived = over_the_wire({"slots": tensor, "none": torch.empty(0, 3, dtype=dtype)})
    assert torch.equal(arrived["slots"], tensor)
    assert (arrived["slots"].dtype, arrived["none"].shape) == (dtype, (0, 3))
