"""Scheduler and workers exchange plain data, and make no class that they have not loaded."""

from __future__ import annotations

import msgspec
import pytest

from wtransfer.demo.serving.messages import Job, StepPlan, as_place, from_place
from wtransfer.specs.fenced import FencedLoadStoreSpec
from wtransfer.specs.interface import GPULoadStoreSpec
from wtransfer.specs.slots import ArenaLoadStoreSpec
from wtransfer.weights import WeightsStamp

STAMPS = [WeightsStamp("A", 1), WeightsStamp("B", 2)]


def over_the_wire(plan):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=StepPlan)


def test_places_and_stamps_arrive_as_they_were():
    tier = FencedLoadStoreSpec(STAMPS, ArenaLoadStoreSpec([3, 1], [b"k", b"\xff\0"]))
    blocks = GPULoadStoreSpec([5, 6, 7], [2, 1], [4, 0])
    plan = StepPlan(STAMPS, [], [Job(1, "load", as_place(blocks), as_place(tier))])
    arrived = over_the_wire(plan)
    (job,) = arrived.jobs
    assert arrived.stamps == STAMPS
    place = from_place(job.tier)
    assert place.stamps == tuple(STAMPS)
    assert all(isinstance(each, WeightsStamp) for each in place.stamps)
    assert (type(place.inner), vars(place.inner)) == (ArenaLoadStoreSpec, vars(tier.inner))
    assert vars(from_place(job.blocks)) == vars(blocks)


def test_a_class_that_was_never_loaded_is_not_made():
    with pytest.raises(LookupError, match=r"'subprocess\.Popen' is no LoadStoreSpec"):
        from_place(("subprocess.Popen", {}))
