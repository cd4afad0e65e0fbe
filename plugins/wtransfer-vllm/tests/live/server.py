"""Hosts in processes of their own: vLLM's server, and a plain worker."""

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

import httpx
from engines import python_path, until
from wtransfer.weight_sync.http.client import HttpClient

START_S = 240.0
ANSWER_S = 60.0


class Server:
    """A server of one model.

    Args:
        folder: Where its log goes.
        model: Path of the model.
        backend: For ``weight_transfer_config``.
        env: Further environment.
        more: Further options.
    """

    def __init__(self, folder, model, backend, env=None, more=()):
        self.log = folder / "server.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        options = {
            "--model": str(model),
            "--served-model-name": "tiny",
            "--dtype": "bfloat16",
            "--max-model-len": "512",
            "--kv-cache-memory-bytes": str(64 << 20),
            "--host": "127.0.0.1",
            "--port": str(port),
            "--weight-transfer-config": json.dumps({"backend": backend}),
            "--worker-extension-cls": "breaking.Breaking",
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        command += [*(word for pair in options.items() for word in pair), *more]
        environ = {
            **os.environ,
            "PYTHONPATH": python_path(),
            "VLLM_SERVER_DEV_MODE": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            **(env or {}),
        }
        self._start(command, environ)

    def _start(self, command, environ):
        self._begun_by = command, environ
        with self.log.open("w") as out:
            # A group of their own: an engine core outlives a front end that had to be killed.
            self.process = subprocess.Popen(
                command, env=environ, stdout=out, stderr=out, start_new_session=True
            )
        try:
            self._await_health()
        except BaseException:
            self.close()
            raise

    def _await_health(self):
        limit = time.monotonic() + START_S
        while time.monotonic() < limit:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.3)
        raise AssertionError(self.log.read_text()[-3000:])

    def tokens(self, prompts, max_tokens=16):
        """Return the tokens that follow each prompt."""
        body = {
            "model": "tiny",
            "prompt": prompts,
            "max_tokens": max_tokens,
            "temperature": 0,
            "return_token_ids": True,
        }
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=ANSWER_S)
        return [choice["token_ids"] for choice in answer.raise_for_status().json()["choices"]]

    def label(self):
        """Return the weights' label, as it says it."""
        return HttpClient(self.url).weight_info()["weight_version"]

    def pace(self, step_s):
        """Let every step of the model take so long at least, from here on."""
        order = {"method": "pace", "args": [step_s]}
        httpx.post(f"{self.url}/collective_rpc", json=order, timeout=ANSWER_S).raise_for_status()

    def kill(self):
        """Kill it and whatever it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)

    def start_again(self):
        """Start it as it was started before, once it has ended."""
        self._start(*self._begun_by)

    def close(self):
        """End it and whatever it started."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.kill()


class ServerOfWords(Server):
    """A server that a line of a guide starts, by its words and a few more.

    Args:
        folder: Where its log goes.
        words: The line.
        env: Further environment.
    """

    def __init__(self, folder, words, env):
        self.log = folder / "server.log"
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        # What the model's size, and other tests, ask for.
        more = f"--port {port} --served-model-name tiny --max-model-len 512 --enforce-eager"
        more += f" --kv-cache-memory-bytes {64 << 20}"
        self._start(["bash", "-c", f"{words} {more}"], environment() | env)


@contextlib.contextmanager
def plain_worker(folder, checkpoint, token):
    """Have a worker serve a checkpoint within the block; gives its address."""
    log = folder / "worker.log"
    address = f"unix:@wtransfer-plain-{os.getpid()}-{time.monotonic_ns()}"
    command = ["worker", "--checkpoint", str(checkpoint), "--listen", address]
    with log.open("w") as out:
        # Unbuffered: its readiness is read from what it prints.
        worker = subprocess.Popen(
            [sys.executable, "-u", "-m", "wtransfer", *command],
            env={**os.environ, "WTRANSFER_TOKEN": token},
            stdout=out,
            stderr=out,
        )
    try:
        until(lambda: "ready" in log.read_text() or worker.poll() is not None, START_S)
        assert worker.poll() is None, log.read_text()
        yield address
    finally:
        worker.terminate()
        worker.wait(20)


def environment():
    """Return an environment in which a guide's commands are found, and little is computed with."""
    found = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": found, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def free_port():
    """Return a port of loopback on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
