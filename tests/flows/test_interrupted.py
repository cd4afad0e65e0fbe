"""FAULTS 19: abort, Ctrl-C and SIGTERM during a round."""

from __future__ import annotations

import signal
import time

import pytest

PHASES = ["plan", "transfer", "prepare"]


@pytest.fixture
def in_round(flow):
    """A trainer in its second round, which waits for one of two workers."""

    def make(phase, order):
        trainer = flow.trainer()
        workers = flow.workers(2)
        trainer.ask("wait", n=2)
        trainer.ask("publish", number=1)
        workers[1].witness.hold(phase)
        if order == "publish":
            trainer.order("publish", number=2)
        else:
            trainer.ask("begin", number=2)
        workers[1].until_held()
        return trainer, workers

    return make


@pytest.mark.parametrize("phase", PHASES)
def test_an_aborted_round_ends_within_a_second_and_a_second_abort_does_nothing(
    flow, failing, in_round, phase
):
    trainer, workers = in_round(phase, "begin")
    begun = time.monotonic()
    trainer.ask("abort", times=2)
    with failing("RoundAbortedError") as aborted:
        trainer.ask("result")
    assert aborted.ended - begun < 1
    assert ("v2", phase) == (aborted.version, aborted.phase)
    flow.serve(workers, 1, begun)
    # Of a round that is over there is nothing left to abort.
    trainer.ask("abort")
    workers[1].go_on()
    flow.publish(trainer, 3, workers)


def test_an_abort_after_the_first_commit_comes_too_late(flow):
    trainer = flow.trainer()
    worker = flow.worker(hold="commit")
    trainer.ask("wait", n=1)
    trainer.ask("begin", number=1)
    worker.until_held()
    trainer.ask("abort", times=2)
    worker.go_on()
    assert trainer.ask("result")["ok"]
    flow.holds(worker, 1)


@pytest.mark.parametrize("phase", PHASES)
def test_ctrl_c_in_the_trainer_ends_the_round_within_a_second(flow, failing, in_round, phase):
    trainer, workers = in_round(phase, "publish")
    begun = trainer.signal(signal.SIGINT)
    with failing("KeyboardInterrupt") as interrupted:
        trainer.answer()
    # The interruption is let through once the round has wound down, or after its grace.
    assert interrupted.ended - begun < 1.2
    flow.serve(workers, 1, begun)
    workers[1].go_on()
    flow.publish(trainer, 3, workers)


def test_sigterm_ends_a_trainer_at_once_and_its_round_with_it(flow, in_round):
    trainer, workers = in_round("transfer", "publish")
    begun = trainer.signal(signal.SIGTERM)
    assert trainer.child.wait(1.0) == -signal.SIGTERM
    flow.serve(workers, 1, begun)
    trainer.alive = False


def test_ctrl_c_that_ends_a_trainer_in_good_order_leaves_in_a_second(flow, in_round):
    trainer, workers = in_round("transfer", "begin")
    begun = time.monotonic()
    trainer.ask("end")
    assert trainer.ended - begun < 1.2
    flow.serve(workers, 1, begun)
    assert trainer.child.wait(10.0) == 0
    # An interpreter that is torn down says nothing.
    assert trainer.last_words() == ""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_that_ends_a_worker_ends_the_round_within_a_second(
    flow, failing, in_round, number
):
    trainer, workers = in_round("transfer", "begin")
    trainer.order("result")
    begun = workers[1].signal(number)
    workers[1].alive = False
    with failing("PeerLostError") as lost:
        trainer.answer()
    assert lost.ended - begun < 1
    assert workers[1].name == lost.worker
    flow.serve(workers[:1], 1, begun)


def test_ctrl_c_while_a_worker_applies_restores_the_old_version(flow, failing):
    trainer = flow.trainer()
    worker = flow.worker()
    trainer.ask("wait", n=1)
    trainer.ask("publish", number=1)
    worker.ask("set", auto=False)
    worker.witness.hold("commit")
    trainer.ask("begin", number=2)
    worker.order("commit", within_s=10)
    worker.until_held()
    # Half of the tensors are new. The handler runs in the main thread, which is in the target.
    worker.signal(signal.SIGINT)
    worker.go_on()
    with failing("KeyboardInterrupt"):
        worker.answer()
    look = worker.look()
    assert ("v1", {1}) == (look["version"], set(look["numbers"]))
    report = trainer.ask("result")
    assert report["workers"][worker.name]["outcome"] == "restored"
    worker.ask("set", auto=True)
    flow.holds(worker, 2)  # it catches up by itself


def test_ctrl_c_while_a_worker_waits_for_an_update_is_let_through(flow, failing):
    trainer = flow.trainer()
    worker = flow.worker()
    trainer.ask("wait", n=1)
    worker.ask("set", auto=False)
    worker.order("commit", within_s=10)
    time.sleep(0.2)
    begun = worker.signal(signal.SIGINT)
    with failing("KeyboardInterrupt") as interrupted:
        worker.answer()
    assert interrupted.ended - begun < 1
    worker.ask("set", auto=True)
    assert trainer.ask("publish", number=1)["ok"]
