"""FAULTS 14: a peer is stopped, not dead. FAULTS 15: one worker is slow."""

from __future__ import annotations

import signal
import time

import pytest

from wtransfer.transport.address import random_address

DEADLINE_S = 1.0
ON_TIME_S = DEADLINE_S * 1.1 + 0.5  # 10 %, and what a busy machine may add


@pytest.mark.parametrize(
    "phase",
    ["transfer", *(pytest.param(each, marks=pytest.mark.slow) for each in ("plan", "prepare"))],
)
def test_a_stopped_worker_ends_the_round_at_the_deadline(flow, failing, phase):
    trainer = flow.trainer(deadline_s=DEADLINE_S)
    survivor, stopped = flow.workers(2)
    trainer.ask("wait", n=2)
    trainer.ask("publish", number=1)
    flow.held_in(trainer, stopped, phase)
    stopped_at = stopped.signal(signal.SIGSTOP)
    with failing("StallError") as stalled:
        trainer.ask("result")
    assert DEADLINE_S * 0.5 < stalled.ended - stopped_at < ON_TIME_S
    assert stopped.name == stalled.worker
    assert stopped.name in stalled.error.text
    assert {1} == set(survivor.look()["numbers"])
    # The next round works, with the one that is there, and later with both.
    flow.publish(trainer, 3, [survivor])
    stopped.go_on()
    stopped.signal(signal.SIGCONT)
    flow.holds(stopped, 3)
    assert stopped.looks()
    flow.publish(trainer, 4, [survivor, stopped])


def test_a_stopped_worker_is_dropped_where_that_is_allowed(flow):
    trainer = flow.trainer(deadline_s=DEADLINE_S, on_lost_worker="drop")
    survivor, stopped = flow.workers(2)
    trainer.ask("wait", n=2)
    trainer.ask("publish", number=1)
    flow.held_in(trainer, stopped, "transfer")
    stopped_at = stopped.signal(signal.SIGSTOP)
    report = trainer.ask("result")
    assert trainer.ended - stopped_at < ON_TIME_S
    assert report["workers"][stopped.name]["outcome"] == "dropped"
    flow.holds(survivor, 2)
    stopped.go_on()
    stopped.signal(signal.SIGCONT)
    flow.holds(stopped, 2)


def test_a_stopped_worker_does_not_hold_up_a_commit_beyond_the_deadline(flow):
    trainer = flow.trainer(deadline_s=DEADLINE_S)
    survivor, stopped = flow.workers(2)
    trainer.ask("wait", n=2)
    trainer.ask("publish", number=1)
    flow.held_in(trainer, trainer, "commit")
    stopped.signal(signal.SIGSTOP)
    trainer.go_on()
    begun = time.monotonic()
    report = trainer.ask("result")
    assert trainer.ended - begun < ON_TIME_S
    assert report["outcome"] == "mixed"
    assert report["workers"][stopped.name]["outcome"] in ("pending", "lost")
    flow.holds(survivor, 2)
    stopped.signal(signal.SIGCONT)
    flow.holds(stopped, 2)


@pytest.mark.parametrize("phase", ["transfer", pytest.param("prepare", marks=pytest.mark.slow)])
def test_a_stopped_trainer_is_given_up_and_may_come_back(flow, failing, phase):
    trainer = flow.trainer(deadline_s=DEADLINE_S)
    worker = flow.worker()
    trainer.ask("wait", n=1)
    trainer.ask("publish", number=1)
    flow.held_in(trainer, trainer, phase)
    stopped_at = trainer.signal(signal.SIGSTOP)
    flow.serve([worker], 1, stopped_at, ON_TIME_S)
    trainer.go_on()
    trainer.signal(signal.SIGCONT)
    with failing("WTransferError") as lost:
        trainer.ask("result")
    assert worker.name == lost.worker
    assert {"PeerLostError", "StallError"} & set(lost.classes)
    flow.publish(trainer, 3, [worker])


def test_another_trainer_takes_over_from_a_stopped_one(flow):
    token = "shared"
    trainer = flow.trainer(deadline_s=DEADLINE_S, token=token)
    worker = flow.worker()
    successor = flow.trainer(listen=random_address(), token=token)
    trainer.ask("wait", n=1)
    flow.held_in(trainer, trainer, "transfer", number=1)
    trainer.signal(signal.SIGSTOP)
    worker.ask("until_free", within_s=10)
    # Lost to the worker, which dials it again and again: the successor takes its place.
    worker.ask("join", address=successor.ask("where")["address"])
    successor.ask("wait", n=1)
    assert successor.ask("publish", number=2)["ok"]
    flow.holds(worker, 2)


@pytest.mark.slow
def test_one_slow_worker_costs_the_trainer_no_memory_and_the_others_no_deadline(flow, failing):
    flow.size = {"num_tensors": 48, "numel": 1 << 18}  # 48 MiB
    nbytes = 48 << 20
    trainer = flow.trainer(deadline_s=DEADLINE_S, options={"bucket_nbytes": 1 << 20})
    fast, slow = flow.workers(2)
    trainer.ask("wait", n=2)
    for number in (1, 2):
        assert trainer.ask("publish", number=number)["ok"]
    peak_nbytes = trainer.ask("peak_nbytes")
    slow.witness.hold("transfer")
    begun = time.monotonic()
    trainer.ask("begin", number=3)
    with failing("StallError") as stalled:
        trainer.ask("result")
    assert stalled.ended - begun < ON_TIME_S + 1
    assert slow.name == stalled.worker
    assert fast.ask("until_free", within_s=1)
    # What waits for the slow one are announcements, not weights.
    assert trainer.ask("peak_nbytes") - peak_nbytes < nbytes // 4
    slow.go_on()
    trainer.ask("wait", n=2)
    report = trainer.ask("publish", number=4)
    assert report["ok"], report["text"]


@pytest.mark.slow
def test_a_worker_that_is_slow_but_moves_is_waited_for(flow):
    trainer = flow.trainer(deadline_s=DEADLINE_S, options={"bucket_nbytes": 1 << 14})
    flow.size |= {"num_tensors": 8}
    slow = flow.worker(pace_s=0.3)
    trainer.ask("wait", n=1)
    begun = time.monotonic()
    assert trainer.ask("publish", number=1)["ok"]
    assert time.monotonic() - begun > DEADLINE_S
    flow.holds(slow, 1)


@pytest.mark.slow
def test_a_stall_is_blamed_on_the_worker_and_not_on_the_engine_that_waits_for_it(flow, failing):
    flow.size = {"num_tensors": 2, "numel": 1 << 12}
    trainer = flow.trainer(deadline_s=DEADLINE_S)
    # It stays connected, and its heart beats on: only its engine hangs, in the only bucket.
    slow = flow.worker()
    for number in (1, 2, 3, 4):
        trainer.ask("wait", n=1)
        slow.witness.hold("transfer")
        with failing("StallError") as stalled:
            trainer.ask("publish", number=number)
        assert stalled.worker == slow.name, stalled.error
        slow.go_on()
    flow.until(lambda: slow.look()["staging"] is None)
    assert trainer.ask("publish", number=5)["ok"]
