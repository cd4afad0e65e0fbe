"""Trainers and workers as real processes, which tests order about, stop and kill by pid."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import itertools
import json
import os
import secrets
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from wtransfer.errors import WTransferError
from wtransfer.transport.zygote import Zygote

HERE = Path(__file__).parent
PATIENCE_S = 20.0


def _stage_module():
    spec = importlib.util.spec_from_file_location("flow_stage", HERE / "flow_stage.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["flow_stage"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def flow_stage():
    """The module that the processes share with the tests: phases and the witness."""
    return _stage_module()


@pytest.fixture(scope="session")
def nursery():
    """A zygote whose children are the trainers and workers."""
    with Zygote(preload=["torch", "flow_trainer", "flow_worker"], paths=[HERE]) as zygote:
        yield zygote


class OrderFailedError(Exception):
    """A puppet raised; its error as plain data."""

    def __init__(self, error):
        super().__init__(f"{error['classes'][0]}: {error['text']}")
        self.classes = error["classes"]
        self.text = error["text"]
        self.facts = SimpleNamespace(**error)
        self.seconds = None
        self.ended = None


class Puppet:
    """One process, seen by the test."""

    def __init__(self, zygote, target, folder, name, witness_module, options):
        self.name = name
        self.log = folder / f"{name}.log"
        witness_path = folder / f"{name}.witness"
        witness_path.write_bytes(bytes(witness_module.WITNESS_NBYTES))
        if hold := options.pop("hold", None):
            witness_module.Witness(witness_path).hold(hold)
        address = f"wt-flow-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(f"\0{address}")
            listener.listen(1)
            listener.settimeout(PATIENCE_S)
            # In kilobytes of log lies the reason why a test fails.
            self.child = zygote.spawn(
                target, address, str(witness_path), stdout=self.log, stderr=self.log, **options
            )
            self.pid = self.child.pid
            self._pidfd = os.pidfd_open(self.pid)
            self._socket, _ = listener.accept()
        self._max_datagram = witness_module.MAX_DATAGRAM
        self.witness = witness_module.Witness(witness_path)
        self.alive = True

    # -- orders

    def ask(self, order, *, timeout_s=PATIENCE_S, **options):
        """Give an order, wait, and return what came of it."""
        self.order(order, **options)
        return self.answer(timeout_s)

    def order(self, order, **options):
        self._socket.send(json.dumps({"order": order, "options": options}).encode())

    def answer(self, timeout_s=PATIENCE_S):
        """Return the answer to the last order; `ended` keeps when it had been carried out."""
        self._socket.settimeout(timeout_s)
        datagram = self._socket.recv(self._max_datagram)
        if not datagram:
            raise EOFError(f"{self.name} has ended:\n{self.last_words()}")
        reply = json.loads(datagram)
        self.ended = reply["ended"]
        if "error" in reply:
            failed = OrderFailedError(reply["error"])
            failed.ended, failed.seconds = reply["ended"], reply["ended"] - reply["begun"]
            raise failed
        return reply["value"]

    def last_words(self):
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""

    def look(self):
        return self.ask("look")

    # -- phases

    @property
    def phase(self):
        return self.witness.phase

    def until_held(self, timeout_s=PATIENCE_S):
        end = time.monotonic() + timeout_s
        while not self.witness.held:
            assert time.monotonic() < end, f"{self.name} is in {self.phase}\n{self.last_words()}"
            time.sleep(0.0005)

    def go_on(self):
        self.witness.hold("idle")

    # -- signals

    def signal(self, number):
        """Send a signal; by descriptor, so that it can only reach this process."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)
        return time.monotonic()

    def kill(self):
        """Kill it and return when that was."""
        self.alive = False
        killed_at = self.signal(signal.SIGKILL)
        assert -signal.SIGKILL == self.child.wait(5.0)
        return killed_at

    def end(self):
        """Leave in good order, or by force; a second call does nothing."""
        if self._socket.fileno() < 0:
            return
        if self.alive:
            self.alive = False
            self.go_on()
            self.signal(signal.SIGCONT)
            with contextlib.suppress(OSError, EOFError, OrderFailedError):
                self.ask("end", timeout_s=10.0)
            with contextlib.suppress(WTransferError):
                self.child.wait(10.0)
        self.signal(signal.SIGKILL)
        self.child.wait(5.0)
        self._socket.close()
        os.close(self._pidfd)

    # -- what it holds

    def holdings(self):
        """Count its descriptors by kind, its threads, and its mappings of shared segments."""
        found = collections.Counter()
        for fd in _listed(f"/proc/{self.pid}/fd"):
            with contextlib.suppress(OSError):
                kind = os.readlink(f"/proc/{self.pid}/fd/{fd}").split(":[")[0]
                found["memfd" if kind.startswith("/memfd:wtransfer") else kind] += 1
        found["threads"] = len(_listed(f"/proc/{self.pid}/task"))
        lines = Path(f"/proc/{self.pid}/maps").read_text().splitlines()
        found["mappings"] = sum("/memfd:wtransfer" in line for line in lines)
        return found


def _listed(folder):
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _session_members(session):
    """Return the processes of a session, by pid: what is left of a zygote's offspring."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                found.append((int(pid), fields[0]))
    return found


class Cast:
    """The processes of one test."""

    def __init__(self, zygote, folder, stage, wait_until):
        self._zygote, self._folder, self._stage = zygote, folder, stage
        self._wait_until = wait_until
        self._numbers = itertools.count()
        self.size = {"num_tensors": 8, "numel": 4096}
        self.puppets = []
        self.where = {}

    def trainer(self, *, hold=None, **options):
        """Start a trainer; workers that start later join it."""
        puppet = self._start("flow_trainer:main", "trainer", {"hold": hold, **options})
        self.where = puppet.ask("where")
        return puppet

    def worker(self, *, trainer=None, hold=None, **options):
        """Start a worker that joins a trainer, by default the last one."""
        where = trainer.ask("where") if trainer else self.where
        options = {"join": where["address"], "token": where["token"], **options}
        return self._start("flow_worker:main", "worker", {"hold": hold, **options})

    def workers(self, number, **options):
        return [self.worker(**options) for _ in range(number)]

    def _start(self, target, role, options):
        name = f"{role}-{next(self._numbers)}"
        if role == "worker":
            options.setdefault("name", name)
        puppet = Puppet(
            self._zygote, target, self._folder, name, self._stage, {**self.size, **options}
        )
        self.puppets.append(puppet)
        return puppet

    def until(self, condition, timeout_s=PATIENCE_S):
        return self._wait_until(condition, timeout_s)

    def holds(self, worker, number, timeout_s=PATIENCE_S):
        """Wait until a worker serves a version, then check that it is that one, whole."""
        version = f"v{number}" if number else None
        self.until(lambda: worker.look()["version"] == version, timeout_s)
        look = worker.look()
        assert {number} == set(look["numbers"])
        return look

    def close(self):
        for puppet in reversed(self.puppets):
            puppet.end()
        # C3: nothing outlives its process, and no process is left, not even as a zombie.
        left = self._wait_until(
            lambda: [each for each in _session_members(self._zygote.pid) if each[0] != self.pid],
            5.0,
            wanted=[],
        )
        assert [] == left

    @property
    def pid(self):
        return self._zygote.pid


@pytest.fixture(scope="session")
def wait_until():
    """Poll a condition until it holds (or has the value `wanted`); return its last value."""

    def wait(condition, timeout_s, **wanted):
        end = time.monotonic() + timeout_s
        while True:
            value = condition()
            reached = value == wanted["wanted"] if wanted else bool(value)
            if reached or time.monotonic() > end:
                assert reached or wanted, "the condition did not come true in time"
                return value
            time.sleep(0.005)

    return wait


@pytest.fixture
def flow(nursery, tmp_path, flow_stage, wait_until):
    """Maker of the processes of a test; they end with it, and nothing of them may be left."""
    cast = Cast(nursery, tmp_path, flow_stage, wait_until)
    try:
        yield cast
    finally:
        cast.close()


@pytest.fixture(scope="session")
def failing():
    """Context manager that expects an order to fail with an error of a class."""

    @contextlib.contextmanager
    def expect(cls):
        seen = SimpleNamespace()
        with pytest.raises(OrderFailedError) as caught:
            yield seen
        assert cls in caught.value.classes, caught.value
        seen.error = caught.value
        vars(seen).update(vars(caught.value.facts))
        seen.ended = caught.value.ended

    return expect
