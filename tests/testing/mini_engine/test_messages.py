"""Scheduler and workers exchange plain data over the wire, also the jobs of a connector."""

from __future__ import annotations

import msgspec

from wtransfer.connectors.offloading.metadata import Job, OffloadingMetadata
from wtransfer.specs.fenced import FencedLoadStoreSpec
from wtransfer.specs.interface import GPULoadStoreSpec
from wtransfer.specs.shared_region import ArenaLoadStoreSpec
from wtransfer.testing.mini_engine.messages import Said, Span, StepPlan, StepResult
from wtransfer.testing.mini_engine.plain import from_plain, to_plain
from wtransfer.weights import WeightsStamp

STAMPS = [WeightsStamp("A", 1), WeightsStamp("B", 2)]


def over_the_wire(message):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


def test_a_plan_arrives_as_it_was():
    tier = FencedLoadStoreSpec(STAMPS, ArenaLoadStoreSpec([3, 1], [b"k", b"\xff\0"]))
    blocks = GPULoadStoreSpec([5, 6, 7], [2, 1], [4, 0])
    loads = [Job(1, "r", blocks, tier)]
    metadata = OffloadingMetadata(loads=loads, gone={"s": [4]}, preempted=["t"])
    plan = StepPlan(STAMPS, [Span("r", [1], 4, [5])], to_plain(metadata), True, {"u"})
    arrived = over_the_wire(plan)
    assert arrived == plan
    assert all(isinstance(each, WeightsStamp) for each in arrived.stamps)
    got = from_plain(arrived.metadata)
    (job,) = got.loads
    assert (got.gone, got.preempted, got.stores) == ({"s": [4]}, ["t"], [])
    assert (type(job), job.job_id, job.request_id) == (Job, 1, "r")
    assert vars(job.blocks) == vars(blocks)
    assert job.tier.stamps == tuple(STAMPS)
    assert all(isinstance(each, WeightsStamp) for each in job.tier.stamps)
    assert (type(job.tier.inner), vars(job.tier.inner)) == (ArenaLoadStoreSpec, vars(tier.inner))


def test_a_result_arrives_as_it_was():
    said = Said({"r"}, {"s"}, {3, 4}, to_plain(b"\xff\0"))
    result = StepResult(WeightsStamp("A", 1 << 40), True, {"r": 7}, said)
    assert over_the_wire(result) == result
    nameless = StepResult(None, False, {})
    assert over_the_wire(nameless) == nameless
