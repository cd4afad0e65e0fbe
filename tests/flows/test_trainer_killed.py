"""FAULTS 13: the trainer is killed, at any point. FAULTS 11: it comes back under its address."""

from __future__ import annotations

import statistics

import pytest

from wtransfer.transport.address import random_address


@pytest.fixture
def home():
    """Where a trainer listens, and listens again after a restart."""
    return {"listen": random_address(), "token": "a token of these tests"}


@pytest.fixture
def serving(flow, home):
    """A trainer, and two workers that have its first version."""
    trainer = flow.trainer(**home)
    workers = flow.workers(2)
    trainer.ask("wait", n=2)
    assert trainer.ask("publish", number=1)["ok"]
    return trainer, workers


def restart(flow, home, number, workers):
    """Start the trainer anew; its workers find it by themselves."""
    trainer = flow.trainer(**home)
    trainer.ask("wait", n=len(workers))
    report = trainer.ask("publish", number=number)
    assert report["ok"], report["text"]
    for worker in workers:
        assert report["fingerprint"] == flow.holds(worker, number)["fingerprint"]


@pytest.mark.parametrize(
    "phase",
    [
        "init",
        "transfer",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("plan", "prepare", "commit")),
    ],
)
def test_workers_end_the_round_serve_on_and_find_the_next_trainer(flow, home, serving, phase):
    trainer, workers = serving
    before = [worker.look() for worker in workers]
    if phase == "init":
        # Only the first round of a trainer has this phase.
        trainer.end()
        trainer = flow.trainer(**home)
        trainer.ask("wait", n=2)
    trainer.witness.hold(phase)
    trainer.ask("begin", number=2)
    trainer.until_held()
    killed_at = trainer.kill()
    for worker, old in zip(workers, before, strict=True):
        assert worker.ask("until_free", within_s=5) - killed_at < 1
        look = worker.look()
        assert {1} == set(look["numbers"])
        assert ("v1", old["fingerprint"]) == (look["version"], look["fingerprint"])
    restart(flow, home, 3, workers)


@pytest.mark.parametrize(
    "phase", ["transfer", *(pytest.param(p, marks=pytest.mark.slow) for p in ("plan", "prepare"))]
)
def test_a_worker_in_the_midst_of_a_phase_ends_it_too(flow, home, serving, phase):
    trainer, workers = serving
    slow = workers[0]
    slow.witness.hold(phase)
    trainer.ask("begin", number=2)
    slow.until_held()
    killed_at = trainer.kill()
    assert slow.ask("until_free", within_s=5) - killed_at < 1
    slow.go_on()
    for worker in workers:
        look = worker.look()
        assert ("v1", {1}) == (look["version"], set(look["numbers"]))
    restart(flow, home, 3, workers)


def test_a_new_trainer_takes_over_the_dead_round_of_the_old_one(flow, home, serving):
    trainer, workers = serving
    workers[0].witness.hold("transfer")
    dead = trainer.ask("begin", number=2)
    workers[0].until_held()
    assert workers[0].look()["staging"] == dead
    trainer.kill()
    # The worker's engine is still at work on the dead round when the new trainer comes.
    successor = flow.trainer(**home)
    successor.ask("wait", n=2)
    successor.ask("begin", number=3)
    workers[0].go_on()
    report = successor.ask("result")
    assert report["ok"], report["text"]
    for worker in workers:
        flow.holds(worker, 3)


@pytest.mark.slow
def test_a_killed_trainer_is_noticed_within_a_second(flow, home):
    trainer = flow.trainer(**home)
    worker = flow.worker()
    seconds = []
    for number in range(1, 10):
        trainer.ask("wait", n=1)
        trainer.witness.hold("transfer")
        trainer.ask("begin", number=number)
        trainer.until_held()
        killed_at = trainer.kill()
        seconds.append(worker.ask("until_free", within_s=5) - killed_at)
        trainer = flow.trainer(**home)
    print(f"killed trainer, worker free: median {statistics.median(seconds) * 1e3:.1f} ms")  # noqa: T201
    assert max(seconds) < 1
    restart_number = 10
    trainer.ask("wait", n=1)
    assert trainer.ask("publish", number=restart_number)["ok"]


@pytest.mark.slow
def test_a_worker_that_lives_through_many_trainers_keeps_nothing_of_them(flow, home):
    flow.trainer(**home)
    worker = flow.worker()
    flow.puppets[0].kill()
    seen = []
    for number in range(1, 9):
        trainer = flow.trainer(**home)
        trainer.ask("wait", n=1)
        trainer.ask("publish", number=number)
        trainer.witness.hold("prepare")
        trainer.ask("begin", number=100)
        trainer.until_held()
        trainer.kill()
        worker.ask("until_free", within_s=5)
        seen.append(worker.holdings())
    # The second trainer's first round is what a worker holds in daily life.
    flow.until(lambda: worker.holdings() <= seen[1], timeout_s=5)
