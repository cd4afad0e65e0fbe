"""An engine raises, ends the process, runs out of memory or hangs: the round ends, nothing else."""

from __future__ import annotations

import time

import pytest

from wtransfer.errors import EngineError, StagingMemoryError, StallError
from wtransfer.testing.contents import contents
from wtransfer.testing.faults import Fault
from wtransfer.testing.leftovers import Leftovers

CAUGHT = {
    "raise": EngineError,
    "exit": EngineError,
    "memory-error": StagingMemoryError,
    "torch-memory": StagingMemoryError,
    "enomem": StagingMemoryError,
}


@pytest.fixture
def two_workers(fleet, engine, weights):
    made = fleet(weights, engine=engine, deadline_s=1.5)
    for _ in range(2):
        made.join()
    assert made.publish("v1").ok
    for tensor in weights.values():
        tensor.add_(1)
    return made


def states(fleet):
    return [(each.session.version, each.session.state, each.contents) for each in fleet.members]


# FAULTS 18 and whatever else an engine may raise.
@pytest.mark.parametrize("side", ["worker", pytest.param("trainer", marks=pytest.mark.slow)])
@pytest.mark.parametrize("action", CAUGHT)
def test_what_an_engine_raises_ends_the_round_at_every_tensor(two_workers, faults, action, side):
    before = states(two_workers)
    # Always the same worker: the other one may still be at the round that the fault has ended.
    place = 1 if side == "worker" else None
    for number in range(4):
        fault = Fault(action, tensor=number, side=side, worker=place)
        faults.arm(fault)
        with pytest.raises(CAUGHT[action]) as caught:
            two_workers.publish("v2")
        assert faults.fired.pop() == fault
        assert states(two_workers) == before
        error = caught.value
        assert error.plugin == f"engines:{two_workers.engine}"
        assert (error.version, error.phase) == ("v2", "transfer")
        assert error.worker == ("worker-1" if side == "worker" else None)
    assert two_workers.publish("v3").ok
    assert [each.contents for each in two_workers.members] == [contents(two_workers.source)] * 2


def test_an_error_that_is_kept_keeps_no_weights(fleet, engines, weights, faults, leaves_nothing):
    made = fleet(weights, engine=engines["shm"])
    made.join(commit="copy")
    leftovers = Leftovers()
    faults.arm(Fault("raise", tensor=2, side="trainer"))
    with pytest.raises(EngineError) as kept:
        made.publish("v1")
    made.close()
    assert leftovers.found(within_s=5.0) == []
    assert "the engine gives up" in str(kept.value)


# FAULTS 14, inside the process: promise 4 (nothing hangs).
@pytest.mark.slow
@pytest.mark.parametrize("side", ["worker", pytest.param("trainer", marks=pytest.mark.slow)])
def test_an_engine_that_hangs_is_named_and_left_behind(two_workers, faults, side):
    before = states(two_workers)
    faults.arm(Fault("hang", tensor=2, side=side, worker=1 if side == "worker" else None))
    begun = time.monotonic()
    with pytest.raises(StallError) as caught:
        two_workers.publish("v2")
    # The deadline of 1.5 s, a tick, and 1 s for the engine to return.
    assert time.monotonic() - begun < 5.0
    assert states(two_workers) == before
    error = caught.value
    assert (error.seconds, error.version) == (1.5, "v2")
    if side == "worker":
        assert error.worker == "worker-1"
    else:
        assert error.worker is None
        assert two_workers.engine in str(error)

    # It still hangs. A new engine takes its place.
    assert two_workers.publish("v3").ok
    assert [each.contents for each in two_workers.members] == [contents(two_workers.source)] * 2
