"""Hints of the kits: the error's before the test's."""

from __future__ import annotations

import json
import sqlite3
import threading

import pytest

from wtransfer.deadline import Deadline
from wtransfer.errors import (
    ConnectorOptionError,
    DigestMismatchError,
    EngineError,
    OffloadingOptionError,
    TruncatedError,
)
from wtransfer.testing.kit import ConformanceKit, checked_stats, usually

OWN = "the usual thing is wrong"
NO_OPTIONS = "the kit was not given the options that the backend needs: return them from options_in"
HANGS = (
    "a call waits without an end, for a lock, a peer or a server: give each a time-out; or the "
    "machine or store is slower: raise deadline_s"
)


def missing_module():
    import no_such_library  # noqa: F401


def other_thread():
    connection = sqlite3.connect(":memory:")
    errors = []

    def use():
        try:
            connection.execute("select 1")
        except sqlite3.ProgrammingError as error:
            errors.append(error)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    connection.close()
    raise errors[0]


def misspelt():
    return "".stripp()


def raising(error, cause=None):
    def call():
        raise error from cause

    return call


def hint_of(call):
    class Kit(ConformanceKit):
        @usually(OWN)
        def run(self):
            call()

    with pytest.raises(AssertionError) as failed:
        Kit().run()
    _, usual, hint = str(failed.value).partition("Usually this means that ")
    assert usual
    return hint


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (missing_module, "a library is not installed here, or not under this name."),
        (other_thread, "threads share a connection of sqlite: give each thread its own"),
        (raising(OffloadingOptionError("x")), NO_OPTIONS),
        (raising(ConnectorOptionError("x")), NO_OPTIONS),
        (raising(ValueError("Invalid options for Mine: missing 1: 'root'")), NO_OPTIONS),
        (
            raising(EngineError("parse_update_info raised ValueError: Invalid update_info for M")),
            "the trainer passes another info to client.update_weights() than",
        ),
        (raising(TruncatedError("x")), "the side that writes or sends these bytes ends too early"),
        (
            raising(TypeError("contains() returned None, not a list of True and False")),
            "a method lacks its return, or returns another type.",
        ),
        (raising(ValueError("x"), OSError(28, "No space left on device")), "the store of this"),
        (raising(OSError(24, "Too many open files")), "descriptors are opened for each call"),
    ],
)
def test_hint_of_an_error_replaces_that_of_the_test(call, hint):
    found = hint_of(call)
    assert found.startswith(hint)
    assert OWN not in found


@pytest.mark.parametrize(
    ("call", "hint"),
    [
        (misspelt, "the code itself has a mistake, at test_hints.py:"),
        (
            raising(ValueError("receive_weights raised NameError: name 'x' is not defined")),
            "the backend's own code has this mistake",
        ),
        (
            raising(EngineError("receive_weights raised KeyError: 'x' (at engine.py:3)")),
            "the backend itself raises this error, at the place that it names",
        ),
        (raising(DigestMismatchError("x")), "memory or a file was rewritten while it was read"),
        (raising(ConnectionRefusedError(111, "Connection refused")), "nothing listens at the"),
        (raising(AssertionError("a call of the tier has not returned in 6 s")), HANGS),
        (raising(KeyError("x")), "the backend raises KeyError itself, at test_hints.py:"),
        (raising(AssertionError("x")), "the backend raises AssertionError itself, at test_hints"),
        (lambda: json.loads("{"), "the backend raises JSONDecodeError itself, at test_hints.py:"),
    ],
)
def test_hint_of_an_error_goes_before_that_of_the_test(call, hint):
    found = hint_of(call)
    assert found.startswith(hint)
    assert found.endswith(f"; or that {OWN}.")


@pytest.mark.parametrize(
    "call",
    [
        # What the kit finds, and what the framework raises, also below the backend's own code.
        lambda: checked_stats({1: 2}, "worker"),
        lambda: Deadline(0.0).check("a call"),
    ],
)
def test_any_other_error_has_the_hint_of_the_test(call):
    assert hint_of(call) == f"{OWN}."
