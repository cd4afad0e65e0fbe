"""FAULTS 12: a worker is killed, at any point."""

from __future__ import annotations

import statistics

import pytest

BEFORE_COMMIT = ["plan", "transfer", "prepare"]


@pytest.fixture
def serving(flow):
    """A trainer, and two workers that have its first version."""
    trainer = flow.trainer()
    survivor, victim = flow.workers(2)
    trainer.ask("wait", n=2)
    assert trainer.ask("publish", number=1)["ok"]
    return trainer, survivor, victim


@pytest.mark.parametrize("phase", BEFORE_COMMIT)
def test_before_the_commit_all_stay_and_the_next_round_works(flow, failing, serving, phase):
    trainer, survivor, victim = serving
    before = survivor.look()
    round_id, killed_at = flow.killed_in(trainer, victim, phase)
    with failing("PeerLostError") as lost:
        trainer.answer()
    assert lost.ended - killed_at < 1
    assert (victim.name, round_id, "v2") == (lost.worker, lost.round_id, lost.version)
    assert victim.name in lost.error.text
    survivor.ask("until_free", within_s=1)
    after = survivor.look()
    assert {1} == set(after["numbers"])
    assert before["fingerprint"] == after["fingerprint"]
    flow.publish(trainer, 3, [survivor, flow.worker()])


def test_while_its_engine_is_made_the_round_ends_and_the_next_one_works(flow, failing):
    trainer = flow.trainer()
    survivor, victim = flow.workers(2)
    trainer.ask("wait", n=2)
    _, killed_at = flow.killed_in(trainer, victim, "init", number=1)
    with failing("PeerLostError") as lost:
        trainer.answer()
    assert lost.ended - killed_at < 1
    assert (victim.name, "init") == (lost.worker, lost.phase)
    look = survivor.look()
    assert (None, {0}, None) == (look["version"], set(look["numbers"]), look["staging"])
    flow.publish(trainer, 2, [survivor, flow.worker()])


def test_rounds_that_die_while_engines_are_made_leave_nothing_in_the_trainer(flow, failing):
    trainer = flow.trainer()
    holdings = []
    for number in range(1, 6):
        victim = flow.worker()
        trainer.ask("wait", n=1)
        flow.killed_in(trainer, victim, "init", number)
        with failing("PeerLostError"):
            trainer.answer()
        flow.until(lambda: not trainer.ask("workers"))
        holdings.append(trainer.holdings())
    flow.until(lambda: trainer.holdings() <= holdings[0], timeout_s=5)


@pytest.mark.parametrize("phase", ["vote", "commit"])
def test_after_the_first_commit_the_rest_go_on_and_the_group_is_mixed(flow, serving, phase):
    trainer, survivor, victim = serving
    _, killed_at = flow.killed_in(trainer, victim, phase)
    report = trainer.answer()
    assert trainer.ended - killed_at < 1
    assert (report["outcome"], report["ok"]) == ("mixed", False)
    outcomes = {name: each["outcome"] for name, each in report["workers"].items()}
    assert {survivor.name: "committed", victim.name: "lost"} == outcomes
    assert victim.name in report["workers"][victim.name]["error"]["text"]
    flow.holds(survivor, 2)
    flow.publish(trainer, 3, [survivor, flow.worker()])


@pytest.mark.parametrize("phase", BEFORE_COMMIT)
def test_the_rest_commit_where_lost_workers_may_be_dropped(flow, phase):
    trainer = flow.trainer(on_lost_worker="drop")
    survivor, victim = flow.workers(2)
    trainer.ask("wait", n=2)
    trainer.ask("publish", number=1)
    _, killed_at = flow.killed_in(trainer, victim, phase)
    report = trainer.answer()
    assert trainer.ended - killed_at < 1
    assert (
        report["outcome"],
        report["workers"][victim.name]["outcome"],
    ) == ("committed", "dropped")
    assert victim.name in report["text"]
    flow.holds(survivor, 2)
    flow.publish(trainer, 3, [survivor, flow.worker()])


def test_the_last_worker_is_not_dropped(flow, failing):
    trainer = flow.trainer(on_lost_worker="drop")
    victim = flow.worker()
    trainer.ask("wait", n=1)
    flow.killed_in(trainer, victim, "transfer", number=1)
    with failing("PeerLostError"):
        trainer.answer()
    flow.publish(trainer, 2, [flow.worker()])


def test_a_restarted_worker_says_what_it_has_and_is_brought_up_to_date(flow, serving):
    trainer, _, victim = serving
    victim.kill()
    restarted = flow.worker(auto=False)
    trainer.ask("wait", n=2)
    info = next(each for each in trainer.ask("workers") if each["worker"] == restarted.name)
    assert info["version"] is None
    assert info["fingerprint"].startswith("local:")
    assert info["state"] in ("fresh", "pending")
    restarted.ask("set", auto=True)
    flow.holds(restarted, 1)


def test_a_killed_worker_is_noticed_within_a_second(flow, failing):
    trainer = flow.trainer()
    seconds = []
    for number in range(1, 12):
        victim = flow.worker()
        trainer.ask("wait", n=1)
        _, killed_at = flow.killed_in(trainer, victim, "transfer", number)
        with failing("PeerLostError") as lost:
            trainer.answer()
        seconds.append(lost.ended - killed_at)
    print(f"killed worker, end of the round: median {statistics.median(seconds) * 1e3:.1f} ms")  # noqa: T201
    assert max(seconds) < 1
