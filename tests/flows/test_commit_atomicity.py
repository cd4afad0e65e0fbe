"""FAULTS 16: somebody is killed between "all verified" and the last commit."""

from __future__ import annotations

import pytest

from wtransfer.transport.address import random_address


@pytest.fixture
def home():
    """Where a trainer listens, and listens again after a restart."""
    return {"listen": random_address(), "token": "a token of these tests"}


def whole(worker):
    """Return the one version that a worker has, after checking that it is whole."""
    look = worker.look()
    (number,) = set(look["numbers"])
    assert look["version"] == (f"v{int(number)}" if number else None)
    return number


def test_a_trainer_killed_between_two_commits_leaves_a_group_that_shows_as_mixed(flow, home):
    trainer = flow.trainer(**home)
    workers = flow.workers(2)
    trainer.ask("wait", n=2)
    trainer.ask("publish", number=1)
    trainer.witness.hold("between")
    trainer.ask("begin", number=2)
    trainer.until_held()
    flow.until(lambda: {1, 2} == {whole(worker) for worker in workers})
    trainer.kill()
    for worker in workers:
        worker.ask("until_free", within_s=10)
    # Forward for whom the commit has reached, the old version for the other: both whole.
    assert {1, 2} == {whole(worker) for worker in workers}
    successor = flow.trainer(**home)
    successor.ask("wait", n=2)
    assert {"v1", "v2"} == {each["version"] for each in successor.ask("workers")}
    assert successor.ask("publish", number=3)["ok"]
    for worker in workers:
        flow.holds(worker, 3)


@pytest.fixture
def pair(flow):
    """A trainer, and the two ranks of one instance, which have its first version."""

    def make(**options):
        trainer = flow.trainer(**options)
        ranks = [flow.worker(instance="pair", rank=rank, num_ranks=2) for rank in range(2)]
        trainer.ask("wait", n=1)
        assert trainer.ask("publish", number=1)["ok"]
        return trainer, ranks

    return make


def outcomes(report):
    return {name: each["outcome"] for name, each in report["workers"].items()}


@pytest.mark.parametrize("phase", [pytest.param("vote", marks=pytest.mark.slow), "commit"])
def test_a_rank_goes_back_when_another_one_is_killed_in_the_commit(flow, pair, phase):
    trainer, (first, second) = pair()
    second.witness.hold(phase)
    trainer.ask("begin", number=2)
    second.until_held()
    # It has applied and waits for the other rank: no step may run between.
    flow.until(lambda: first.phase == "commit")
    second.kill()
    report = trainer.ask("result")
    assert {first.name: "reverted", second.name: "lost"} == outcomes(report)
    assert whole(first) == 1
    restarted = flow.worker(instance="pair", rank=1, num_ranks=2)
    trainer.ask("wait", n=1)
    assert trainer.ask("publish", number=3)["ok"]
    for rank in (first, restarted):
        flow.holds(rank, 3)


@pytest.mark.parametrize("commits", ["one rank was told", "both ranks were told"])
def test_ranks_go_back_together_when_the_trainer_dies_before_they_are_released(
    flow, pair, home, commits
):
    trainer, ranks = pair(**home)
    if commits == "one rank was told":
        trainer.witness.hold("between")
        trainer.ask("begin", number=2)
        trainer.until_held()
    else:
        ranks[1].witness.hold("commit")
        trainer.ask("begin", number=2)
        ranks[1].until_held()
    flow.until(lambda: "commit" in {rank.phase for rank in ranks})
    trainer.kill()
    for rank in ranks:
        rank.go_on()
    flow.until(lambda: [whole(rank) for rank in ranks] == [1, 1])
    successor = flow.trainer(**home)
    successor.ask("wait", n=1)
    assert successor.ask("publish", number=3)["ok"]
    for rank in ranks:
        flow.holds(rank, 3)


def test_a_rank_that_is_killed_after_its_commit_takes_the_other_one_back_with_it(flow, pair):
    trainer, (first, second) = pair()
    second.witness.hold("commit")
    trainer.ask("begin", number=2)
    second.until_held()
    flow.until(lambda: trainer.ask("acks") == 1)
    first.kill()
    flow.until(lambda: len(trainer.ask("workers")) == 1)
    second.go_on()
    report = trainer.ask("result")
    assert outcomes(report) == {first.name: "lost", second.name: "reverted"}
    flow.until(lambda: whole(second) == 1)
