"""Hosts, trainers and processes of the mini engine."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest

from wtransfer.testing.mini_engine.engine import make_engine
from wtransfer.weight_version import process_weights

_SPEC = importlib.util.spec_from_file_location(
    "serving_kit", Path(__file__).with_name("serving_kit.py")
)
KIT = sys.modules["serving_kit"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(KIT)


@pytest.fixture(scope="session")
def kit():
    """What the tests of the mini engine share."""
    return KIT


@pytest.fixture(autouse=True)
def same_bits(one_thread):
    """What is computed here and in the processes has the same bits."""


@pytest.fixture(autouse=True)
def no_other_model():
    """A model of an earlier test would change the weights as soon as the collector finds it."""
    process_weights.begin_anew()


@pytest.fixture
def serve():
    """Maker of hosts in this process, which end with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda config: stack.enter_context(make_engine(config))


@pytest.fixture
def trainer():
    """A publisher of the weights of any seed."""
    with contextlib.closing(KIT.Trainer()) as trainer:
        yield trainer
