"""Engine ``gloo`` and a process that is killed or stopped while a bucket travels: what is left."""

from __future__ import annotations

import itertools
import signal
import time

import pytest

from wtransfer.transport.address import random_address

BUCKETS_THAT_TAKE_TIME = {"packed_buffer_size_bytes": 16 << 20, "timeout_s": 4.0}


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
def test_of_a_trainer_killed_while_a_bucket_travels_nothing_is_left_soon(
    flow, num_kills, least_hits
):
    flow.size = {"num_tensors": 16, "numel": 1 << 20}  # 64 MiB
    nbytes = 64 << 20
    home = {"listen": random_address(), "token": "a token of these tests"}
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
            worker.ask("until_free", within_s=10)
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
    flow, failing, num_kills
):
    flow.size = {"num_tensors": 16, "numel": 1 << 20}  # 64 MiB
    trainer = flow.trainer(engine="gloo", options=BUCKETS_THAT_TAKE_TIME)
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


@pytest.mark.slow
@pytest.mark.parametrize("num_stops", [1, pytest.param(6, marks=pytest.mark.nightly)])
def test_a_worker_resumed_from_the_midst_of_a_bucket_cannot_write_into_a_later_version(
    flow, failing, num_stops
):
    flow.size = {"num_tensors": 16, "numel": 1 << 20}  # 64 MiB
    options = {"packed_buffer_size_bytes": 16 << 20}
    trainer = flow.trainer(engine="gloo", options=options, deadline_s=3.5)
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
