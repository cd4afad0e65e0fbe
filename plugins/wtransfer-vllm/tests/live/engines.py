"""What tests do with live engines."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HOST = Path(__file__).with_name("host.py")
TRAINER = Path(__file__).with_name("trainer.py")
START_S = 120.0
ANSWER_S = 60.0

PROMPTS = [
    "hello world, this is a test " * 9,
    "a short one",
    "another prompt of more than one block, for block sizes up to 128 tokens at least " * 4,
]
"""Longer than one block of the KV cache (32 to 128 tokens on CPU), and shorter."""


class HostError(Exception):
    """What the engine's process raised."""


class Engine:
    """A vLLM engine in a process of its own (or in three)."""

    def __init__(self, folder, *, processes=1, env=None, **options):
        self.log = folder / f"host-{time.monotonic_ns()}.log"
        place = f"wtransfer-vllm-{os.getpid()}-{time.monotonic_ns()}"
        environ = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes > 1)),
            "PYTHONPATH": os.pathsep.join(
                filter(None, [str(HOST.parent), os.environ.get("PYTHONPATH")])
            ),
            **(env or {}),
        }
        command = [sys.executable, str(HOST), place, json.dumps(options)]
        with socket.socket(socket.AF_UNIX) as listener, self.log.open("w") as log:
            listener.bind(f"\0{place}")
            listener.listen(1)
            listener.settimeout(START_S)
            # A group of their own: an engine core outlives a host that had to be killed.
            self.process = subprocess.Popen(
                command, env=environ, stdout=log, stderr=log, start_new_session=True
            )
            self._line, _ = listener.accept()
        self._line.settimeout(START_S)
        self._stream = self._line.makefile("rw")
        self._answer()
        self._line.settimeout(ANSWER_S)

    def _answer(self):
        text = self._stream.readline()
        if not text:
            raise HostError(f"the engine's process ended:\n{self.log.read_text()[-3000:]}")
        answer = json.loads(text)
        if "error" in answer:
            raise HostError(answer["error"])
        return answer["result"]

    def send(self, name, *arguments):
        print(json.dumps([name, arguments]), file=self._stream, flush=True)

    def do(self, name, *arguments):
        self.send(name, *arguments)
        return self._answer()

    def tokens(self, prompts, max_tokens=16):
        return self.do("generate", prompts, max_tokens)

    def invite(self, publisher):
        self.join(publisher.address, publisher.token)

    def join(self, address, token):
        self.do("init", {"wtransfer": {"address": address, "token": token}})

    def close(self):
        with contextlib.suppress(OSError):
            self._stream.close()
        self._line.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


class Trainer:
    """A publisher in a process of its own."""

    def __init__(self, name, *, env=None, spoil="", **options):
        self.process = subprocess.Popen(
            [sys.executable, str(TRAINER), name, json.dumps(options), spoil],
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        where = self.hear()
        self.address, self.token = where["address"], where["token"]

    def hear(self):
        return json.loads(self.process.stdout.readline())

    def fail(self, checkpoint, version):
        """Publish what ends before the commit; return the error."""
        print(json.dumps([str(checkpoint), version]), file=self.process.stdin, flush=True)
        assert self.hear() == {"phase": "over"}
        return self.hear()["error"]

    def publish(self, engine, checkpoint, version):
        """Publish to one engine; return the outcomes."""
        print(json.dumps([str(checkpoint), version]), file=self.process.stdin, flush=True)
        assert self.hear() == {"phase": "commit"}
        engine.do("start")
        engine.do("finish", version)
        return self.hear()["outcomes"]

    def close(self):
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


def publish(publisher, engine, version):
    """Publish to one engine, whose host calls are made here; return the report."""
    round_ = publisher.publish(version, wait=False)
    await_commit(round_)
    engine.do("start")
    engine.do("finish", version)
    return round_.result(30)


def await_commit(round_):
    limit = time.monotonic() + 30
    while round_.phase != "commit":
        if round_.done or time.monotonic() > limit:
            round_.result(1)
            raise AssertionError(f"no commit in phase {round_.phase}")
        time.sleep(0.002)
