"""Serving instances without a model: in this process, and in processes of their own."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import runpy
import sys
import time
from pathlib import Path

import pytest

from wtransfer.transport.zygote import Zygote
from wtransfer.weight_version import process_weights

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
PARTS = runpy.run_path(str(TESTS / "transport" / "process_group_ranks.py"))
IMPORT_S = 120.0
SHM, GROUP = "SharedMemoryConnector", "ProcessGroupConnector"
OPTIONS = {
    SHM: {"shelf_bytes": 1 << 20},
    GROUP: {"shelf_bytes": 1 << 20, "token": "a token of these tests"},
}


def _load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def instance():
    """The module `instance.py`."""
    return _load("p2p_instance", HERE / "instance.py")


@pytest.fixture(params=[SHM, GROUP])
def kind(request):
    """Each kind of connector."""
    return request.param


@pytest.fixture(scope="session")
def first_store():
    """A process's first store opens a pipe for good: libuv's, for signals."""
    from wtransfer.transport.rendezvous import host_rendezvous

    host_rendezvous("127.0.0.1").close()


@pytest.fixture
def make(instance, kind, first_store, leaves_nothing):
    """Maker of instances in this process, which all have the same weights."""
    with contextlib.ExitStack() as stack:
        weights = stack.enter_context(contextlib.closing(process_weights.hold("w1")))

        def made(engine_id, **options):
            options["options"] = {**OPTIONS[kind], **options.get("options", {})}
            one = instance.Instance(engine_id, kind, alone=False, **options)
            stack.callback(one.close)
            return one

        made.weights = weights
        yield made


@pytest.fixture(scope="session")
def nursery():
    """A zygote whose children are instances."""
    with Zygote(preload=["torch", "instance"], paths=[HERE]) as zygote:
        yield zygote


class Cast:
    """The processes of one test."""

    def __init__(self, zygote, folder, kind):
        self.zygote, self.folder, self.kind = zygote, folder, kind
        self.numbers = itertools.count()
        self.ranks = []

    def start(self, engine_id, *, host=None, **options):
        """Start an instance; `host` of `tests/flows/namespaces.py`, None: on this machine."""
        name = f"{engine_id}-{next(self.numbers)}"
        log = self.folder / f"{name}.log"

        def spawn(path):
            if host is None:
                return self.zygote.spawn("instance:main", path, stdout=log, stderr=log)
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            with log.open("ab") as to:
                command = [sys.executable, str(HERE / "instance.py"), path]
                return host.run(command, env=environment, stdout=to, stderr=to)

        rank = PARTS["Rank"](name, self.folder, spawn, IMPORT_S)
        rank.log = log
        self.ranks.append(rank)
        own = dict(OPTIONS[self.kind])
        if host:
            own |= {"host": host.address, "allowed_peers": ["10.77.0.0/24"]}
        options["options"] = {**own, **options.get("options", {})}
        rank.ask("make", engine_id=engine_id, connector=self.kind, **options)
        return rank

    def close(self):
        for rank in self.ranks:
            rank.end()
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, 9)


@pytest.fixture
def cast(nursery, tmp_path, kind):
    """Maker of instances in processes of their own."""
    made = Cast(nursery, tmp_path, kind)
    yield made
    made.close()


@pytest.fixture(scope="session")
def until():
    """Poll until something holds."""

    def wait(condition, within_s=10.0):
        end = time.monotonic() + within_s
        while not (value := condition()):
            assert time.monotonic() < end, "it never became true"
            time.sleep(0.005)
        return value

    return wait
