"""A live vLLM server: over its own HTTP routes, while it streams."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time

import httpx
import pytest
import wtransfer
from engines import PROMPTS
from wtransfer.engines.clients import HttpClient
from wtransfer.engines.source import as_source
from wtransfer.errors import RemoteError

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    """URL of a server of model A."""
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    options = {
        "--model": str(models / "A"),
        "--served-model-name": "tiny",
        "--dtype": "bfloat16",
        "--max-model-len": "512",
        "--kv-cache-memory-bytes": str(64 << 20),
        "--host": "127.0.0.1",
        "--port": str(port),
        "--weight-transfer-config": json.dumps({"backend": "shm"}),
    }
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [word for pair in options.items() for word in pair]
    env = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=out)
    try:
        await_health(url, process, log)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def await_health(url, process, log):
    limit = time.monotonic() + 150
    while time.monotonic() < limit:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            if httpx.get(f"{url}/health").status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.3)
    raise AssertionError(log.read_text()[-3000:])


def tokens(url, prompts):
    body = {"model": "tiny", "max_tokens": 16, "temperature": 0, "return_token_ids": True}
    answer = httpx.post(f"{url}/v1/completions", json=body | {"prompt": prompts}, timeout=60)
    return [choice["token_ids"] for choice in answer.raise_for_status().json()["choices"]]


class Stream:
    """A request whose tokens are noted as they come."""

    def __init__(self, url, prompt, max_tokens):
        self.at = []
        self.ended_by = None
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        self._thread = threading.Thread(target=self._read, args=(url, body))
        self._thread.start()
        while len(self.at) < 5:
            time.sleep(0.001)

    def _read(self, url, body):
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    self.at.append(time.monotonic())
                    choice = json.loads(line.removeprefix("data: "))["choices"][0]
                    self.ended_by = choice["finish_reason"]

    def end(self):
        self._thread.join(60)
        return self.at


class SlowSource:
    """Weights that come after a while, so that a transfer takes its time."""

    def __init__(self, weights, seconds):
        self._source = as_source(weights)
        self._seconds = seconds
        self.metadata = self._source.metadata

    def iter_full(self):
        for index, each in enumerate(self._source.iter_full()):
            if index == 5:
                time.sleep(self._seconds)
            yield each


def test_over_http_the_server_takes_an_update_and_the_old_weights_again(server, weights, fresh):
    held = dict(weights["B"])
    assert tokens(server, PROMPTS) == fresh["A"]
    with wtransfer.Publisher(held, hosts=[server], deadline_s=10) as publisher:
        for name in ("B", "A"):
            held.update(weights[name])
            stream = Stream(server, PROMPTS[0], 150)
            report = publisher.publish(name)
            # The first request runs on; what comes after it must see nothing of its old KV.
            assert tokens(server, PROMPTS) == fresh[name]
            stream.end()
            assert stream.ended_by == "length"
            assert [worker.outcome for worker in report.workers] == ["committed"]
            assert HttpClient(server).weight_info() == {"weight_version": name}


def test_a_checkpoint_is_pushed_from_the_command_line(server, models, fresh):
    for name in ("B", "A"):
        push = ["push", str(models / name), "--to", server, "--label", name, "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "wtransfer", *push], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["outcome"] == "committed"
        assert tokens(server, PROMPTS) == fresh[name]


def test_the_server_streams_while_a_transfer_takes_its_time(server, weights, record_property):
    slow = SlowSource(weights["B"], 0.5)
    with wtransfer.Publisher(slow, hosts=[server], deadline_s=10) as publisher:
        stream = Stream(server, PROMPTS[1], 400)
        begun = time.monotonic()
        publisher.publish("slow")
        ended = time.monotonic()
        at = stream.end()
    during = [when for when in at if begun < when < ended]
    gaps = [after - before for before, after in itertools.pairwise(at)]
    record_property("longest_gap_s", max(gaps))
    print(f"longest gap {max(gaps):.4f} s, median {sorted(gaps)[len(gaps) // 2]:.4f} s")  # noqa: T201
    assert len(during) > 20
    assert max(gaps) < 0.4


def test_the_servers_own_words_reach_who_sends_another_trainers_init(server):
    with pytest.raises(RemoteError, match="names no publisher of wtransfer"):
        HttpClient(server).init_weight_transfer_engine({"master_address": "127.0.0.1"})
