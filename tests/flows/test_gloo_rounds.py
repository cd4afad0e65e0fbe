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


def test_trainer_and_worker_listen_at_the_address_that_was_given_and_nowhere_else(flow):
    trainer = flow.trainer(engine="gloo", listen="tcp:127.0.0.2:0", options={"host": "127.0.0.2"})
    worker = flow.worker()
    trainer.ask("wait", n=1)
    for number in (1, 2):
        flow.publish(trainer, number, [worker])
    # The kernel writes an address as one number, as it stands in memory.
    assert trainer.listeners() == ["0200007F"] * 3, "channel, meeting and group"
    # Where a worker listens is the address from which it reaches the trainer.
    assert worker.listeners() == ["0100007F"]


def test_three_workers_take_round_after_round(flow, trainer):
    workers = flow.workers(3)
    trainer.ask("wait", n=3)
    for number in range(1, NUM_ROUNDS + 1):
        flow.publish(trainer, number, workers)
        if number == 4:
            # Two pieces of memory that take turns; from now on nothing grows any more.
            holdings = [each.holdings() for each in (trainer, *workers)]
    left_over = flow.left_over(holdings, lambda: [p.holdings() for p in (trainer, *workers)])
    assert not any(left_over), left_over
    for worker in workers:
        looks = worker.looks()
        assert [f"v{number}" for number in range(1, NUM_ROUNDS + 1)] == [
            version for version, _, _ in looks if version
        ]


def test_membership_that_changes_leaves_nothing_behind(flow, trainer):
    stays = flow.worker()
    holdings = []
    for number in range(1, 8, 2):
        guest = flow.worker()
        trainer.ask("wait", n=2)
        flow.publish(trainer, number, [stays, guest])
        guest.end()
        flow.until(lambda: len(trainer.ask("workers")) == 1)
        flow.publish(trainer, number + 1, [stays])
        holdings.append((trainer.holdings(), stays.holdings()))
    left_over = flow.left_over(holdings[1], lambda: (trainer.holdings(), stays.holdings()))
    assert not any(left_over), left_over


def test_a_second_session_at_a_place_that_is_taken_is_refused_until_it_is_free(flow, trainer):
    pair = [flow.worker(instance="pair", rank=rank, num_ranks=2) for rank in range(2)]
    trainer.ask("wait", n=1)
    double = flow.worker(instance="pair", rank=1, num_ranks=2)
    flow.until(trainer_has_refused := lambda: trainer.ask("refusal"))
    assert (
        f"{double.name} says it is rank 1 of 2 of instance pair, but {pair[1].name} is rank 1 of 2"
        in trainer_has_refused()["text"]
    )
    # Neither the round nor the group hears of it.
    for number in (1, 2):
        flow.publish(trainer, number, pair)
    flow.holds(double, 0)
    pair[1].end()
    names = {pair[0].name, double.name}
    flow.until(lambda: names == {each["worker"] for each in trainer.ask("workers")})
    flow.publish(trainer, 3, [pair[0], double])


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
    flow.publish(trainer, 2, pair)


def test_a_fixed_port_is_free_again_for_every_new_group(flow, failing):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    trainer = flow.trainer(engine="gloo", options={"port": port})
    stays, victim = flow.workers(2)
    trainer.ask("wait", n=2)
    flow.publish(trainer, 1, [stays, victim])
    victim.witness.hold("transfer")
    trainer.ask("begin", number=2)
    victim.until_held()
    victim.kill()
    with failing("PeerLostError"):
        trainer.ask("result")
    trainer.ask("wait", n=1)
    flow.publish(trainer, 3, [stays])
    late = flow.worker()
    trainer.ask("wait", n=2)
    flow.publish(trainer, 4, [stays, late])
