"""Hosts with a P2P connector: in this process, and in processes of their own."""

from __future__ import annotations

import contextlib
import itertools
import os
import runpy
import sys
import time
from pathlib import Path

import pytest
from host import Host

HERE = Path(__file__).parent
PARTS = runpy.run_path(str(HERE.parents[1] / "transport" / "process_group_ranks.py"))
IMPORT_S = 120.0
SHM, GROUP = "SharedMemoryConnector", "ProcessGroupConnector"
OPTIONS = {
    SHM: {"staging_bytes": 1 << 20},
    GROUP: {"staging_bytes": 1 << 20, "token": "a token of these tests"},
}


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
def make(kind, drawn, first_store, leaves_nothing):
    """Maker of hosts in this process."""
    with contextlib.ExitStack() as stack:

        def made(engine_id, **options):
            one = Host(drawn, kind, engine_id=engine_id, **{**OPTIONS[kind], **options})
            return stack.enter_context(one)

        yield made


class Cast:
    """The processes of one test."""

    def __init__(self, zygote, folder, kind):
        self.zygote, self.folder, self.kind = zygote, folder, kind
        self.numbers = itertools.count()
        self.ranks = []

    def start(self, engine_id, *, host=None, **options):
        """Start a host; `host` of `tests/flows/namespaces.py`, None: on this machine."""
        name = f"{engine_id}-{next(self.numbers)}"
        log = self.folder / f"{name}.log"

        def spawn(path):
            if host is None:
                return self.zygote.spawn("puppet:main", path, stdout=log, stderr=log)
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            with log.open("ab") as to:
                command = [sys.executable, str(HERE / "puppet.py"), path]
                return host.run(command, env=environment, stdout=to, stderr=to)

        rank = PARTS["Rank"](name, self.folder, spawn, IMPORT_S)
        self.ranks.append(rank)
        if host:
            options |= {"host": host.address, "allowed_peers": ["10.77.0.0/24"]}
        rank.ask(
            "make",
            connector=self.kind,
            engine_id=engine_id,
            **{**OPTIONS[self.kind], "staging_bytes": 64 << 20, **options},
        )
        return rank

    def close(self):
        for rank in self.ranks:
            rank.end()
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, 9)


@pytest.fixture
def cast(zygote, tmp_path, kind):
    """Maker of hosts in processes of their own."""
    made = Cast(zygote, tmp_path, kind)
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
