"""Loads within the step that needs the blocks: waited for, and a failed one voids the step."""

from __future__ import annotations

import threading
import time

import pytest

from wtransfer.testing.fakes import SHELVES, MemoryConnector, MemoryWorker
from wtransfer.testing.kit import registered_name
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.model import LocalWeights
from wtransfer.testing.mini_engine.reference import some_prompts

NUM_BLOCKS = 32


class LateWorker(MemoryWorker):
    """Reports blocks that it cannot load when the last layer is waited for."""

    def start_load_kv(self, forward_context, **kwargs):
        super().start_load_kv(forward_context, **kwargs)
        self.found, self.errors = self.errors, set()

    def wait_for_layer_load(self, layer_name):
        if layer_name == list(self.caches)[-1]:
            self.errors, self.found = self.found, set()


class LateConnector(MemoryConnector):
    worker_cls = LateWorker


class BehindWorker(MemoryWorker):
    """Knows at once which blocks are damaged, and loads the others in a thread, like a disk."""

    def start_load_kv(self, forward_context, **kwargs):
        loads = self.metadata.loads
        pairs = [each for load in loads for each in zip(load.names, load.block_ids, strict=False)]
        self.errors |= {n for name, n in pairs if not self.is_whole(self.shelf[name, self.rank])}
        self.thread = threading.Thread(target=self.load_slowly, args=(list(loads),))
        self.thread.start()

    def load_slowly(self, loads):
        time.sleep(0.02)
        for load in loads:
            self.load(load)

    def wait_for_layer_load(self, layer_name):
        self.thread.join()


class BehindConnector(MemoryConnector):
    worker_cls = BehindWorker


@pytest.fixture
def make(serve, tmp_path):
    def make(connector, **settings):
        return serve(
            EngineConfig(
                cache=CacheShape(16, NUM_BLOCKS),
                connector=registered_name("connectors", connector),
                options={"shelf": str(tmp_path)},
                **settings,
            )
        )

    return make


@pytest.fixture
def shelf(tmp_path):
    """What the connectors keep, by name of the block and rank."""
    return SHELVES[str(tmp_path)]


def damage(kept):
    next(iter(kept.pages.values())).numpy().reshape(-1)[3] += 1


@pytest.mark.parametrize("connector", [MemoryConnector, LateConnector, BehindConnector])
@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_failed_load_voids_the_step(kit, make, shelf, connector, policy):
    """The step counts for no request in it; what it has computed is not saved."""
    prompt, another = some_prompts(2)
    host = make(connector, on_load_failure=policy)
    host.generate([prompt], 1)
    host.scheduler.pool.reset()
    damage(list(shelf.values())[1])
    other, request = (host.submit(each, kit.NEW_TOKENS) for each in ([0, *another], prompt))
    while not host.counts["loads_failed"]:
        saved = set(shelf)
        host.step()
    assert host.counts["steps_refused"] == 1
    assert set(shelf) <= saved, "nothing of that step is kept"
    if connector is BehindConnector:
        assert not host.executor.worker.connector.side.thread.is_alive()
    host.run()
    assert other.output == kit.reference([0, *another])
    if policy == "fail":
        assert (request.state, request.output) == ("failed", [])
        assert request.error == "1 KV blocks could not be loaded"
    else:
        assert (request.state, request.output) == ("finished", kit.reference(prompt))
        assert host.counts["tokens_loaded"] == 16, "the block before it"
    assert host.scheduler.pool.num_free == NUM_BLOCKS


def test_refused_step_waits_for_its_loads(kit, make):
    """Its blocks go to others, into which a thread must not write then."""
    (prompt,) = some_prompts(1)
    host = make(BehindConnector)
    weights = LocalWeights(0, host.executor.worker.model)
    host.generate([prompt], 1)
    host.scheduler.pool.reset()
    host.submit(prompt, 1)
    plan = host.scheduler.plan()
    assert plan.loads_first
    weights.change(1)
    results = host.executor.step(plan)
    assert results[0].tokens is None
    assert not host.executor.worker.connector.side.thread.is_alive()
    host.scheduler.update(plan, results)
    assert host.generate([prompt], kit.NEW_TOKENS) == [kit.reference(prompt, 1)]
    weights.close()


@pytest.mark.parametrize("connector", [MemoryConnector, LateConnector, BehindConnector])
def test_load_that_failed_on_one_rank_is_recomputed_by_both(kit, make, shelf, connector):
    (prompt,) = some_prompts(1)
    host = make(connector, num_ranks=2)
    for _ in range(2):
        # The ranks share a process: in the first step, which is refused, either may hide the
        # weights from the other.
        host.step()
    host.generate([prompt], 1)
    for (_, rank), kept in shelf.items():
        if rank:
            damage(kept)
    host.scheduler.pool.reset()
    host.submit([*prompt, *range(32)], 1)
    while not host.counts["loads_failed"]:
        saved = set(shelf)
        host.step()
    assert set(shelf) <= saved, "a rank has saved what the step computed"
    host.run()
    # What was computed is saved once more, by both.
    host.scheduler.pool.reset()
    assert host.generate([prompt], kit.NEW_TOKENS) == [kit.reference(prompt)]
    assert host.counts["loads_failed"] == 1
    assert host.counts["tokens_loaded"] > 0
