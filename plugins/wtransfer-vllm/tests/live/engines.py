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

from wtransfer.errors import CommitError

HOST = Path(__file__).with_name("host.py")
TRAINER = Path(__file__).with_name("trainer.py")
START_S = 240.0
ANSWER_S = 120.0
NUM_RUNNING = 100
"""Tokens of a request that is to be running at a commit."""
PACE_S = 0.03
"""Length of its steps until then: other processes do not wait for us, and ours may have to wait for
a processor for longer than that many steps take by themselves."""
RANKS_ENV = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""Without it vLLM wants a NUMA node for each rank."""

PROMPTS = [
    "hello world, this is a test " * 9,
    "a short one",
    "another prompt of more than one block, for block sizes up to 128 tokens at least " * 4,
]
"""Longer than one block of the KV cache (32 to 128 tokens on CPU), and shorter."""


def python_path():
    """Return the path by which other processes find what is in this folder."""
    return os.pathsep.join(filter(None, [str(HOST.parent), os.environ.get("PYTHONPATH")]))


class HostError(Exception):
    """What the engine's process raised."""


class Engine:
    """A vLLM engine in a process of its own (or in three).

    The first call waits until it has started: engines that are made one after the other start at
    the same time.
    """

    def __init__(self, folder, *, processes=1, env=None, **options):
        self.log = folder / f"host-{time.monotonic_ns()}.log"
        place = f"wtransfer-vllm-{os.getpid()}-{time.monotonic_ns()}"
        environ = {
            **os.environ,
            "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(processes > 1)),
            "PYTHONPATH": python_path(),
            **(env or {}),
        }
        command = [sys.executable, str(HOST), place, json.dumps(options)]
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"\0{place}")
        self._listener.listen(1)
        self._line = self._stream = None
        # A group of their own: an engine core outlives a host that had to be killed.
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environ, stdout=log, stderr=log, start_new_session=True
            )
        self.before_commit = None

    def wait_started(self):
        """Wait until the engine answers."""
        if self._stream is None:
            self._listener.settimeout(START_S)
            self._line, _ = self._listener.accept()
            self._line.settimeout(START_S)
            self._stream = self._line.makefile("rw")
            self._answer()
            self._line.settimeout(ANSWER_S)

    def _kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def _answer(self):
        text = self._stream.readline()
        if not text:
            raise HostError(f"the engine's process ended:\n{self.log.read_text()[-3000:]}")
        answer = json.loads(text)
        if "error" in answer:
            raise HostError(answer["error"])
        return answer["result"]

    def send(self, name, *arguments):
        self.wait_started()
        print(json.dumps([name, arguments]), file=self._stream, flush=True)

    def do(self, name, *arguments):
        self.send(name, *arguments)
        return self._answer()

    def run_on(self, name, num_steps=2 * NUM_RUNNING):
        """Begin a long request and take some steps; return its tokens so far."""
        self.do("begin", name, PROMPTS[1], NUM_RUNNING)
        return self.do("step", num_steps)["tokens"][name]

    def commit(self, version):
        """Make the two calls of a host; what a test has put before them comes first, once."""
        before, self.before_commit = self.before_commit, None
        if before is not None:
            before()
        self.do("start")
        self.do("finish", version)

    def tokens(self, prompts, max_tokens=16):
        return self.do("generate", prompts, max_tokens)

    def invite(self, publisher):
        self.join(publisher.address, publisher.token)

    def join(self, address, token):
        self.do("init", {"wtransfer": {"address": address, "token": token}})

    def hang_up(self):
        """Let the process end, without waiting for that."""
        if self._stream is not None:
            with contextlib.suppress(OSError):
                self._stream.close()
            self._line.close()

    def close(self):
        self.hang_up()
        if self._stream is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
        self._listener.close()
        self._kill()


class Trainer:
    """A publisher in a process of its own.

    Args:
        name: Its engine's.
        env: Further environment.
        **settings: As the `main` of ``trainer.py`` takes them.
    """

    def __init__(self, name, *, env=None, **settings):
        self.process = subprocess.Popen(
            [sys.executable, str(TRAINER), json.dumps({"engine": name} | settings)],
            env={**os.environ, **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        where = self.hear()
        self.address, self.token = where["address"], where["token"]

    def tell(self, checkpoint, version, halfway=""):
        """Let it begin to publish."""
        order = json.dumps([str(checkpoint), version, halfway])
        print(order, file=self.process.stdin, flush=True)

    def hear(self):
        """Return what it says next."""
        said = self.process.stdout.readline()
        assert said, f"the trainer's process ended with {self.process.wait(20)}"
        return json.loads(said)

    def fail(self, checkpoint, version):
        """Publish what ends before the commit; return the error."""
        self.tell(checkpoint, version)
        assert self.hear() == {"phase": "over"}
        return self.hear()["error"]

    def publish(self, engine, checkpoint, version):
        """Publish to one engine, whose host calls are made here; return the outcomes."""
        self.tell(checkpoint, version)
        assert self.hear() == {"phase": "commit"}
        engine.commit(version)
        return self.hear()["outcomes"]

    def publish_to_hosts(self, checkpoint, version):
        """Publish to the hosts it was started with; return the outcomes."""
        self.tell(checkpoint, version)
        return self.hear()["outcomes"]

    def is_stopped(self):
        """Whether a signal has stopped it."""
        stat = Path(f"/proc/{self.process.pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] == "T"

    def close(self):
        """Let it close its publisher and end."""
        self.process.stdin.close()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self.process.wait(20)
            self.process.stdout.close()


def start_ranks(folder, model, *, env=None, **options):
    """Start an engine of two tensor-parallel ranks."""
    env = RANKS_ENV | (env or {})
    return Engine(folder, processes=4, env=env, model=str(model), tensor_parallel_size=2, **options)


def ask_each(engines, ask):
    """Ask engines, by name; return what they answer, and close them."""
    try:
        return {name: ask(engine) for name, engine in engines.items()}
    finally:
        for engine in engines.values():
            engine.hang_up()
        for engine in engines.values():
            engine.close()


def check_update(engine, publish, tokens, label):
    """Publish beside a running request, and check what is served from then on.

    Args:
        engine: The engine.
        publish: Publishes to it.
        tokens: Those of a fresh engine with the weights that are published, prompt by prompt.
        label: The update's.

    Returns:
        What `publish` returned.
    """
    alone = engine.run_on("alone")

    def run_slowly():
        engine.do("rpc", "pace", PACE_S)
        engine.run_on("running", num_steps=10)

    engine.before_commit = run_slowly
    published = publish()
    engine.do("rpc", "pace", 0)
    # Beside the first request, which runs on: it must see nothing of its old KV.
    engine.do("begin", "after", PROMPTS[0], 16)
    served = engine.do("step", 2 * NUM_RUNNING)["tokens"]
    assert served["after"] == tokens[0]
    # It was running at the commit, and ended on the new weights.
    assert served["running"][:5] == alone[:5]
    assert len(served["running"]) == NUM_RUNNING
    assert served["running"] != alone
    assert (engine.tokens(PROMPTS), engine.do("label")) == (tokens, label)
    return published


def publish(publisher, engine, version):
    """Publish to one engine, whose host calls are made here; return the report."""
    round_ = publisher.publish(version, wait=False)
    await_commit(round_)
    engine.commit(version)
    return round_.result(30)


def report_of(round_):
    """Return the report of a round, also of one that no worker has applied."""
    try:
        return round_.result(20)
    except CommitError as error:
        return error.report


def await_commit(round_):
    limit = time.monotonic() + 30
    while round_.phase != "commit":
        if round_.done or time.monotonic() > limit:
            round_.result(1)
            raise AssertionError(f"no commit in phase {round_.phase}")
        time.sleep(0.002)


def until(condition, timeout_s=30.0):
    """Wait until a condition holds."""
    limit = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < limit, f"not within {timeout_s:g} s"
        time.sleep(0.005)
