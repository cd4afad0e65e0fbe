"""Fixtures of the room."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import secrets
import socket
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
EACH_TIME = ("TestFileTier", "test_any_call_may_fail[under an arena]")
sys.path.append(str(HERE))
PATIENCE_S = 20.0


@pytest.fixture(scope="session")
def arena_rig():
    """The module `arena_rig.py`."""
    spec = importlib.util.spec_from_file_location("arena_rig", HERE / "arena_rig.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["arena_rig"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make_rig(arena_rig):
    """Maker of rigs, which are shut down with the test."""
    with contextlib.ExitStack() as stack:
        yield lambda **options: stack.enter_context(arena_rig.rig(**options))


@pytest.fixture
def counted():
    """Class of keys that counts how often any is looked up."""

    class Counted(bytes):
        lookups = 0

        def __hash__(self):
            type(self).lookups += 1
            return super().__hash__()

        def __eq__(self, other):
            return super().__eq__(other)

    return Counted


class RankError(Exception):
    """What a rank has raised."""

    def __init__(self, kind, text):
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class RankProcess:
    """A process that runs `arena_rank.py`."""

    def __init__(self, zygote):
        address = f"\0wt-arena-rank-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(1)
            listener.settimeout(PATIENCE_S)
            self.child = zygote.spawn("arena_rank:main", address)
            self._connection, _ = listener.accept()
        self._connection.settimeout(PATIENCE_S)
        self.pid = self.child.pid

    def order(self, name, **options):
        self._connection.send(json.dumps([name, options]).encode())

    def answer(self):
        reply = json.loads(self._connection.recv(1 << 16))
        if "error" in reply:
            raise RankError(*reply["error"])
        return reply["value"]

    def ask(self, name, **options):
        self.order(name, **options)
        return self.answer()

    def kill(self):
        self.child.kill()
        code = self.child.wait(PATIENCE_S)
        self._connection.close()
        return code


@pytest.fixture
def start_rank(zygote):
    """Starter of ranks, which are killed with the test."""
    started = []

    def start(**options):
        started.append(RankProcess(zygote))
        if options:
            started[-1].ask("open", **options)
        return started[-1]

    start.error = RankError
    yield start
    for rank in started:
        rank.kill()


@pytest.hookimpl(tryfirst=True)  # before tests are deselected by their marks
def pytest_collection_modifyitems(items):
    for item in items:
        if item.name.startswith("test_any_call_may_fail[") and (
            (item.cls.__name__, item.name) != EACH_TIME
        ):
            item.add_marker(pytest.mark.slow)
