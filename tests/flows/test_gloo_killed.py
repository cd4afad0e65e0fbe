"""FAULTS 12, 13 and 16 for engine ``gloo``: a rank is killed, at any point of a round."""

from __future__ import annotations

import pytest

from wtransfer.transport.addresses import random_address

BEFORE_COMMIT = [
    pytest.param("plan", 2, marks=pytest.mark.slow),
    pytest.param("transfer", 0, marks=pytest.mark.slow),
    ("midst", 0),
    ("midst", 2),
    ("seal", 0),
]
OPTIONS = {"packed_buffer_size_bytes": 1 << 20}


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


def serve_the_first_version(workers, since):
    for worker in workers:
        assert worker.ask("until_free", within_s=5) - since < 1
        look = worker.look()
        assert ("v1", {1}) == (look["version"], set(look["numbers"]))


def publish_good_round(flow, trainer, number, workers):
    flow.until(lambda: len(trainer.ask("workers")) == len(workers))
    report = trainer.ask("publish", number=number)
    assert report["ok"], report["text"]
    for worker in workers:
        assert report["fingerprint"] == flow.holds(worker, number)["fingerprint"]


@pytest.mark.parametrize(("phase", "place"), BEFORE_COMMIT)
def test_a_worker_killed_before_the_commit_is_named_and_the_rest_go_on(
    flow, failing, serving, phase, place
):
    trainer, workers = serving
    holdings = [each.holdings() for each in (trainer, *workers)]
    victim = workers[place]
    victim.witness.hold(phase)
    round_id = trainer.ask("begin", number=2)
    victim.until_held()
    trainer.order("result")
    killed_at = victim.kill()
    with failing("PeerLostError") as lost:
        trainer.answer()
    assert lost.ended - killed_at < 1
    assert (victim.name, round_id, "v2") == (lost.worker, lost.round_id, lost.version)
    rest = [worker for worker in workers if worker is not victim]
    serve_the_first_version(rest, killed_at)
    late = flow.worker()
    publish_good_round(flow, trainer, 3, [*rest, late])
    publish_good_round(flow, trainer, 4, [*rest, late])
    del holdings[1 + place]
    # C3: what the fault has cost was given back within five seconds.
    left_over = flow.left_over(holdings, lambda: [p.holdings() for p in (trainer, *rest)])
    assert not any(left_over), left_over


def test_a_worker_killed_while_the_group_forms_is_named(flow, failing):
    trainer = flow.trainer(engine="gloo", options=OPTIONS)
    survivors = flow.workers(2)
    victim = flow.worker(hold="init")
    trainer.ask("wait", n=3)
    trainer.ask("begin", number=1)
    victim.until_held()
    trainer.order("result")
    killed_at = victim.kill()
    with failing("PeerLostError") as lost:
        trainer.answer()
    assert lost.ended - killed_at < 1
    assert (victim.name, "init") == (lost.worker, lost.phase)
    for worker in survivors:
        flow.holds(worker, 0)
    publish_good_round(flow, trainer, 2, survivors)


@pytest.mark.parametrize("phase", ["verdict", "commit"])
def test_a_worker_killed_at_its_commit_leaves_the_group_mixed(flow, serving, phase):
    trainer, workers = serving
    *rest, victim = workers
    victim.witness.hold(phase)
    trainer.ask("begin", number=2)
    victim.until_held()
    trainer.order("result")
    killed_at = victim.kill()
    report = trainer.answer()
    assert trainer.ended - killed_at < 1
    assert (report["outcome"], report["ok"]) == ("mixed", False)
    assert report["workers"][victim.name]["outcome"] == "lost"
    for worker in rest:
        flow.holds(worker, 2)
    publish_good_round(flow, trainer, 3, rest)


@pytest.mark.parametrize("phase", ["midst", "seal"])
def test_whom_the_group_still_needs_is_not_dropped_and_others_are(flow, failing, phase):
    trainer = flow.trainer(engine="gloo", options=OPTIONS, on_lost_worker="drop")
    *rest, victim = flow.workers(3)
    trainer.ask("wait", n=3)
    assert trainer.ask("publish", number=1)["ok"]
    victim.witness.hold(phase)
    trainer.ask("begin", number=2)
    victim.until_held()
    if phase == "seal":
        # Its bytes have arrived: only its verdict is missing.
        flow.until(lambda: trainer.phase == "seal")
    trainer.order("result")
    killed_at = victim.kill()
    if phase == "seal":
        report = trainer.answer()
        assert report["workers"][victim.name]["outcome"] == "dropped"
        for worker in rest:
            flow.holds(worker, 2)
    else:
        with failing("PeerLostError") as lost:
            trainer.answer()
        assert victim.name == lost.worker
        serve_the_first_version(rest, killed_at)
    publish_good_round(flow, trainer, 3, rest)


@pytest.mark.parametrize(
    "phase",
    [
        "midst",
        "seal",
        *(pytest.param(p, marks=pytest.mark.slow) for p in ("plan", "transfer", "commit")),
    ],
)
def test_a_trainer_killed_leaves_its_workers_serving_and_its_successor_finds_them(
    flow, home, serving, phase
):
    trainer, workers = serving
    trainer.witness.hold(phase)
    trainer.ask("begin", number=2)
    trainer.until_held()
    killed_at = trainer.kill()
    serve_the_first_version(workers, killed_at)
    successor = flow.trainer(engine="gloo", options=OPTIONS, **home)
    publish_good_round(flow, successor, 3, workers)


def test_workers_keep_nothing_of_trainers_that_were_killed(flow, home):
    trainer = flow.trainer(engine="gloo", options=OPTIONS, **home)
    workers = flow.workers(2)
    seen = []
    for number in range(1, 5):
        trainer.ask("wait", n=2)
        assert trainer.ask("publish", number=number)["ok"]
        seen.append([worker.holdings() for worker in workers])
        trainer.witness.hold("midst")
        trainer.ask("begin", number=100)
        trainer.until_held()
        trainer.kill()
        for worker in workers:
            worker.ask("until_free", within_s=5)
        trainer = flow.trainer(engine="gloo", options=OPTIONS, **home)
    assert seen[1] == seen[-1]


def test_a_second_trainer_is_refused_while_the_first_one_broadcasts(flow, failing):
    home = {"token": "shared", "engine": "gloo", "options": OPTIONS}
    first, second = flow.trainer(**home), flow.trainer(**home)
    worker = flow.worker(trainer=first)
    worker.ask("join", address=second.ask("where")["address"])
    first.ask("wait", n=1)
    second.ask("wait", n=1)
    worker.witness.hold("midst")
    round_id = first.ask("begin", number=1)
    worker.until_held()
    with failing("RoundBusyError") as busy:
        second.ask("publish", number=2)
    assert round_id in busy.error.text
    assert " s old" in busy.error.text
    worker.go_on()
    assert first.ask("result")["ok"]
    flow.holds(worker, 1)
    assert second.ask("publish", number=3)["ok"]
    flow.holds(worker, 3)
