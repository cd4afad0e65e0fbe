"""A live vLLM server: over its own HTTP routes, while it streams."""

import json
import subprocess
import sys
import time

import pytest
import wtransfer
from engines import PROMPTS
from server import Server
from sources import HalfwaySource, pause
from stream import Stream
from wtransfer.engines.clients import HttpClient
from wtransfer.errors import RemoteError

pytestmark = [pytest.mark.live, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    """A server of model A."""
    server = Server(tmp_path_factory.mktemp("server"), models / "A", "shm")
    yield server
    server.close()


def test_over_http_the_server_takes_an_update_and_the_old_weights_again(server, weights, fresh):
    held = dict(weights["B"])
    assert server.tokens(PROMPTS) == fresh["A"]
    with wtransfer.Publisher(held, hosts=[server.url], deadline_s=10) as publisher:
        for name in ("B", "A"):
            held.update(weights[name])
            stream = Stream(server.url, PROMPTS[0], 150)
            report = publisher.publish(name)
            # The first request runs on; what comes after it must see nothing of its old KV.
            assert server.tokens(PROMPTS) == fresh[name]
            stream.end()
            assert stream.ended_by == "length"
            assert [worker.outcome for worker in report.workers] == ["committed"]
            assert server.label() == name


def test_a_checkpoint_is_pushed_from_the_command_line(server, models, fresh):
    for name in ("B", "A"):
        push = ["push", str(models / name), "--to", server.url, "--label", name, "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "wtransfer", *push], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["outcome"] == "committed"
        assert server.tokens(PROMPTS) == fresh[name]


def test_the_server_streams_while_a_transfer_takes_its_time(server, weights, record_property):
    slow = HalfwaySource(weights["B"], pause)
    with wtransfer.Publisher(slow, hosts=[server.url], deadline_s=10) as publisher:
        stream = Stream(server.url, PROMPTS[1], 400)
        begun = time.monotonic()
        publisher.publish("slow")
        ended = time.monotonic()
        at = stream.end()
    during = [when for when in at if begun < when < ended]
    gaps = stream.gaps()
    record_property("longest_gap_s", max(gaps))
    print(f"longest gap {max(gaps):.4f} s, median {sorted(gaps)[len(gaps) // 2]:.4f} s")  # noqa: T201
    assert len(during) > 20
    assert max(gaps) < 0.4


def test_the_servers_own_words_reach_who_sends_another_trainers_init(server):
    with pytest.raises(RemoteError, match="names no publisher of wtransfer"):
        HttpClient(server.url).init_weight_transfer_engine({"master_address": "127.0.0.1"})


def test_a_stream_is_read_to_its_end_whatever_characters_the_model_writes(server):
    # What a request repeats of its prompt stands for what a random model may come to write.
    written = "next line \u0085, line \u2028 and paragraph \u2029"
    stream = Stream(server.url, written, 8, echo=True)
    stream.end()
    assert stream.text.startswith(written)
    assert stream.ended_by == "length"


def test_a_stream_that_the_server_refuses_says_so(server):
    with pytest.raises(AssertionError, match="does-not-exist"):
        Stream(server.url, PROMPTS[1], 8, model="does-not-exist")
