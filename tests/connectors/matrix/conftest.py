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
from wtransfer.testing.mini_engine.instance import INSTANCE_MAIN

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
# Nobody's speed decides whether a block is there.
PATIENT_INSTANCE = """
import sys
from wtransfer.specs import tier_manager
from wtransfer.testing.mini_engine.instance import run_instance
tier_manager.LOOKUP_S = 60.0
run_instance(sys.argv[1])
"""


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
PROCESS = _load("matrix_process", HERE / "matrix_process.py")


@pytest.fixture(scope="session")
def kit():
    """What the tests of the mini engine share."""
    return KIT


@pytest.fixture(autouse=True)
def same_bits(one_thread):
    """What is computed by any host, and by a fresh model, has the same bits."""


@pytest.fixture
def host(drawn):
    """Maker of hosts with the weights of `drawn`, which end with the test."""
    numbers = itertools.count()
    with contextlib.ExitStack() as closing:

        def made(connectors, block_size=16, num_blocks=32, name="", **limits):
            settings = EngineConfig(
                cache=CacheShape(block_size, num_blocks),
                limits=Limits(**limits),
                seed=drawn.seed,
                engine_id=name or f"host-{next(numbers)}",
                **STACKS.settings_of(connectors),
            )
            engine = closing.enter_context(make_engine(settings))
            drawn._models.append(engine.executor.worker.model)
            return engine

        yield made


@pytest.fixture
def service(host, drawn, tmp_path, monkeypatch):
    """Maker of services."""
    monkeypatch.setattr("wtransfer.specs.tier_manager.LOOKUP_S", 60.0)  # as in `PATIENT_INSTANCE`

    def made(stack, block_size, num_blocks, room=None, **limits):
        options = STACKS.room_for(room, block_size, KIT.nbytes_per_block(block_size))

        def make(sender):
            # What one host keeps is none of another's: only P2P connectors lead to another.
            name = "asked" if sender is None else f"sender-{sender}"
            connectors = STACKS.described(stack, tmp_path / name, options, sender)
            engine = host(connectors, block_size, num_blocks, name, **limits)
            engine.folder = tmp_path / name
            return engine

        return SERVICE.Service(KIT, stack, make, drawn)

    return made


@pytest.fixture
def process(zygote, tmp_path):
    """Maker of services in processes of their own."""
    logs = (tmp_path / f"process-{number}.log" for number in itertools.count())
    with contextlib.ExitStack() as closing:

        def spawn(target, address):
            log = next(logs)
            assert target == INSTANCE_MAIN
            arguments = PATIENT_INSTANCE, [address], {}
            return zygote.spawn("programs:run", *arguments, stdout=log, stderr=log)

        def made(stack, *, is_updated):
            trainer = None
            if is_updated:
                trainer = closing.enter_context(contextlib.closing(KIT.Trainer()))
            cache, folder = CacheShape(16, 32), tmp_path / "kept"
            room = STACKS.room_for(None, 16, KIT.nbytes_per_block(16))
            settings = STACKS.settings_of(STACKS.described(stack, folder, room, None))
            settings |= trainer.settings if trainer else {}
            config = EngineConfig(cache=cache, engine_id="asked", **settings)
            one = PROCESS.ProcessService(KIT, stack, config, folder, spawn, trainer)
            closing.callback(one.close)
            return one

        yield made
