"""FAULTS 19 for engine ``gloo``: abort, Ctrl-C and SIGTERM in the middle of a broadcast."""

from __future__ import annotations

import signal
import time

import pytest


@pytest.fixture
def in_broadcast(flow):
    """A trainer in its third round, whose broadcast waits for one of three workers."""

    def make(order):
        flow.size = {"num_tensors": 12, "numel": 1 << 18}  # 12 MiB in buckets of one
        # What breaks in the middle of a bucket is kept until gloo's time-out.
        options = {"packed_buffer_size_bytes": 1 << 20, "timeout_s": 4.0}
        trainer = flow.trainer(engine="gloo", options=options)
        workers = flow.workers(3)
        trainer.ask("wait", n=3)
        for _ in range(2):
            assert trainer.ask("publish", number=1)["ok"]
        holdings = [each.holdings() for each in (trainer, *workers)]
        workers[1].witness.hold("midst")
        trainer.order(order, number=2)
        if order == "begin":
            trainer.answer()
        workers[1].until_held()
        return trainer, workers, holdings

    return make


def next_rounds_work_and_nothing_is_left(flow, trainer, workers, holdings):
    workers[1].go_on()
    for number in (3, 4):
        flow.publish(trainer, number, workers)
    left_over = flow.left_over(holdings, lambda: [p.holdings() for p in (trainer, *workers)])
    assert not any(left_over), left_over


def test_an_aborted_broadcast_ends_within_a_second_and_a_second_abort_does_nothing(
    flow, failing, in_broadcast
):
    trainer, workers, holdings = in_broadcast("begin")
    begun = time.monotonic()
    trainer.ask("abort", times=2)
    with failing("RoundAbortedError") as aborted:
        trainer.ask("result")
    assert aborted.ended - begun < 1
    assert (aborted.version, aborted.phase) == ("v2", "transfer")
    flow.serve(workers, 1, begun)
    trainer.ask("abort")
    next_rounds_work_and_nothing_is_left(flow, trainer, workers, holdings)


def test_ctrl_c_in_the_trainer_ends_a_broadcast_within_a_second(flow, failing, in_broadcast):
    trainer, workers, holdings = in_broadcast("publish")
    begun = trainer.signal(signal.SIGINT)
    with failing("KeyboardInterrupt") as interrupted:
        trainer.answer()
    # The interruption is let through once the round has wound down, or after its grace.
    assert interrupted.ended - begun < 1.2
    flow.serve(workers, 1, begun)
    next_rounds_work_and_nothing_is_left(flow, trainer, workers, holdings)


@pytest.mark.slow
def test_sigterm_ends_a_trainer_at_once_and_its_broadcast_with_it(flow, in_broadcast):
    trainer, workers, _ = in_broadcast("publish")
    begun = trainer.signal(signal.SIGTERM)
    assert trainer.child.wait(1.0) == -signal.SIGTERM
    flow.serve(workers, 1, begun)
    trainer.alive = False


@pytest.mark.slow
def test_a_trainer_that_leaves_in_a_broadcast_does_so_within_a_second(flow, in_broadcast):
    trainer, workers, _ = in_broadcast("begin")
    begun = time.monotonic()
    trainer.ask("end")
    assert trainer.ended - begun < 1.2
    flow.serve(workers, 1, begun)
    assert trainer.child.wait(10.0) == 0
    # An interpreter that is torn down says nothing.
    assert trainer.last_words() == ""


def test_a_worker_that_leaves_in_a_broadcast_does_so_within_a_second(flow, failing, in_broadcast):
    trainer, workers, _ = in_broadcast("begin")
    trainer.order("result")
    begun = time.monotonic()
    workers[0].ask("end")
    assert workers[0].ended - begun < 1.2
    with failing("PeerLostError") as lost:
        trainer.answer()
    assert lost.ended - begun < 1
    assert workers[0].name == lost.worker
    flow.serve(workers[1:], 1, begun)
    assert workers[0].child.wait(10.0) == 0
