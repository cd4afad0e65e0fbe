"""Hosts, and what tests of connectors share."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest

from wtransfer.testing.mini_engine.model import LocalWeights
from wtransfer.weight_version import process_weights

HERE = Path(__file__).parent


def _shared(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# Before the tests are imported, which import it by its name.
for _name in ("host", "sides", "storage_jobs", "tokens_connector"):
    _shared(_name)


@pytest.fixture
def weights():
    """The weights of this process, under a name that another process could have as well."""
    # A model of an earlier test would change the name as soon as the collector finds it.
    process_weights.begin_anew()
    held = process_weights.hold("A")
    yield held
    held.close()


@pytest.fixture
def sides(weights):
    """Maker of `Sides`, which are closed with the test."""
    made = []

    def make(connector, num_ranks=1, **options):
        made.append(sys.modules["sides"].Sides(connector, num_ranks, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def drawn(one_thread):
    """The weights of all hosts of a test, drawn from a seed."""
    process_weights.begin_anew()
    with contextlib.closing(LocalWeights(0)) as made:
        yield made


@pytest.fixture
def host(drawn):
    """Maker of hosts, which are closed with the test."""
    with contextlib.ExitStack() as stack:

        def make(connector, **options):
            return stack.enter_context(sys.modules["host"].Host(drawn, connector, **options))

        yield make


_LONG = ("test_weights_change_before_every_call", "test_ended_requests_leave_nothing[1000]")
"""Tests of the kit that ask for ``is_long``."""


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items):
    for item in items:
        if item.name.startswith(_LONG):
            item.cls.is_long = True
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.nightly)
