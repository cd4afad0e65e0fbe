"""A live vLLM server with two data-parallel replicas behind one address."""

import httpx
import pytest
import server as servers
import wtransfer
from engines import PROMPTS, RANKS_ENV, until
from wtransfer.weight_sync.http.client import HttpClient

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(models, tmp_path_factory):
    """A server of model A, twice."""
    with pytest.MonkeyPatch.context() as patch:
        # Twice the processes of one replica, on as many cores.
        patch.setattr(servers, "START_S", 500.0)
        started = servers.Server(
            tmp_path_factory.mktemp("server"),
            models / "A",
            "shm",
            env=RANKS_ENV,
            more=("--data-parallel-size", "2"),
        )
    yield started
    started.close()


@pytest.fixture
def tokens(server):
    """Asks each replica, by vLLM's own header; returns what they say."""

    def tokens():
        return [_tokens(server.url, replica) for replica in range(2)]

    return tokens


def _tokens(url, replica):
    body = {
        "model": "tiny",
        "prompt": PROMPTS,
        "max_tokens": 16,
        "temperature": 0,
        "return_token_ids": True,
    }
    header = {"X-data-parallel-rank": str(replica)}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=header, timeout=60.0)
    return [choice["token_ids"] for choice in answer.raise_for_status().json()["choices"]]


def states(publisher):
    return [(each.version, each.state) for each in publisher.workers()]


def test_an_update_reaches_both_replicas(server, tokens, weights, fresh):
    assert HttpClient(server.url).get_world_size() == 2
    assert tokens() == [fresh["A"]] * 2
    held = dict(weights["B"])
    with wtransfer.Publisher(held, hosts=[server.url], deadline_s=20) as publisher:
        # Both are there as soon as the publisher is: none is left out of its first round.
        assert len({each.instance for each in publisher.workers()}) == 2
        for name in ("B", "A"):
            held.update(weights[name])
            report = publisher.publish(name)
            assert [worker.outcome for worker in report.workers] == ["committed"] * 2
            assert tokens() == [fresh[name]] * 2
            assert server.label() == name


def test_both_replicas_lose_their_label_in_sleep_and_have_it_again_awake(
    server, tokens, weights, fresh
):
    with wtransfer.Publisher(weights["B"], hosts=[server.url], deadline_s=20) as publisher:
        assert publisher.publish("b").ok
        httpx.post(f"{server.url}/sleep", params={"level": "2"}, timeout=60).raise_for_status()
        assert server.label() == "empty"
        assert {each.version for each in publisher.workers()} == {None}
        httpx.post(f"{server.url}/wake_up", timeout=60).raise_for_status()
        # One after the other; whichever was tried in sleep is tried again.
        until(lambda: states(publisher) == [("b", "serving")] * 2, timeout_s=60.0)
        assert server.label() == "b"
        assert tokens() == [fresh["B"]] * 2
