"""Specs that do not report their jobs, or report them late: promise 4, FAULTS 55."""

from __future__ import annotations

import logging
import sys
import time
import types

import pytest
from sides import request_of, step

from wtransfer.deadline import Deadline
from wtransfer.errors import StallError
from wtransfer.specs.cpu import CPUOffloadingSpec
from wtransfer.specs.interface import OffloadingWorker, TransferResult
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.engine import make_engine
from wtransfer.weight_version import process_weights

DEADLINE_S = 0.2
BLOCK = 16
PROMPTS = [[1, *range(90)], [2, *range(90)]]
GARBAGE = 0x3F
SPEC = {
    "spec_name": "SilentSpec",
    "spec_module_path": "silent_spec",
    "cpu_bytes_to_use": 1 << 22,
    "deadline_s": DEADLINE_S,
}


class SilentWorker(OffloadingWorker):
    """Takes jobs of one direction, and neither begins nor reports them until `report`."""

    def __init__(self, worker, caches):
        self.worker, self.caches = worker, caches
        self.silent = None
        self.jobs, self.results = [], []

    def submit_load(self, job_id, src_spec, dst_spec):
        if self.silent != "load":
            return self.worker.submit_load(job_id, src_spec, dst_spec)
        self.jobs.append((job_id, src_spec, dst_spec))
        return True

    def submit_store(self, job_id, src_spec, dst_spec):
        if self.silent != "store":
            return self.worker.submit_store(job_id, src_spec, dst_spec)
        self.jobs.append((job_id, src_spec, dst_spec))
        return True

    def report(self):
        """Carry the jobs out, far too late; loads bring other bytes."""
        kind, self.silent = self.silent, None
        for job_id, src_spec, dst_spec in self.jobs:
            if kind == "store":
                assert self.worker.submit_store(job_id, src_spec, dst_spec)
                continue
            for each in self.caches.tensors:
                each.tensor[dst_spec.block_ids] = GARBAGE
            self.results += [TransferResult(job_id, True)] * 2
        self.jobs.clear()

    def get_finished(self):
        results, self.results = self.results, []
        return results + self.worker.get_finished()

    def wait(self, job_ids):
        if any(job_id in job_ids for job_id, *_ in self.jobs):
            raise StallError("no progress", seconds=DEADLINE_S)
        self.worker.wait(job_ids)

    def shutdown(self):
        self.worker.shutdown()


class SilentSpec(CPUOffloadingSpec):
    """A spec of a third party, over the worker that copies."""

    made = None

    def get_worker(self, kv_caches):
        if self.made is None:
            self.made = SilentWorker(super().get_worker(kv_caches), kv_caches)
        return self.made


@pytest.fixture(autouse=True)
def silent_spec(monkeypatch):
    module = types.ModuleType("silent_spec")
    module.SilentSpec = SilentSpec
    SilentSpec.__module__ = "silent_spec"
    monkeypatch.setitem(sys.modules, "silent_spec", module)


@pytest.fixture
def engine(one_thread):
    """Maker of engines over the spec; `ranks` are its workers."""
    process_weights.begin_anew()
    made = []

    def make(**config):
        options = {**SPEC, **config.pop("options", {})}
        connector = config.pop("connector", "OffloadingConnector")
        engine = make_engine(EngineConfig(connector=connector, options=options, **config))
        made.append(engine)
        engine.ranks = [each.connector.side._made for each in engine.executor.workers]
        return engine

    yield make
    for each in made:
        each.close()


def _request(name):
    return request_of(name, 9)


def silence(engine, kind, ranks=None):
    for each in ranks or engine.ranks:
        each.silent = kind


def stats_of(engine):
    return engine.scheduler.connector.get_stats()


def settle(engine, done):
    """Take steps until something is so."""
    deadline = Deadline(30.0)
    while not done():
        engine.step()
        deadline.check("the engine")


def with_kept_prompts(engine):
    """Return what the engine says to the prompts once the spec has their blocks, and only it."""
    expected = engine.generate(PROMPTS, 4)
    engine.scheduler.pool.reset()
    return expected


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_request_whose_load_is_never_reported_is_computed_in_other_blocks(
    engine, num_ranks, caplog
):
    made = engine(num_ranks=num_ranks)
    pool, expected = made.scheduler.pool, with_kept_prompts(made)
    # One rank of several is enough to hold a request.
    silence(made, "load", made.ranks[-1:])
    with caplog.at_level(logging.ERROR, "wtransfer"):
        assert made.generate(PROMPTS[:1], 4) == expected[:1]
    assert "SilentSpec has not reported a load of request" in caplog.text
    (_, _, where), *_ = made.ranks[-1].jobs
    held = where.block_ids
    assert pool.num_free == pool.num_blocks - len(held)
    stats = stats_of(made)
    assert (stats["overdue_jobs_total"], stats["overdue_blocks_held"]) == (1, len(held))

    # Nothing is asked of it, so no more blocks can be lost to it.
    loaded = made.counts["tokens_loaded"]
    pool.reset()
    assert made.generate(PROMPTS, 4) == expected
    assert stats_of(made)["overdue_jobs_total"] == 1
    # It writes into the blocks, and reports them twice, as whole.
    for each in made.ranks[-1:]:
        each.report()
    assert made.generate(PROMPTS, 4) == expected
    assert pool.num_free == pool.num_blocks
    assert stats_of(made)["overdue_blocks_held"] == 0
    counts = made.executor.workers[-1].connector.get_stats()
    assert (counts["late_results_total"], counts["unknown_results_total"]) == (1, 1)
    assert made.counts["tokens_loaded"] == loaded

    # And is asked again: what it was late with is suspect, what it has besides is not.
    pool.reset()
    assert made.generate(PROMPTS, 4) == expected
    assert made.counts["tokens_loaded"] > loaded


def test_late_load_does_not_reach_a_prefix_that_the_request_shared(engine):
    """The head of the prompt is in the prefix cache, the rest is loaded."""
    made = engine()
    head = PROMPTS[0][: 2 * BLOCK + 1]
    expected = with_kept_prompts(made)
    shared = made.generate([head], 1)
    silence(made, "load")
    assert made.generate(PROMPTS[:1], 4) == expected[:1]
    made.ranks[0].report()
    assert made.generate([head], 1) == shared
    assert made.generate(PROMPTS[:1], 4) == expected[:1]
    assert made.scheduler.pool.num_free == made.scheduler.pool.num_blocks


def test_policy_fail_ends_the_request_and_its_blocks_stay_held(engine):
    made = engine(on_load_failure="fail")
    pool = made.scheduler.pool
    with_kept_prompts(made)
    silence(made, "load")
    request = made.submit(PROMPTS[0], 4)
    made.run()
    assert (request.state, pool.num_blocks - pool.num_free) == ("failed", 5)
    made.ranks[0].report()
    settle(made, lambda: pool.num_free == pool.num_blocks)


def test_request_that_is_aborted_while_its_load_is_overdue_leaves_its_blocks_held(engine):
    made = engine()
    pool = made.scheduler.pool
    with_kept_prompts(made)
    silence(made, "load")
    request = made.submit(PROMPTS[0], 4)
    settle(made, lambda: request.state == "loading")
    made.scheduler.abort(request)
    made.run()
    assert pool.num_blocks - pool.num_free == 5
    made.ranks[0].report()
    settle(made, lambda: pool.num_free == pool.num_blocks)


def test_blocks_of_a_store_that_is_never_reported_are_given_back(engine, caplog):
    made = engine(cache=CacheShape(num_blocks=16))
    pool = made.scheduler.pool
    silence(made, "store")
    with caplog.at_level(logging.ERROR, "wtransfer"):
        expected = made.generate(PROMPTS[:1], 4)
    assert "SilentSpec has not reported a store of request" in caplog.text
    assert pool.num_free == pool.num_blocks, "a store writes into none of them"
    assert stats_of(made)["overdue_jobs_total"] == 1
    # Other prompts are in its blocks by the time when it copies them.
    pool.reset()
    for number in range(3, 6):
        made.generate([[number, *range(90)]], 4)
    made.ranks[0].report()
    settle(made, lambda: made.executor.worker.connector.get_stats()["late_results_total"])
    pool.reset()
    assert made.generate(PROMPTS[:1], 4) == expected
    assert made.counts["tokens_loaded"] == 0, "what it stored late is no hit"
    # What it stores in time is.
    pool.reset()
    assert made.generate(PROMPTS[:1], 4) == expected
    assert made.counts["tokens_loaded"] > 0


def test_spec_is_not_blamed_for_a_time_without_steps(sides):
    rig = sides("OffloadingConnector", **SPEC)
    request = _request("r")
    rig.begin(request, [0, 1, 2])
    rig.step(step(new=[(request, 0, 9)]))
    expired = Deadline(2 * DEADLINE_S)
    while not expired.expired:
        time.sleep(0.01)
    rig.settle()
    stats = rig.scheduler.get_stats()
    assert (stats["overdue_jobs_total"], stats["store_jobs_failed_total"]) == (0, 0)


def test_preempted_request_does_not_wait_for_a_spec_that_stalls(engine, caplog):
    made = engine(cache=CacheShape(num_blocks=13), options={"deadline_s": 2.0})
    reference = make_engine(EngineConfig())
    expected = reference.generate(PROMPTS, 30)
    reference.close()
    silence(made, "store")
    requests = [made.submit(each, 30) for each in PROMPTS]
    settle(made, lambda: all(each.is_done for each in requests))
    assert "its stores of preempted requests have failed" in caplog.text
    assert [each.output for each in requests] == expected
    # It copies now what others have written there since.
    made.ranks[0].report()
    settle(made, lambda: not made.scheduler.is_busy)
    made.scheduler.pool.reset()
    assert made.generate(PROMPTS, 30) == expected


def test_host_without_holds_lets_the_request_wait_and_the_spec_is_named(sides, caplog):
    # The spec is named at INFO as well, when it is made.
    caplog.set_level(logging.WARNING, "wtransfer")
    rig = sides("OffloadingConnector", **SPEC)
    spec = rig.workers[0].side._made
    request, again = _request("r"), _request("s")
    rig.keep(request, [0, 1, 2])
    spec.silent = "load"
    assert rig.begin(again, [3, 4, 5]) == 8
    deadline = Deadline(30.0)
    while "SilentSpec" not in caplog.text:
        _, (said,) = rig.step()
        assert said.received == set()
        deadline.check("an error")
    assert "bind_gpu_block_pool" in caplog.text
    rig.step()
    assert caplog.text.count("SilentSpec") == 1
    assert rig.scheduler.get_stats()["overdue_jobs_total"] == 1


def test_under_several_connectors_the_request_is_computed_as_well(engine):
    parts = [{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": SPEC}]
    config = EngineConfig(connector="MultiConnector", options={"connectors": parts})
    made = make_engine(config)
    try:
        process_weights.begin_anew()
        (part,) = made.executor.worker.connector.side.sub_connectors
        pool, expected = made.scheduler.pool, with_kept_prompts(made)
        part.side._made.silent = "load"
        assert made.generate(PROMPTS[:1], 4) == expected[:1]
        assert pool.num_free < pool.num_blocks
        part.side._made.report()
        settle(made, lambda: pool.num_free == pool.num_blocks)
    finally:
        made.close()
