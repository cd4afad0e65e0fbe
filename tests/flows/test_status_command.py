"""``wtransfer push``, ``worker`` and ``status`` as an operator has them: processes of one fleet."""

from __future__ import annotations

import json
import os
import re
import runpy
import secrets
import signal
from pathlib import Path

import pytest
from safetensors.torch import save_file

pytest.importorskip("uvicorn")

from wtransfer.commands.status import DIFFERS, UNREACHABLE

PARTS = runpy.run_path(str(Path(__file__).with_name("http_worker.py")))
WorkerProcess, WEIGHTS, PATIENCE_S = PARTS["WorkerProcess"], PARTS["WEIGHTS"], PARTS["PATIENCE_S"]
NAMES = ("w0", "w1", "w2")
CLOCK = re.compile(r"^\d\d:\d\d:\d\d$", re.MULTILINE)
"""Line above each of the pictures that ``--watch`` draws."""


class Operator:
    """Commands against three workers of one token, each at an address of its own."""

    def __init__(self, zygote, folder):
        self._zygote, self._folder = zygote, folder
        self._secret = secrets.token_hex(16)
        self.token = ["--token-file", str(folder / "token")]
        self.url = {name: f"unix:@wt-test-{secrets.token_hex(8)}" for name in NAMES}
        self.workers, self.started = {}, []

    def start_worker(self, name, *more):
        made = WorkerProcess(
            self._zygote,
            self._folder,
            "--name",
            name,
            *more,
            listen=self.url[name],
            token=self._secret,
        )
        self.workers[name] = made.until_ready()

    def to(self, *names):
        return [part for name in names or NAMES for part in ("--to", self.url[name])]

    def start(self, *arguments):
        out, err = (self._folder / f"{len(self.started)}.{each}" for each in ("out", "err"))
        for each in (out, err):
            each.touch()
        command = [*arguments, *self.token]
        child = self._zygote.spawn("programs:command", command, stdout=out, stderr=err)
        self.started.append(child)
        return child, out, err

    def run(self, *arguments):
        """Return exit code, standard output and standard error of a command."""
        child, out, err = self.start(*arguments)
        return child.wait(PATIENCE_S), out.read_text(), err.read_text()

    def checkpoint(self, label):
        """Write the checkpoint of a version, and return its folder."""
        checkpoint = self._folder / label
        checkpoint.mkdir(exist_ok=True)
        number = float(label.removeprefix("v"))
        weights = {name: tensor + number for name, tensor in WEIGHTS.items()}
        save_file(weights, checkpoint / "model.safetensors")
        return str(checkpoint)

    def push(self, label, *arguments):
        """Return exit code and document of a push."""
        code, out, _ = self.run("push", self.checkpoint(label), "--json", *arguments)
        return code, json.loads(out)

    def status(self, *place):
        """Return exit code and the versions and states that are told."""
        code, out, _ = self.run("status", "--json", *place)
        told = json.loads(out)
        assert told["code"] == code
        return code, {each["worker"]: (each["version"], each["state"]) for each in told["workers"]}

    def kill(self, name):
        child = self.workers[name].child
        os.kill(child.pid, signal.SIGKILL)
        assert child.wait(10.0) == -signal.SIGKILL

    def close(self):
        for child in (*(each.child for each in self.workers.values()), *self.started):
            if child.poll() is None:
                child.kill()
                child.wait(10.0)


@pytest.fixture
def operator(zygote, tmp_path):
    made = Operator(zygote, tmp_path)
    for name in NAMES:
        made.start_worker(name)
    yield made
    made.close()


@pytest.mark.slow
def test_fleet_is_asked_while_one_worker_is_behind_killed_and_started_again(operator, until):
    watching, log, _ = operator.start("status", "--watch", *operator.to())

    def until_seen(text):
        until(lambda: text in log.read_text(), PATIENCE_S)

    until_seen("fresh")
    serving = dict.fromkeys(NAMES, ("v1", "serving"))
    code, told = operator.push("v1", *operator.to())
    first = told["fingerprint"]
    assert (code, operator.status(*operator.to())) == (0, (0, serving))

    # One is behind: it has no part in the next push.
    code, told = operator.push("v2", *operator.to("w0", "w1"))
    second = told["fingerprint"]
    serving |= dict.fromkeys(("w0", "w1"), ("v2", "serving"))
    assert (code, operator.status(*operator.to())) == (0, (DIFFERS, serving))
    code, out, err = operator.run("status", *operator.to())
    assert (code, err) == (DIFFERS, "2 versions are held\n")
    assert [line.split()[0] for line in out.splitlines()] == ["worker", *NAMES]
    code, out, err = operator.run("status", "--ready", second, *operator.to())
    assert (code, out) == (DIFFERS, "")
    assert err == f"w2  not ready: serving, holds {first}\n"
    assert operator.run("status", "--ready", second, *operator.to("w1")) == (0, "", "")
    until_seen("2 versions are held")
    assert operator.push("v2", *operator.to("w2"))[0] == 0
    assert operator.status(*operator.to())[0] == 0

    # One is killed: the others agree, and a push goes on without it where it may.
    operator.kill("w1")
    held = dict.fromkeys(("w0", "w2"), ("v2", "serving"))
    assert operator.status(*operator.to()) == (UNREACHABLE, held)
    code, out, err = operator.run("status", "--ready", second, *operator.to())
    assert (code, out) == (UNREACHABLE, "")
    assert err.startswith(f"{operator.url['w1']}  not reached: cannot reach {operator.url['w1']}")
    assert operator.push("v3", *operator.to())[0] == 1
    assert operator.status(*operator.to()) == (UNREACHABLE, held)
    code, told = operator.push("v3", "--on-lost-worker", "drop", *operator.to())
    assert (code, [*told["problems"]]) == (3, [operator.url["w1"]])
    held = dict.fromkeys(("w0", "w2"), ("v3", "serving"))
    assert operator.status(*operator.to()) == (UNREACHABLE, held)

    until_seen(f"{operator.url['w1']}  not reached")

    # It is started again, at its address, from the first weights.
    operator.start_worker("w1")
    assert operator.status(*operator.to()) == (DIFFERS, held | {"w1": (None, "fresh")})
    code, told = operator.push("v3", *operator.to())
    assert (code, told["problems"]) == (0, {})
    assert operator.status(*operator.to()) == (0, dict.fromkeys(NAMES, ("v3", "serving")))
    assert operator.run("status", "--ready", told["fingerprint"], *operator.to()) == (0, "", "")

    # Its exit code is that of what it saw last.
    until(lambda: CLOCK.split(log.read_text())[-1].count("v3") == len(NAMES), PATIENCE_S)
    os.kill(watching.pid, signal.SIGTERM)
    assert watching.wait(10.0) == 0


@pytest.mark.slow
def test_publisher_that_stays_tells_of_a_worker_that_is_killed_and_comes_again(operator, until):
    address = f"unix:@wt-test-{secrets.token_hex(8)}"
    stay = ["push", operator.checkpoint("v1"), "--stay", "--listen", address]
    pushing, out, err = operator.start(*stay, *operator.to("w0", "w1"))
    until(
        lambda: "staying until ended" in out.read_text() or pushing.poll() is not None, PATIENCE_S
    )
    assert pushing.poll() is None, err.read_text()
    both = dict.fromkeys(("w0", "w1"), ("v1", "serving"))
    assert operator.status("--join", address) == (0, both)
    # Beside what it knows: a worker that has not joined.
    assert operator.status("--join", address, *operator.to("w2")) == (
        DIFFERS,
        both | {"w2": (None, "fresh")},
    )
    operator.kill("w1")
    until(lambda: operator.status("--join", address)[0] == UNREACHABLE, PATIENCE_S)
    code, out, err = operator.run("status", "--join", address)
    assert (code, f"{operator.url['w1']}  not reached" in err) == (UNREACHABLE, True)
    assert "w1: gone since" in out
    assert "with 'v1'" in out
    # It joins by itself, under its name, and is brought up to date.
    operator.start_worker("w1", "--join", address)
    until(lambda: operator.status("--join", address) == (0, both), PATIENCE_S)
    os.kill(pushing.pid, signal.SIGTERM)
    assert pushing.wait(10.0) == 0
    assert operator.status("--join", address) == (UNREACHABLE, {})
    assert operator.status(*operator.to("w0", "w1")) == (0, both)
