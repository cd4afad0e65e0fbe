"""Engine ``gloo`` between real processes: rounds, joiners, leavers, instances of several ranks."""

from __future__ import annotations

import socket

import pytest

NUM_ROUNDS = 20
BUCKET_NBYTES = 1 << 14


@pytest.fixture
def trainer(flow):
    """A trainer whose updates travel in several buckets."""
    return flow.trainer(engine="gloo", options={"packed_buffer_size_bytes": BUCKET_NBYTES})


def publish(flow, trainer, number, workers):
    """Publish to `workers` and check that each of them holds what its receipt says."""
    report = trainer.ask("publish", number=number)
    assert report["ok"], report["text"]
    assert {worker.name for worker in workers} == set(report["workers"])
    for worker in workers:
        receipt = report["workers"][worker.name]
        assert ("committed", f"v{number}") == (receipt["outcome"], receipt["version"])
        assert report["fingerprint"] == receipt["fingerprint"]
        assert report["fingerprint"] == flow.holds(worker, number)["fingerprint"]


@pytest.mark.parametrize("commit", ["adopt", "copy"])
def test_three_workers_take_round_after_round(flow, trainer, commit):
    workers = flow.workers(3, commit=commit)
    trainer.ask("wait", n=3)
    holdings = []
    for number in range(1, NUM_ROUNDS + 1):
        publish(flow, trainer, number, workers)
        holdings.append([each.holdings() for each in (trainer, *workers)])
    # Two pieces of memory that take turns; then nothing grows any more.
    assert holdings[3] == holdings[-1]
    for worker in workers:
        looks = worker.looks()
        assert [f"v{number}" for number in range(1, NUM_ROUNDS + 1)] == [
            version for version, _, _ in looks if version
        ]


def test_workers_come_and_go_between_rounds(flow, trainer):
    first, second = flow.workers(2)
    trainer.ask("wait", n=2)
    publish(flow, trainer, 1, [first, second])
    late = flow.worker()
    trainer.ask("wait", n=3)
    publish(flow, trainer, 2, [first, second, late])
    second.end()
    flow.until(lambda: len(trainer.ask("workers")) == 2)
    publish(flow, trainer, 3, [first, late])
    first.end()
    flow.until(lambda: len(trainer.ask("workers")) == 1)
    publish(flow, trainer, 4, [late])


def test_membership_that_changes_leaves_nothing_behind(flow, trainer):
    stays = flow.worker()
    holdings = []
    for number in range(1, 8, 2):
        guest = flow.worker()
        trainer.ask("wait", n=2)
        publish(flow, trainer, number, [stays, guest])
        guest.end()
        flow.until(lambda: len(trainer.ask("workers")) == 1)
        publish(flow, trainer, number + 1, [stays])
        holdings.append((trainer.holdings(), stays.holdings()))
    left_over = flow.left_over(holdings[1], lambda: (trainer.holdings(), stays.holdings()))
    assert not any(left_over), left_over


def test_two_ranks_of_one_instance_commit_as_one(flow, trainer):
    instances = [
        flow.worker(instance=name, rank=rank, num_ranks=2) for name in "ab" for rank in range(2)
    ]
    trainer.ask("wait", n=2)
    for number in (1, 2):
        publish(flow, trainer, number, instances)


def test_instances_of_different_sizes_are_refused(flow, failing, trainer):
    pair = [flow.worker(instance="pair", rank=rank, num_ranks=2) for rank in range(2)]
    single = flow.worker()
    trainer.ask("wait", n=2)
    with failing("GroupError") as refused:
        trainer.ask("publish", number=1)
    assert "wrong world size: 2 instances of " in refused.error.text
    assert "all instances must have the same number of ranks" in refused.error.text
    assert refused.worker in {worker.name for worker in (*pair, single)}
    for worker in (*pair, single):
        flow.holds(worker, 0)
    single.end()
    flow.until(lambda: len(trainer.ask("workers")) == 2)
    publish(flow, trainer, 2, pair)


def test_a_world_size_that_the_workers_do_not_make_up_is_refused(flow, failing):
    trainer = flow.trainer(engine="gloo", options={"world_size": 5})
    flow.workers(2)
    trainer.ask("wait", n=2)
    with failing("GroupError") as refused:
        trainer.ask("publish", number=1)
    assert (
        "wrong world size: 2 instances of 1 ranks after 1 of the trainer make 3, the trainer says 5"
        in refused.error.text
    )


@pytest.fixture
def taken_port():
    """A port at which somebody listens already."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        yield other.getsockname()[1]


def test_a_port_in_use_is_named_and_the_round_ends(flow, failing, taken_port):
    trainer = flow.trainer(engine="gloo", options={"port": taken_port})
    worker = flow.worker()
    trainer.ask("wait", n=1)
    with failing("AddressInUseError") as refused:
        trainer.ask("publish", number=1)
    assert f"127.0.0.1:{taken_port}" in refused.error.text
    assert refused.error.seconds < 1
    flow.holds(worker, 0)
    assert worker.look()["claim"] is None


def test_a_fixed_port_is_free_again_for_every_new_group(flow, failing):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    trainer = flow.trainer(engine="gloo", options={"port": port})
    stays, victim = flow.workers(2)
    trainer.ask("wait", n=2)
    publish(flow, trainer, 1, [stays, victim])
    victim.witness.hold("transfer")
    trainer.ask("begin", number=2)
    victim.until_held()
    victim.kill()
    with failing("PeerLostError"):
        trainer.ask("result")
    trainer.ask("wait", n=1)
    publish(flow, trainer, 3, [stays])
    late = flow.worker()
    trainer.ask("wait", n=2)
    publish(flow, trainer, 4, [stays, late])
