"""Trainers and workers as real processes, which tests order about, stop and kill by pid."""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib.util
import itertools
import json
import os
import runpy
import secrets
import select
import signal
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

HERE = Path(__file__).parent
PATIENCE_S = 20.0
IMPORT_S = 120.0
SOCKETS = runpy.run_path(str(HERE.parent / "tcp_sockets.py"))
_BOOT = (
    "import importlib, json, sys; path, module, name, args, options = json.loads(sys.argv[1]); "
    "sys.path.insert(0, path); getattr(importlib.import_module(module), name)(*args, **options)"
)


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

    def __init__(self, spawn, target, folder, *, name, stage, options, address, patience_s):
        self.name = name
        self.log = folder / f"{name}.log"
        witness_path = folder / f"{name}.witness"
        witness_path.write_bytes(bytes(stage.WITNESS_NBYTES))
        if hold := options.pop("hold", None):
            stage.Witness(witness_path).hold(hold)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(1)
            listener.settimeout(patience_s)
            # In kilobytes of log lies the reason why a test fails.
            self.child = spawn(
                target, address, str(witness_path), stdout=self.log, stderr=self.log, **options
            )
            self.pid = self.child.pid
            self._pidfd = os.pidfd_open(self.pid)
            self._socket, _ = listener.accept()
        self._max_datagram = stage.MAX_DATAGRAM
        self.witness = stage.Witness(witness_path)
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

    def has_answered(self):
        """Return whether the answer to the last order is there."""
        return bool(select.select([self._socket], [], [], 0)[0])

    def last_words(self, limit=3000):
        """Return the end of what it printed; None: all of it."""
        return self.log.read_text(errors="replace")[-(limit or 0) :] if self.log.exists() else ""

    def look(self):
        return self.ask("look")

    def looks(self):
        """Return what a worker has seen of its model, also if it is dead: label, identity, numbers.

        Every look is that of one version, whole, or the test fails here.
        """
        lines = self.last_words(None).splitlines()
        looks = [json.loads(line[5:]) for line in lines if line.startswith("LOOK ")]
        for version, _, numbers in looks:
            assert len(set(numbers)) == 1, f"{self.name} is torn: {numbers}"
            assert version == (f"v{int(numbers[0])}" if numbers[0] else None)
        return looks

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
        assert self.child.wait(5.0) == -signal.SIGKILL
        return killed_at

    def end(self):
        """Leave in good order, or by force; a second call does nothing.

        Once the process has closed what it had, the rest is the interpreter's exit: a second of
        CPU with torch loaded, and spared.
        """
        if self._socket.fileno() < 0:
            return
        if self.alive:
            self.alive = False
            self.go_on()
            self.signal(signal.SIGCONT)
            with contextlib.suppress(OSError, EOFError, OrderFailedError):
                self.ask("end", timeout_s=10.0)
        self.signal(signal.SIGKILL)
        self.child.wait(5.0)
        self._socket.close()
        os.close(self._pidfd)

    # -- what it holds

    def listeners(self):
        """Return the addresses at which it listens by TCP, once for each port."""
        return [each.partition(":")[0] for each in SOCKETS["listeners"](self.pid)]

    def tcp_sockets(self):
        """Return state and own address of its TCP sockets, as the kernel writes them."""
        return [(state, each.partition(":")[0]) for state, each in SOCKETS["tcp_sockets"](self.pid)]

    def resident_nbytes(self):
        """Return the memory that it has."""
        num_pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return num_pages * os.sysconf("SC_PAGE_SIZE")

    def holdings(self):
        """Count its descriptors by kind, its threads, and its mappings of shared segments."""
        found = collections.Counter()
        proc = Path(f"/proc/{self.pid}")
        for fd in (proc / "fd").iterdir():
            with contextlib.suppress(OSError):
                found[_kind_of(str(fd.readlink()))] += 1
        found["threads"] = sum(1 for _ in (proc / "task").iterdir())
        lines = (proc / "maps").read_text().splitlines()
        found["mappings"] = sum("/memfd:wtransfer" in line for line in lines)
        return found


def _spawn_on(host, target, *args, stdout, stderr, **options):
    """Do on another host what `Zygote.spawn` does here; torch is imported anew."""
    assert stdout == stderr
    job = json.dumps([str(HERE), *target.split(":"), args, options])
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with stdout.open("ab") as log:
        return host.run([sys.executable, "-c", _BOOT, job], stdout=log, stderr=log, env=environment)


def _kind_of(target):
    """Return the kind of a descriptor; numbers and paths differ from process to process."""
    if target.startswith("/"):
        return "memfd" if target.startswith("/memfd:") else "file"
    return target.partition(":[")[0] if target.startswith(("socket:", "pipe:")) else target


def _session_members(session):
    """Return the processes of a session, also those that are dead and not reaped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                found.add(int(process.name))
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

    def trainer(self, *, hold=None, host=None, **options):
        """Start a trainer; workers that start later join it.

        Args:
            hold: Phase to hold at.
            host: Of `namespaces.py`; None: this machine's network.
            **options: Of the publisher.
        """
        puppet = self._start("flow_trainer:main", "trainer", {"hold": hold, **options}, host)
        self.where = puppet.ask("where")
        return puppet

    def worker(self, *, trainer=None, hold=None, host=None, **options):
        """Start a worker that joins a trainer, by default the last one; `host` as of a trainer."""
        where = trainer.ask("where") if trainer else self.where
        options = {"join": where["address"], "token": where["token"], **options}
        return self._start("flow_worker:main", "worker", {"hold": hold, **options}, host)

    def workers(self, number, **options):
        return [self.worker(**options) for _ in range(number)]

    def _start(self, target, role, options, host=None):
        name = f"{role}-{next(self._numbers)}"
        if role == "worker":
            options.setdefault("name", name)
        options = {**self.size, **options}
        puppet = Puppet(
            self._zygote.spawn if host is None else functools.partial(_spawn_on, host),
            target,
            self._folder,
            name=name,
            stage=self._stage,
            options=options,
            # Abstract addresses do not reach into another network namespace; paths do.
            address=f"\0wt-flow-{secrets.token_hex(8)}"
            if host is None
            else str(self._folder / f"{name}.socket"),
            patience_s=PATIENCE_S if host is None else IMPORT_S,
        )
        self.puppets.append(puppet)
        return puppet

    def until(self, condition, timeout_s=PATIENCE_S):
        return self._wait_until(condition, timeout_s)

    def held_in(self, trainer, puppet, phase, number=2):
        """Begin a round in which one process stops where it enters a phase; return the round."""
        puppet.witness.hold(phase)
        round_id = trainer.ask("begin", number=number)
        puppet.until_held()
        return round_id

    def killed_in(self, trainer, victim, phase, number=2):
        """Kill a process there, with the round's result asked for; return the round and when."""
        round_id = self.held_in(trainer, victim, phase, number)
        trainer.order("result")
        return round_id, victim.kill()

    def publish(self, trainer, number, workers):
        """Publish to workers, once just these are there, and check that each holds it whole."""
        names = {worker.name for worker in workers}
        self.until(lambda: names == {each["worker"] for each in trainer.ask("workers")})
        report = trainer.ask("publish", number=number)
        assert report["ok"], report["text"]
        here = {name for name, each in report["workers"].items() if each["outcome"] != "gone"}
        assert names == here
        for worker in workers:
            ack = report["workers"][worker.name]
            assert ("committed", f"v{number}") == (ack["outcome"], ack["version"])
            holds = self.holds(worker, number)["fingerprint"]
            assert report["fingerprint"] == ack["fingerprint"] == holds

    def serve(self, workers, number, since, within_s=10.0):
        """Check that workers are soon in no round any more, and serve a version, whole."""
        for worker in workers:
            assert worker.ask("until_free", within_s=10) - since < within_s
            look = worker.look()
            version = f"v{number}" if number else None
            assert (version, {number}) == (look["version"], set(look["numbers"]))

    def settled(self, look, wanted, timeout_s=15.0):
        """Look until there is what is wanted, or time is up; return what there is then."""
        return self._wait_until(look, timeout_s, wanted=wanted)

    def left_over(self, before, look, timeout_s=15.0):
        """Return by how much each process has more than before, when that was given back or not."""
        none = [collections.Counter() for _ in before]
        return self.settled(
            lambda: [now - then for now, then in zip(look(), before, strict=True)], none, timeout_s
        )

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
        assert set() == self.settled(self.living, set())

    def living(self):
        """Return the pids of all processes that came of this zygote, children's children too."""
        return _session_members(self._zygote.pid) - {self._zygote.pid}


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
def flow(zygote, tmp_path, flow_stage, wait_until):
    """Maker of the processes of a test; they end with it, and nothing of them may be left."""
    cast = Cast(zygote, tmp_path, flow_stage, wait_until)
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


@pytest.fixture(scope="session")
def make_network():
    """Maker of networks of hosts, each in a network namespace of its own; see `namespaces.py`."""
    parts = runpy.run_path(str(HERE / "namespaces.py"))
    with contextlib.ExitStack() as stack:

        def make(num_hosts):
            try:
                return stack.enter_context(parts["Network"](num_hosts))
            except parts["UnavailableError"] as error:
                pytest.skip(f"needs network namespaces (root on Linux, iproute2): {error}")

        yield make


@pytest.fixture
def namespaces(make_network):
    """Three hosts: each has `address`, `run(argv) -> Popen` and `link(up=...)`."""
    network = make_network(3)
    yield network.hosts
    network.__exit__(None, None, None)
