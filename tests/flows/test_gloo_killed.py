"""FAULTS 12, 13 and 16 for engine ``gloo``: a rank is killed, at any point of a round."""

from __future__ import annotations

import itertools
import time

import pytest

from wtransfer.transport.address import random_address

BEFORE_COMMIT = [
    pytest.param("plan", 2, marks=pytest.mark.slow),
    pytest.param("transfer", 0, marks=pytest.mark.slow),
    ("midst", 0),
    pytest.param("midst", 2, marks=pytest.mark.slow),
    pytest.param("prepare", 0, marks=pytest.mark.slow),
]
# What breaks in the middle of a bucket is kept until gloo's time-out.
OPTIONS = {"packed_buffer_size_bytes": 1 << 20, "timeout_s": 4.0}


@pytest.fixture(autouse=True)
def larger_than_any_socket_buffer(flow):
    """Let updates be so large that a broadcast waits for whoever does not read."""
    flow.size = {"num_tensors": 12, "numel": 1 << 18}  # 12 MiB in buckets of one


@pytest.fixture
def home():
    """Where a trainer listens, and listens again after a restart."""
    return {"listen": random_address(), "token": "a token of these tests"}


@pytest.fixture
def serving(flow, home):
    """A trainer, and three workers that have its first version."""
    trainer = flow.trainer(engine="gloo", options=OPTIONS, **home)
    workers = flow.workers(3)
    trainer.ask("wait", n=3)
    # Twice: from then on two pieces of memory take turns.
    for _ in range(2):
        assert trainer.ask("publish", number=1)["ok"]
    return trainer, workers


@pytest.mark.parametrize(("phase", "place"), BEFORE_COMMIT)
def test_a_worker_killed_before_the_commit_is_named_and_the_rest_go_on(
    flow, failing, serving, phase, place
):
    trainer, workers = serving
    holdings = [each.holdings() for each in (trainer, *workers)]
    victim = workers[place]
    round_id, killed_at = flow.killed_in(trainer, victim, phase)
    with failing("PeerLostError") as lost:
        trainer.answer()
    assert lost.ended - killed_at < 1
    assert (victim.name, round_id, "v2") == (lost.worker, lost.round_id, lost.version)
    rest = [worker for worker in workers if worker is not victim]
    flow.serve(rest, 1, killed_at)
    late = flow.worker()
    flow.publish(trainer, 3, [*rest, late])
    flow.publish(trainer, 4, [*rest, late])
    del holdings[1 + place]
    # C3: what the fault has cost was given back within five seconds.
    left_over = flow.left_over(holdings, lambda: [p.holdings() for p in (trainer, *rest)])
    assert not any(left_over), left_over


def test_a_worker_killed_while_the_group_forms_is_named(flow, failing):
    trainer = flow.trainer(engine="gloo", options=OPTIONS)
    survivors = flow.workers(2)
    victim = flow.worker()
    trainer.ask("wait", n=3)
    _, killed_at = flow.killed_in(trainer, victim, "init", number=1)
    with failing("PeerLostError") as lost:
        trainer.answer()
    assert lost.ended - killed_at < 1
    assert (victim.name, "init") == (lost.worker, lost.phase)
    for worker in survivors:
        flow.holds(worker, 0)
    flow.publish(trainer, 2, survivors)


@pytest.mark.parametrize("phase", ["commit", pytest.param("vote", marks=pytest.mark.slow)])
def test_a_worker_killed_at_its_commit_leaves_the_group_mixed(flow, serving, phase):
    trainer, workers = serving
    *rest, victim = workers
    _, killed_at = flow.killed_in(trainer, victim, phase)
    report = trainer.answer()
    assert trainer.ended - killed_at < 1
    assert (report["outcome"], report["ok"]) == ("mixed", False)
    assert report["workers"][victim.name]["outcome"] == "lost"
    for worker in rest:
        flow.holds(worker, 2)
    flow.publish(trainer, 3, rest)


@pytest.mark.parametrize("phase", ["midst", pytest.param("prepare", marks=pytest.mark.slow)])
def test_whom_the_group_still_needs_is_not_dropped_and_others_are(flow, failing, phase):
    trainer = flow.trainer(engine="gloo", options=OPTIONS, on_lost_worker="drop")
    *rest, victim = flow.workers(3)
    trainer.ask("wait", n=3)
    assert trainer.ask("publish", number=1)["ok"]
    flow.held_in(trainer, victim, phase)
    if phase == "prepare":
        # Its bytes have arrived: only its vote is missing.
        flow.until(lambda: trainer.phase == "prepare")
    trainer.order("result")
    killed_at = victim.kill()
    if phase == "prepare":
        report = trainer.answer()
        assert report["workers"][victim.name]["outcome"] == "dropped"
        for worker in rest:
            flow.holds(worker, 2)
    else:
        with failing("PeerLostError") as lost:
            trainer.answer()
        assert victim.name == lost.worker
        flow.serve(rest, 1, killed_at)
    flow.publish(trainer, 3, rest)


@pytest.mark.parametrize(
    "phase",
    [
        "midst",
        *(
            pytest.param(p, marks=pytest.mark.slow)
            for p in ("plan", "transfer", "prepare", "commit")
        ),
    ],
)
def test_a_trainer_killed_leaves_its_workers_serving_and_its_successor_finds_them(
    flow, home, serving, phase
):
    trainer, workers = serving
    flow.held_in(trainer, trainer, phase)
    killed_at = trainer.kill()
    flow.serve(workers, 1, killed_at)
    successor = flow.trainer(engine="gloo", options=OPTIONS, **home)
    flow.publish(successor, 3, workers)


BUCKETS_THAT_TAKE_TIME = {"packed_buffer_size_bytes": 16 << 20, "timeout_s": 2.0}


def killed_in_transfer(flow, victim, moments):
    """Kill a process so many milliseconds after a transfer has begun; return whether it ran."""
    flow.until(lambda: victim.phase in ("transfer", "midst"))
    time.sleep(next(moments))
    victim.kill()
    return victim.phase in ("transfer", "midst")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_kills", "least_hits"), [(3, 1), pytest.param(8, 5, marks=pytest.mark.nightly)]
)
def test_of_a_trainer_killed_while_a_bucket_travels_nothing_is_left_after_five_seconds(
    flow, home, num_kills, least_hits
):
    flow.size = {"num_tensors": 16, "numel": 1 << 20}  # 64 MiB
    nbytes = 64 << 20
    workers = []
    moments = itertools.cycle([0.0, 0.004, 0.009, 0.015, 0.022, 0.03])
    num_hits = 0
    for _ in range(num_kills):
        trainer = flow.trainer(engine="gloo", options=BUCKETS_THAT_TAKE_TIME, **home)
        workers = workers or flow.workers(2)
        trainer.ask("wait", n=2)
        if not num_hits:
            # And the thread of the engine, which the first round starts.
            threads = [worker.holdings()["threads"] + 1 for worker in workers]
        # Twice: from then on two pieces of memory take turns.
        for _ in range(2):
            assert trainer.ask("publish", number=1)["ok"]
        resident = [worker.resident_nbytes() for worker in workers]
        trainer.ask("begin", number=2)
        num_hits += killed_in_transfer(flow, trainer, moments)
        for place, worker in enumerate(workers):
            worker.ask("until_free", within_s=1)
            # They are reached by Unix sockets: these are the group's and its meeting's.
            wanted = ([], threads[place])
            assert wanted == flow.settled(
                lambda worker=worker: (worker.tcp_sockets(), worker.holdings()["threads"]), wanted
            )
            assert worker.resident_nbytes() - resident[place] < nbytes // 2
    assert num_hits >= least_hits


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [4, pytest.param(8, marks=pytest.mark.nightly)])
def test_of_a_worker_killed_while_a_bucket_travels_nothing_is_left_in_the_others(
    flow, failing, home, num_kills
):
    flow.size = {"num_tensors": 16, "numel": 1 << 20}  # 64 MiB
    trainer = flow.trainer(engine="gloo", options=BUCKETS_THAT_TAKE_TIME, **home)
    stays = flow.worker()
    moments = itertools.cycle([0.0, 0.004, 0.009, 0.015, 0.022, 0.03])
    seen = []
    for number in range(1, num_kills + 1):
        victim = flow.worker()
        trainer.ask("wait", n=2)
        for _ in range(2):
            flow.publish(trainer, 3 * number, [stays, victim])
        # With a group of two, as at the end with one; what the first one needed is there.
        seen = seen or [trainer.holdings(), stays.holdings()]
        trainer.ask("begin", number=3 * number + 1)
        if killed_in_transfer(flow, victim, moments):
            with failing("PeerLostError") as lost:
                trainer.ask("result")
            assert victim.name == lost.worker
    flow.publish(trainer, 3 * num_kills + 3, [stays])
    left_over = flow.left_over(seen, lambda: [trainer.holdings(), stays.holdings()])
    assert not any(left_over), left_over
