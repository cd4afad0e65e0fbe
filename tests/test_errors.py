"""Errors keep their facts, also on their way to another process."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wtransfer import errors
from wtransfer.errors import (
    CommitError,
    EngineError,
    RemoteError,
    SchemaError,
    StallError,
    WTransferError,
    from_wire,
    to_wire,
)

CLASSES = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, WTransferError)
]
OURS_ALONE = {WTransferError, errors.PluginError}


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_is_ours_and_the_built_in_that_fits(cls):
    assert cls.__doc__
    built_in = [base for base in cls.__mro__ if base.__module__ == "builtins"]
    assert cls in OURS_ALONE or built_in[0] not in (Exception, BaseException, object)


def test_facts_that_locate_the_failure_stand_in_the_text():
    error = SchemaError("it does not fit", worker="w0", round_id="r1", piece="a.weight")
    assert str(error) == "it does not fit [worker w0, round r1]"
    assert error.piece == "a.weight"


def test_a_fact_that_the_sentence_names_is_not_repeated():
    assert str(StallError("w0 made no progress", worker="w0")) == "w0 made no progress"


def test_facts_are_added_but_never_changed():
    error = StallError("late", worker="w0")
    error.add_facts(worker="w1", phase="seal")
    assert (error.worker, error.phase) == ("w0", "seal")


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_every_error_arrives_as_what_it_was(cls):
    error = cls("the sentence", worker="w0", piece="p")
    arrived = _sent(error)
    assert type(arrived) is cls
    assert (arrived.message, arrived.worker, arrived.piece) == ("the sentence", "w0", "p")
    assert str(arrived) == str(error)


def test_exception_of_an_engine_arrives_as_engine_error_that_names_its_type():
    arrived = _sent(KeyError("layer.3"))
    assert type(arrived) is EngineError
    assert str(arrived) == "KeyError: 'layer.3'"


def test_a_subclass_that_a_plugin_defines_arrives_as_an_engine_error():
    class MineError(WTransferError):
        """Unknown to every other process."""

    assert str(_sent(MineError("mine"))) == "MineError: mine"


@given(st.text(), st.text())
def test_a_class_that_is_not_in_the_table_becomes_a_remote_error(kind, message):
    error = from_wire(kind, message, {})
    assert type(error) in CLASSES
    if kind not in {cls.__name__ for cls in CLASSES}:
        assert type(error) is RemoteError
        assert message in str(error)


@pytest.mark.parametrize("fact", ["message", "args", "__class__", "add_facts", "with_traceback"])
def test_facts_that_the_class_does_not_declare_are_dropped(fact):
    error = from_wire("StallError", "late", {fact: "x", "worker": "w0"})
    assert vars(error) == {"message": "late", "worker": "w0"}


@pytest.mark.parametrize(
    ("kind", "fact", "value"),
    [
        ("StallError", "located_by", ["worker"]),
        ("StallError", "located_by", 5),
        ("StallError", "worker", 7),
        ("StallError", "seconds", "soon"),
        ("SchemaError", "mismatches", [1]),
        ("CommitError", "restored", "no"),
        ("CommitError", "report", "no peer's to give"),
    ],
)
def test_facts_that_are_not_of_the_declared_type_are_dropped(kind, fact, value):
    error = from_wire(kind, "late", {fact: value, "phase": "seal"})
    assert vars(error) == {"message": "late", "phase": "seal"}
    assert str(error) == "late [phase seal]"


def test_facts_of_every_type_arrive():
    assert _sent(StallError("late", seconds=2)).seconds == 2
    assert _sent(CommitError("failed", restored=False)).restored is False
    assert _sent(SchemaError("no", mismatches=["a"])).mismatches == ["a"]


def _sent(error):
    return from_wire(*msgspec.msgpack.decode(msgspec.msgpack.encode(to_wire(error))))
