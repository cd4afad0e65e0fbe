"""The processes of the mini engine, and modules that tests and processes share."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from pathlib import Path

import pytest

from wtransfer.testing.mini_engine.engine import RANK_MAIN, ProcessExecutor, make_engine
from wtransfer.testing.mini_engine.instance import MODULES
from wtransfer.transport.zygote import Zygote

HERE = Path(__file__).parent


def _shared(name, folder=HERE):
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


SHARED = {name: _shared(name) for name in ("shelf_spec", "folder_connector", "serving_kit")}
SHARED["seed_spec"] = _shared("seed_spec", HERE.parents[1] / "specs")


@pytest.fixture(scope="session")
def kit():
    return SHARED["serving_kit"]


@pytest.fixture(scope="session")
def shelves():
    """The memory in which the third party's spec keeps blocks, in this process."""
    return SHARED["shelf_spec"].MEMORY


@pytest.fixture(autouse=True)
def same_bits(one_thread):
    """What is computed here and in the processes has the same bits."""


@pytest.fixture(scope="session")
def zygote():
    """A zygote whose children are ranks and trainers."""
    ours = ["shelf_spec", "folder_connector", "serving_trainer"]
    preload = ["torch", *MODULES, *ours]
    with Zygote(preload=preload, paths=[HERE]) as zygote:
        yield zygote


@pytest.fixture
def serve(request, tmp_path):
    """Maker of hosts, which end with the test: of one rank here, or of ranks as processes."""
    with contextlib.ExitStack() as stack:

        def make(settings, *, processes=False, hash_function=None):
            if not processes:
                return stack.enter_context(make_engine(settings, None, hash_function))
            zygote = request.getfixturevalue("zygote")
            children = []

            def spawn(address):
                log = tmp_path / f"rank-{len(children)}.log"
                children.append(zygote.spawn(RANK_MAIN, address, stdout=log, stderr=log))

            def ended():
                # The first shows that they end by themselves; the exits of the others are spared.
                assert children[0].wait(20.0) == 0, (tmp_path / "rank-0.log").read_text()
                for child in children[1:]:
                    child.kill()
                    child.wait(20.0)

            stack.callback(ended)
            executor = ProcessExecutor(settings, spawn)
            return stack.enter_context(make_engine(settings, executor, hash_function))

        yield make


@pytest.fixture
def train(zygote, tmp_path, kit):
    """Maker of trainers, each a process; they end with the test."""
    trainers = []

    def start():
        trainers.append(kit.Trainer(zygote, tmp_path / f"trainer-{len(trainers)}.log"))
        return trainers[-1]

    yield start
    for each in trainers:
        each.end()


@pytest.fixture
def trainer(train):
    return train()
