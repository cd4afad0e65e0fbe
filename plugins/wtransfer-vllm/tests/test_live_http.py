"""A live vLLM server: over its own HTTP routes, while it streams."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import httpx
import pytest
import torch
import wtransfer
from engines import PACE_S, PROMPTS, Trainer, until
from server import Server
from sources import HalfwaySource
from stream import Stream, events
from wtransfer.errors import CommitError, NoWorkersError, RemoteError
from wtransfer.testing.fleet import committing
from wtransfer.weight_sync.http.client import HttpClient

from wtransfer_vllm.spans import Span, spans

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

STALL_S = 5.0
"""Silence after which trainer and worker give each other up, where a test waits for it."""


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    """A server of model A."""
    more = ["--enable-scale-out"]
    server = Server(tmp_path_factory.mktemp("server"), models / "A", "shm", more=more)
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


def test_route_for_tokens_answers_with_the_span_of_each_version(server, weights):
    body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
    with wtransfer.Publisher(dict(weights["B"]), hosts=[server.url], deadline_s=10) as publisher:
        report = publisher.publish("b")
    answer = httpx.post(f"{server.url}/inference/v1/generate", json=body, timeout=60)
    (choice,) = answer.raise_for_status().json()["choices"]
    assert spans(choice["weight_versions"]) == [Span(0, 4, "b", report.fingerprint)]


def test_a_checkpoint_is_pushed_from_the_command_line(server, models, fresh):
    for name in ("B", "A"):
        push = ["push", str(models / name), "--to", server.url, "--label", name, "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "wtransfer", *push], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert json.loads(done.stdout)["outcome"] == "committed"
        assert server.tokens(PROMPTS) == fresh[name]


def test_status_of_a_server_is_its_label_and_its_publisher_knows_the_rest(server, weights):
    def status(*place):
        done = subprocess.run(
            [sys.executable, "-m", "wtransfer", "status", *place, "--json"],
            env={**os.environ, "WTRANSFER_TOKEN": publisher.token},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, json.loads(done.stdout)

    with wtransfer.Publisher(dict(weights["B"]), hosts=[server.url], deadline_s=10) as publisher:
        report = publisher.publish("b")
        code, told = status("--join", publisher.address, "--to", server.url)
    assert (code, told["unreachable"]) == (0, {})
    own, joined = told["workers"]
    assert (own["host"], own["version"], own["state"]) == (server.url, "b", None)
    assert (joined["host"], joined["version"], joined["state"]) == (server.url, "b", "serving")
    assert joined["fingerprint"] == told["fingerprint"] == report.fingerprint
    # A label is no proof.
    code, told = status("--to", server.url, "--ready", report.fingerprint)
    assert (code, told["workers"]) == (1, [own])


def test_the_server_streams_while_a_transfer_takes_its_time(server, weights, record_property):
    source = HalfwaySource(weights["B"])
    with wtransfer.Publisher(source, hosts=[server.url], deadline_s=10) as publisher:
        stream = Stream(server.url, PROMPTS[1], 400)
        # The second half is not sent before more tokens have come.
        source.act = lambda: stream.wait_for(min(len(stream.at) + 20, 400))
        begun = time.monotonic()
        publisher.publish("slow")
        ended = time.monotonic()
        stream.end()
    assert stream.ended_by == "length"
    # None where a busy server has sent everything at once.
    gaps, all_gaps = stream.gaps(begun, ended) or [0.0], stream.gaps() or [0.0]
    record_property("longest_gap_s", max(gaps))
    median = sorted(all_gaps)[len(all_gaps) // 2]
    print(f"longest gap {max(gaps):.4f} s during the round, median {median:.4f} s")  # noqa: T201


def test_a_trainer_stopped_halfway_does_not_stop_generation(server, models, fresh, record_property):
    checkpoints = {name: models / name / "model.safetensors" for name in ("A", "B")}
    with closing(Trainer("shm", hosts=[server.url], deadline_s=STALL_S)) as trainer:
        assert trainer.publish_to_hosts(checkpoints["A"], "A") == ["committed"]
        # It cannot be over before the trainer has stopped.
        server.pace(PACE_S)
        running = Stream(server.url, PROMPTS[1], 450)
        trainer.tell(checkpoints["B"], "B", "stop")
        with stopped(trainer) as since:
            server.pace(0)
            gaps = gaps_of_streams(server, running, since, until=since + STALL_S + 1)
            # Whole and old, although half of the new weights lies ready.
            assert (server.tokens(PROMPTS), server.label()) == (fresh["A"], "A")
            assert trainer.is_stopped()
        # Whoever sees it first: the server that heard nothing, or the trainer's own watch.
        assert f" {STALL_S:g} s" in trainer.hear()["error"]
        assert trainer.publish_to_hosts(checkpoints["B"], "B") == ["committed"]
        assert (server.tokens(PROMPTS), server.label()) == (fresh["B"], "B")
    record_property("longest_gap_s", max(gaps))
    print(f"longest gap {max(gaps):.4f} s of {len(gaps)} while the trainer was stopped")  # noqa: T201
    assert max(gaps) < STALL_S


@contextlib.contextmanager
def stopped(trainer):
    """Wait until the trainer has stopped itself; tell since when, and let it go on in the end."""
    try:
        limit = time.monotonic() + 20
        while not trainer.is_stopped():
            assert time.monotonic() < limit
            time.sleep(0.005)
        yield time.monotonic()
    finally:
        trainer.process.send_signal(signal.SIGCONT)


def gaps_of_streams(server, running, since, until):
    """Return the gaps within streams, one after the other, of which the first runs already."""
    running.end()
    gaps = running.gaps(since)
    assert gaps, "no stream ran when the trainer stopped"
    while time.monotonic() < until:
        stream = Stream(server.url, PROMPTS[1], 150)
        stream.end()
        gaps += stream.gaps()
    return gaps


def test_foreign_init_gets_the_workers_error(server):
    with pytest.raises(RemoteError, match="names no publisher of wtransfer"):
        HttpClient(server.url).init_weight_transfer_engine({"master_address": "127.0.0.1"})


def test_publisher_with_another_token_is_refused_and_the_server_stays_as_it_is(server, weights):
    label = server.label()
    with pytest.raises(RemoteError, match="WTRANSFER_TOKEN must be the same in both"):
        wtransfer.Publisher(weights["B"], hosts=[HttpClient(server.url)], token="another")
    # Where the trainer's environment has that token, it does not travel: neither side proves it.
    hosts = [HttpClient(server.url, "another")]
    with pytest.raises(NoWorkersError, match="could not prove that it knows the token"):
        wtransfer.Publisher(weights["B"], hosts=hosts, token="another", deadline_s=5)
    assert server.label() == label


def test_drained_server_takes_no_update_until_it_is_invited_by_hand(server, weights, fresh):
    held = dict(weights["A"])
    plain = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
    with (
        wtransfer.Publisher(held, hosts=[server.url], deadline_s=10) as publisher,
        closing(
            wtransfer.WorkerSession(plain, join=publisher.address, token=publisher.token)
        ) as session,
        committing(session),
    ):
        publisher.wait_for_workers(2)
        assert publisher.publish("a").raise_unless_ok()
        httpx.post(f"{server.url}/shutdown_weight_transfer_engine").raise_for_status()
        until(lambda: len(publisher.workers()) == 1)
        held.update(weights["B"])
        # The round asks the server, which says why it does not come.
        report = publisher.publish("b").raise_unless_ok()
        assert [each.worker for each in report.workers] == [session.status().worker]
        assert (server.tokens(PROMPTS), server.label()) == (fresh["A"], "a")
        publisher.invite()
        assert len(publisher.publish("b-2").raise_unless_ok().workers) == 2
        assert (server.tokens(PROMPTS), server.label()) == (fresh["B"], "b-2")


def test_second_name_of_a_server_is_refused_by_its_first(server, weights):
    other = server.url.replace("127.0.0.1", "localhost")
    with wtransfer.Publisher(weights["A"], hosts=[server.url], deadline_s=10) as publisher:
        with pytest.raises(RemoteError) as refused:
            publisher.invite(other)
        assert f"{other} answered" in str(refused.value)
        assert f"joined this publisher as {server.url}; name it once" in str(refused.value)
        publisher.remove(other)
        assert publisher.publish("a").raise_unless_ok().workers[0].host == server.url


def test_a_stream_is_read_to_its_end_whatever_characters_the_model_writes(server):
    # What a request repeats of its prompt stands for what a random model may come to write.
    written = "next line \u0085, line \u2028 and paragraph \u2029"
    body = {"model": "tiny", "prompt": written, "echo": True, "stream": True}
    body |= {"max_tokens": 8, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as answer:
        told = list(events(answer))
    assert "".join(event["choices"][0]["text"] for event in told).startswith(written)
    assert told[-1]["choices"][0]["finish_reason"] == "length"


def test_a_stream_that_the_server_refuses_says_so(server):
    with pytest.raises(AssertionError, match="does-not-exist"):
        Stream(server.url, PROMPTS[1], 8, model="does-not-exist")


@pytest.mark.nightly
def test_server_without_weights_of_a_version_ends_where_it_is_told_to(models, weights, tmp_path):
    # Dummies are no way back.
    server = Server(
        tmp_path,
        models / "A",
        "shm",
        env={"WTRANSFER_VLLM_ON_EMPTY": "end"},
        more=("--load-format", "dummy"),
    )
    with closing(server):
        order = {"method": "break_loader", "args": [7]}
        httpx.post(f"{server.url}/collective_rpc", json=order, timeout=60).raise_for_status()
        with (
            pytest.raises(CommitError, match="must not serve"),
            wtransfer.Publisher(weights["B"], hosts=[server.url], deadline_s=10) as publisher,
        ):
            publisher.publish("b")
        server.process.wait(60)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{server.url}/health")
        assert (
            "belong to no version, and WTRANSFER_VLLM_ON_EMPTY is 'end'" in server.log.read_text()
        )
