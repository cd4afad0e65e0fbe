"""An ``LLM`` that is a Ray actor, and a publisher that reaches it by its client."""

import importlib.util
import json
from pathlib import Path

import pytest
import ray_apart
from engines import PROMPTS

pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(400)]

HOST = Path(__file__).parent / "live" / "ray_host.py"
ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="module")
def run(models):
    """Run all steps in one Ray; return what they came to, and what was left of it."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: tests/make_env.py ENV")
    if reason := ray_apart.why_not():
        pytest.skip(reason)
    checkpoint = models / "B" / "model.safetensors"
    steps = (HOST, models / "A", checkpoint, PROMPTS[0])
    output, left = ray_apart.run(*steps, timeout_s=360, env=ENV)
    return json.loads(output.splitlines()[-1]) | {"left": left}


def test_a_publisher_takes_an_actor_from_one_version_to_the_next(run, fresh):
    assert run["update"] == {
        "before": fresh["A"][0],
        "outcomes": ["committed"],
        "after": fresh["B"][0],
        "label": "b",
    }


def test_exception_of_an_actor_reaches_the_publisher(run):
    said = run["refusals"]["foreign"]
    assert said["type"] == "RemoteError"
    assert "ValueError: init_info names no publisher of wtransfer" in said["text"]
    assert "no verified update was there to commit" in run["refusals"]["ended"]["text"]


def test_an_actor_that_is_busy_for_too_long_is_named_and_not_waited_for(run):
    said = run["refusals"]["late"]
    assert said["type"] == "StallError"
    assert "did not answer start_weight_update within 0.5 s" in said["text"]
    assert said["text"].startswith("Ray Actor(LLM, ")


def test_an_actor_knows_that_it_is_on_the_publishers_node(run):
    assert run["refusals"]["is_local"] is True


def test_an_actor_that_died_is_named_within_the_deadline(run):
    published, joined = run["killed"]["published"], run["killed"]["joined"]
    assert (published["in_time"], joined["in_time"]) == (True, True)
    assert joined["type"] == "PeerLostError"
    assert joined["text"].startswith(f"{run['killed']['name']} is gone: ActorDiedError: ")
    assert published["type"] in {"PeerLostError", "RoundAbortedError", "NoWorkersError"}


def test_ray_leaves_nothing_behind(run):
    assert run["left"] == []
