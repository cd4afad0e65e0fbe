"""Options are decoded by a class that declares them, also by several threads at once."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import InitVar, dataclass, field, make_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import pytest

from wtransfer.config import convert_options, decode_options, option_values
from wtransfer.errors import OffloadingOptionError

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
    values = option_values(texts, cls, ValueError, "options", strict=False)
    assert cls(**values) == cls(path="5", number=5, share=0.5, fast=True)


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


@dataclass(kw_only=True)
class Places:
    path: Path = Path()
    perhaps: Path | None = None
    text: Annotated[str, msgspec.Meta(max_length=4)] = ""
    maybe: str | None = None


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ({"path": "/a"}, {"path": "/a"}),
        ({"perhaps": "/a"}, {"perhaps": "/a"}),
        ({"text": Path("/a")}, {"text": "/a"}),
        ({"maybe": Path("/a")}, {"maybe": "/a"}),
    ],
)
def test_path_fits_a_text_and_a_text_is_left_to_a_class_that_takes_paths(given, made):
    assert decode_options(given, Places, ValueError, "options") == Places(**made)


class UnusualStruct(msgspec.Struct):
    number: int
    sign: Mystery = None


@pytest.mark.parametrize("cls", [Unusual, UnusualStruct])
def test_hint_for_type_checkers_leaves_the_other_fields_checked(cls):
    given = {"place": "/a", "number": "x"} if cls is Unusual else {"number": "x"}
    with pytest.raises(ValueError, match=r"Expected `int`, got `str` - at `\$.number`; .*sign"):
        decode_options(given, cls, ValueError, "options")


def test_struct_with_a_hint_for_type_checkers_is_made():
    made = decode_options({"number": 1, "sign": 2}, UnusualStruct, ValueError, "options")
    assert (made.number, made.sign) == (1, 2)


@dataclass
class Seeded:
    seed: InitVar[int]
    doubled: int = field(init=False)

    def __post_init__(self, seed):
        self.doubled = 2 * seed


def test_init_only_variable_is_an_option():
    assert decode_options({"seed": 2}, Seeded, ValueError, "options").doubled == 4
    with pytest.raises(ValueError, match="missing required field `seed`; the options are seed"):
        decode_options({}, Seeded, ValueError, "options")


def test_type_of_an_init_only_variable_is_checked():
    cls = make_dataclass("Made", [("seed", InitVar[int])])
    with pytest.raises(
        ValueError, match=r"Expected `int`, got `str`.*the options are seed \(int\)"
    ):
        decode_options({"seed": "x"}, cls, ValueError, "options")


class Neither:
    path: str


def test_class_of_neither_kind_is_refused_with_what_to_make_of_it():
    with pytest.raises(OffloadingOptionError, match=r"Neither.* is neither a dataclass nor a msg"):
        decode_options({}, Neither, OffloadingOptionError, "options")


class Renamed(msgspec.Struct, rename="camel"):
    my_number: int


def test_options_of_a_struct_are_named_as_it_encodes_them():
    assert decode_options({"myNumber": 1}, Renamed, ValueError, "options").my_number == 1
    with pytest.raises(ValueError, match="unknown field `my_number`; the options are myNumber"):
        decode_options({"my_number": 1}, Renamed, ValueError, "options")


# A nested class reads options itself; in a process of its own, for a lock would be held for ever.
NESTED = """
import msgspec
from wtransfer.config import decode_options


class Flat(msgspec.Struct):
    number: int


class Inner(msgspec.Struct):
    number: int

    def __post_init__(self):
        decode_options({"number": 1}, Flat, ValueError, "inner")


class Outer(msgspec.Struct):
    inner: Inner


print(decode_options({"inner": {"number": 2}}, Outer, ValueError, "outer").inner.number)
"""


def test_nested_class_may_read_options_itself(tmp_path):
    command = [sys.executable, "-c", NESTED]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=20
    )
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


def test_options_that_were_converted_stay_the_object():
    made = Struct(path="/a")
    assert convert_options(made, Struct) is made
