"""The seed era's engine on a live model, called as that time's worker calls it."""

import time

import pytest
import wtransfer
from engines import PROMPTS, Engine, await_commit, report_of

# `test_old_vllm.py` has a vLLM of that time.
pytestmark = [pytest.mark.live, pytest.mark.nightly, pytest.mark.timeout(300)]


def publish(publisher, engine, version):
    round_ = publisher.publish(version, wait=False)
    await_commit(round_)
    outcome = engine.do("seed_update", {})
    return outcome, report_of(round_).workers[0].outcome


@pytest.fixture
def engine(models, tmp_path):
    engine = Engine(tmp_path, model=str(models / "A"))
    yield engine
    engine.close()


def test_the_oldest_shape_commits_in_update_weights_and_restores(engine, weights, fresh):
    held = dict(weights["B"])
    with wtransfer.Publisher(held, deadline_s=10) as publisher:
        where = {"address": publisher.address, "token": publisher.token}
        engine.do("seed_join", {"wtransfer": where})
        publisher.wait_for_workers(1, timeout_s=20)
        # Without a round of ours nothing changes.
        assert engine.do("seed_update", {})["error"] == "no verified update was there to commit"
        assert engine.tokens(PROMPTS) == fresh["A"]
        for name in ("B", "A"):
            held.update(weights[name])
            outcome, receipt = publish(publisher, engine, name)
            assert (outcome["version"], outcome["error"], receipt) == (name, None, "committed")
            assert engine.tokens(PROMPTS) == fresh[name]
        for at in range(0, len(weights["A"]), 3):
            held.update(weights["B"])
            engine.do("rpc", "break_loader", at)
            outcome, receipt = publish(publisher, engine, f"broken-{at}")
            assert (outcome["version"], receipt) == ("A", "restored")
            assert engine.tokens(PROMPTS[:1]) == fresh["A"][:1]
            catch_up(engine)
            assert engine.tokens(PROMPTS[:1]) == fresh["B"][:1]
            held.update(weights["A"])
            publish(publisher, engine, "A")


def catch_up(engine):
    """Commit what the publisher sends to a worker that is behind, without being asked."""
    limit = time.monotonic() + 20
    while not engine.do("seed_update", {})["applied"]:
        assert time.monotonic() < limit
