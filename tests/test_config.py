"""Options are decoded by a class that declares them, also by several threads at once."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import pytest

from wtransfer.config import decode_options
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
