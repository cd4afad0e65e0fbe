"""FAULTS 14 and 15 for engine ``gloo``: a rank is stopped or slow, and holds up the others."""

from __future__ import annotations

import itertools
import signal
import time

import pytest

DEADLINE_S = 2.0  # a busy machine needs a second to form a group
ON_TIME_S = DEADLINE_S * 1.1 + 0.5  # 10 %, and what a busy machine may add
NBYTES = 12 << 20
OPTIONS = {"packed_buffer_size_bytes": 1 << 20}


@pytest.fixture
def serving(flow):
    """A trainer, and three workers that have its first version."""
    flow.size = {"num_tensors": 12, "numel": NBYTES // 12 // 4}
    trainer = flow.trainer(engine="gloo", options=OPTIONS, deadline_s=DEADLINE_S)
    workers = flow.workers(3)
    trainer.ask("wait", n=3)
    assert trainer.ask("publish", number=1)["ok"]
    return trainer, workers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "place"),
    [
        ("midst", 0),
        *(
            pytest.param(phase, place, marks=pytest.mark.nightly)
            for phase, place in (("midst", 2), ("transfer", 1), ("midst", 1))
        ),
    ],
)
def test_a_stopped_worker_and_no_other_is_blamed_at_the_deadline(
    flow, failing, serving, phase, place
):
    trainer, workers = serving
    stopped = workers[place]
    rest = [worker for worker in workers if worker is not stopped]
    flow.held_in(trainer, stopped, phase)
    stopped_at = stopped.signal(signal.SIGSTOP)
    with failing("StallError") as stalled:
        trainer.ask("result")
    assert DEADLINE_S * 0.5 < stalled.ended - stopped_at < ON_TIME_S
    assert stopped.name == stalled.worker
    assert stopped.name in stalled.error.text
    flow.serve(rest, 1, stalled.ended)
    flow.publish(trainer, 3, rest)
    stopped.go_on()
    stopped.signal(signal.SIGCONT)
    flow.publish(trainer, 4, workers)
    assert stopped.looks()


def test_a_worker_stopped_before_it_has_joined_the_group_is_blamed(flow, failing):
    trainer = flow.trainer(engine="gloo", options=OPTIONS, deadline_s=DEADLINE_S)
    first, stopped, last = flow.workers(3)
    trainer.ask("wait", n=3)
    flow.held_in(trainer, stopped, "init", number=1)
    stopped_at = stopped.signal(signal.SIGSTOP)
    with failing("StallError") as stalled:
        trainer.ask("result")
    assert stalled.ended - stopped_at < ON_TIME_S
    assert (stopped.name, "init") == (stalled.worker, stalled.phase)
    flow.publish(trainer, 2, [first, last])
    stopped.go_on()
    stopped.signal(signal.SIGCONT)
    flow.publish(trainer, 3, [first, stopped, last])


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, pytest.param(2, marks=pytest.mark.nightly)])
def test_a_worker_whose_engine_hangs_while_its_heart_beats_is_among_the_named(
    flow, failing, serving, place
):
    trainer, workers = serving
    slow = workers[place]
    slow.witness.hold("midst")
    peak_nbytes = trainer.ask("peak_nbytes")
    begun = time.monotonic()
    with failing("StallError") as stalled:
        trainer.ask("publish", number=2)
    assert stalled.ended - begun < ON_TIME_S + 1
    # Which of them it is cannot be seen from outside while all answer.
    assert slow.name in stalled.error.text
    assert "all of them answer: the engine of one hangs" in stalled.error.text
    # What waits for the slow one are two buckets, not the weights.
    assert trainer.ask("peak_nbytes") - peak_nbytes < NBYTES // 2
    flow.serve([worker for worker in workers if worker is not slow], 1, stalled.ended)
    slow.go_on()
    flow.publish(trainer, 3, workers)


@pytest.mark.slow
def test_a_worker_that_is_slow_but_moves_is_waited_for(flow):
    flow.size = {"num_tensors": 12, "numel": 1 << 18}
    trainer = flow.trainer(engine="gloo", options=OPTIONS, deadline_s=DEADLINE_S)
    # In each of four phases of a round: longer than the deadline in all.
    workers = [flow.worker(), flow.worker(pace_s=DEADLINE_S / 2.5), flow.worker()]
    trainer.ask("wait", n=3)
    begun = time.monotonic()
    flow.publish(trainer, 1, workers)
    assert time.monotonic() - begun > DEADLINE_S


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["midst", pytest.param("prepare", marks=pytest.mark.nightly)])
def test_a_stopped_trainer_is_given_up_and_may_come_back(flow, failing, serving, phase):
    trainer, workers = serving
    flow.held_in(trainer, trainer, phase)
    stopped_at = trainer.signal(signal.SIGSTOP)
    flow.serve(workers, 1, stopped_at, ON_TIME_S)
    trainer.go_on()
    trainer.signal(signal.SIGCONT)
    with failing("WTransferError") as lost:
        trainer.ask("result")
    assert {"PeerLostError", "StallError"} & set(lost.classes)
    flow.publish(trainer, 3, workers)


@pytest.mark.parametrize("num_stops", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_a_worker_resumed_from_the_midst_of_a_bucket_cannot_write_into_a_later_version(
    flow, failing, num_stops
):
    flow.size = {"num_tensors": 16, "numel": 1 << 20}  # 64 MiB
    options = {"packed_buffer_size_bytes": 16 << 20}
    trainer = flow.trainer(engine="gloo", options=options, deadline_s=DEADLINE_S)
    # The second one sends on to the third.
    workers = flow.workers(3)
    trainer.ask("wait", n=3)
    number = 1
    flow.publish(trainer, number, workers)
    moments = itertools.cycle([0.004, 0.015, 0.03])
    num_hits = 0
    for stopped in itertools.islice(itertools.cycle([workers[1], workers[0]]), num_stops):
        rest = [worker for worker in workers if worker is not stopped]
        trainer.ask("begin", number=number + 1)
        flow.until(lambda stopped=stopped: stopped.phase in ("transfer", "midst"))
        time.sleep(next(moments))
        stopped.signal(signal.SIGSTOP)
        num_hits += stopped.phase in ("transfer", "midst")
        with failing("StallError") as stalled:
            trainer.ask("result")
        assert stopped.name == stalled.worker
        # Memory takes turns: what the broken round has received into would be used again.
        for later in (2, 3):
            flow.publish(trainer, number + later, rest)
        stopped.signal(signal.SIGCONT)
        flow.serve(rest, number + 3, time.monotonic())
        number += 4
        flow.publish(trainer, number, workers)
    assert num_hits, "none was stopped in a transfer"
