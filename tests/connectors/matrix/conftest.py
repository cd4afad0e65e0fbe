"""Hosts with any of the built-in connectors, or with several of them."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
from pathlib import Path

import pytest

from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, Limits
from wtransfer.testing.mini_engine.engine import make_engine
from wtransfer.weight_version import process_weights

HERE = Path(__file__).parent
TESTS = HERE.parents[1]


def _load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# Before the tests are imported, which import them by their names.
KIT = _load("matrix_serving_kit", TESTS / "testing" / "mini_engine" / "serving_kit.py")
STACKS = _load("matrix_stacks", HERE / "matrix_stacks.py")
_load("matrix_watch", HERE / "matrix_watch.py")
SERVICE = _load("matrix_service", HERE / "matrix_service.py")


@pytest.fixture(scope="session")
def kit():
    """What the tests of the mini engine share."""
    return KIT


@pytest.fixture(autouse=True)
def same_bits(one_thread):
    """What is computed by any host, and by a fresh model, has the same bits."""


@pytest.fixture
def host():
    """Maker of hosts, which end with the test."""
    numbers = itertools.count()
    # A model of an earlier test would change the weights as soon as the collector finds it.
    process_weights.begin_anew()
    with contextlib.ExitStack() as closing:

        def made(connectors, block_size=16, num_blocks=32, **limits):
            settings = EngineConfig(
                cache=CacheShape(block_size, num_blocks),
                limits=Limits(**limits),
                engine_id=f"host-{next(numbers)}",
                **STACKS.settings_of(connectors),
            )
            return closing.enter_context(make_engine(settings))

        yield made


@pytest.fixture
def service(host, tmp_path):
    """Maker of services."""
    numbers = itertools.count()

    def made(stack, block_size, num_blocks, **limits):
        tier = KIT.cpu_tier(block_size, STACKS.tier_blocks(block_size))

        def make(sender):
            # What one host keeps is none of another's: only P2P connectors lead to another.
            folder = tmp_path / str(next(numbers))
            connectors = STACKS.described(stack, folder, tier, sender)
            engine = host(connectors, block_size, num_blocks, **limits)
            engine.folder = folder
            return engine

        return SERVICE.Service(KIT, stack, make)

    return made
