"""Engines that fail on demand, fleets in this process, and the check that nothing is left."""

from __future__ import annotations

import pytest
import torch

from wtransfer.checkpoint.versions import VersionStore
from wtransfer.engines.factory import WeightTransferEngineFactory
from wtransfer.testing.faults import Faults
from wtransfer.testing.fleet import Fleet
from wtransfer.testing.memory import MemoryEngine
from wtransfer.transport.rendezvous import host_rendezvous

FAULTS = Faults()


@pytest.fixture(scope="session")
def engines():
    """Names of engines: ``memory`` copies on arrival, ``shm`` hands out views; both may fail."""
    names = {"memory": "tests-memory", "shm": "tests-shm"}
    WeightTransferEngineFactory.register_engine(names["memory"], FAULTS.wrap(MemoryEngine))
    WeightTransferEngineFactory.register_engine(names["shm"], FAULTS.wrap("shm"))
    return names


@pytest.fixture(params=["memory", "shm"])
def engine(engines, request):
    """Name of an engine; a test that asks for it runs once with each."""
    return engines[request.param]


@pytest.fixture
def faults():
    """What shall go wrong in the engines of this test."""
    yield FAULTS
    FAULTS.disarm()


@pytest.fixture(scope="session")
def libuv():
    """Let libuv, under torch's store, make the pipe that it keeps for the life of the process."""
    host_rendezvous("127.0.0.1").close()


@pytest.fixture(autouse=True)
def leaves_nothing(leaves_nothing):
    """Look at every test of this folder so."""


@pytest.fixture
def fleet(leaves_nothing):
    """Maker of fleets that are closed at the end of the test."""
    fleets = []

    def make(source, **options):
        made = Fleet(source, **{"deadline_s": 5.0} | options)
        fleets.append(made)
        return made

    yield make
    # A publisher knows why its last round failed, and that error the frames it passed through.
    while fleets:
        fleets.pop().close()


@pytest.fixture
def weights():
    """Names and tensors: four of one shape and dtype, so that they can be mistaken."""
    return {f"layer.{i}": torch.arange(12.0).view(3, 4) + 100 * i for i in range(4)}


@pytest.fixture
def store(tmp_path):
    """Store of the engine ``file``."""
    return VersionStore(tmp_path / "store")


@pytest.fixture
def publishing(fleet, store, weights):
    """Maker of fleets with one worker that publish to the store."""

    def make(**options):
        made = fleet(weights, engine="file", options={"path": str(store.root), **options})
        made.join()
        return made

    return make
