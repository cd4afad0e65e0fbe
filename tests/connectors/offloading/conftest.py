"""Both sides of the offloading connector, over caches of a few bytes, and steps made by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from wtransfer import KVConnectorFactory, KVTransferConfig, ServingConfig
from wtransfer.config import KVCacheConfig, ModelConfig, ParallelConfig
from wtransfer.connectors.interface import KVConnectorOutput, KVConnectorRole
from wtransfer.testing.mini_engine.contract import (
    CachedRequestData,
    KVCacheBlocks,
    NewRequestData,
    Request,
    SchedulerOutput,
)
from wtransfer.testing.mini_engine.serialize import deserialize, serialize
from wtransfer.weight_version import process_weights

SEED_SPEC = Path(__file__).parents[2] / "specs" / "seed_spec.py"
BLOCK_SIZE = 4
NUM_BLOCKS = 16
PATIENCE = 2000


@pytest.fixture(autouse=True)
def seed_spec(monkeypatch):
    """The module of a spec in the seed's style, found by its name."""
    spec = importlib.util.spec_from_file_location("seed_spec", SEED_SPEC)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "seed_spec", module)
    spec.loader.exec_module(module)
    return module


class Bench:
    """A scheduler's side and the workers' sides, in one process, each over a cache of its own."""

    def __init__(self, num_ranks=1, **options):
        caches = [
            {name: torch.zeros((NUM_BLOCKS, BLOCK_SIZE, width)) for name, width in LAYERS.items()}
            for _ in range(num_ranks)
        ]
        cache_config = KVCacheConfig(
            NUM_BLOCKS, BLOCK_SIZE, sum(each[0].nbytes for each in caches[0].values())
        )

        def side(role, rank=0):
            config = ServingConfig(
                parallel_config=ParallelConfig(
                    rank=rank, world_size=num_ranks, tensor_parallel_size=num_ranks
                ),
                kv_transfer_config=KVTransferConfig(
                    kv_connector="OffloadingConnector",
                    engine_id="bench",
                    kv_role="kv_both",
                    kv_connector_extra_config={"cpu_bytes_to_use": 1 << 20, **options},
                ),
                cache_config=cache_config,
                model_config=ModelConfig("model", "float32"),
            )
            return KVConnectorFactory.create_connector(config, role, cache_config)

        self.scheduler = side(KVConnectorRole.SCHEDULER)
        self.workers = [side(KVConnectorRole.WORKER, rank) for rank in range(num_ranks)]
        self.caches = caches
        for worker, cache in zip(self.workers, caches, strict=True):
            worker.register_kv_caches(cache)
        said = {rank: w.get_handshake_metadata() for rank, w in enumerate(self.workers)}
        self.scheduler.set_xfer_handshake_metadata(said)

    @property
    def manager(self):
        """Of the spec."""
        return self.scheduler.side._manager

    @property
    def tier(self):
        """The spec's worker on the first rank."""
        return self.workers[0].side._made

    def ask(self, request, num_computed=0):
        return self.scheduler.get_num_new_matched_tokens(request, num_computed)

    def allocate(self, request, blocks, num_external=0):
        request.block_ids = list(blocks)
        self.scheduler.update_state_after_alloc(request, KVCacheBlocks(blocks), num_external)

    def fill(self, blocks, value):
        """Write what a model would: on every rank something else."""
        for rank, cache in enumerate(self.caches):
            for layer in cache.values():
                for place, block in enumerate(blocks):
                    layer[block] = value + place + 100 * rank

    def values(self, blocks, rank=0):
        """Return what is in blocks; each has one value throughout."""
        for layer in self.caches[rank].values():
            for block in blocks:
                assert len(layer[block].unique()) == 1
        return [float(self.caches[rank]["a"][block].flatten()[0]) for block in blocks]

    def wipe(self):
        for cache in self.caches:
            for layer in cache.values():
                layer.zero_()

    def tell(self, output=None):
        """Return what the workers are told, as it comes to them."""
        return deserialize(serialize(self.scheduler.build_connector_meta(output or step())))

    def work(self, metadata, *, counts=True):
        """Let every worker take the step; return what each has said."""
        said = []
        for worker in self.workers:
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(deserialize(serialize(metadata)))
            worker.start_load_kv(None)
            if counts:
                worker.wait_for_save()
            sent, received = worker.get_finished(set())
            bad = worker.get_block_ids_with_load_errors()
            meta = worker.build_connector_worker_meta()
            worker.clear_connector_metadata()
            said.append(SimpleNamespace(sent=sent, received=received, bad=bad, meta=meta))
        return said

    def hear(self, said):
        for each in said:
            self.scheduler.update_connector_output(
                KVConnectorOutput(kv_connector_worker_meta=deserialize(serialize(each.meta)))
            )

    def step(self, output=None, *, counts=True):
        """Take a step; return what the workers were told, and what they have said."""
        metadata = self.tell(output)
        said = self.work(metadata, counts=counts)
        self.hear(said)
        return metadata, said

    def settle(self):
        """Take steps until nothing is under way; return all that was said meanwhile."""
        heard = []
        for _ in range(PATIENCE):
            if not self.scheduler.has_pending_push_work():
                return heard
            heard += self.step()[1]
        raise AssertionError("jobs are under way and do not end")

    def keep(self, request, blocks, value=1.0):
        """Compute all of a request, let it be kept, and end it."""
        self.ask(request)
        self.allocate(request, blocks)
        self.fill(blocks, value)
        self.step(step(new=[(request, 0, request.num_tokens)]))
        self.settle()
        assert self.scheduler.request_finished(request, blocks) == (False, None)

    def close(self):
        for each in (self.scheduler, *self.workers):
            each.shutdown()
            each.shutdown()


LAYERS = {"a": 8, "b": 8}


def step(new=(), cached=(), preempted=(), resumed=()):
    """Return a step: requests, each with the tokens that are there, and those that are computed."""
    output = SchedulerOutput(preempted_req_ids=set(preempted))
    for request, before, count in new:
        blocks = (list(request.block_ids),)
        output.scheduled_new_reqs.append(
            NewRequestData(request.request_id, request.prompt_token_ids, blocks, before)
        )
        output.num_scheduled_tokens[request.request_id] = count
    data = CachedRequestData(resumed_req_ids=set(resumed))
    for request, before, count in cached:
        data.req_ids.append(request.request_id)
        data.new_block_ids.append(
            (list(request.block_ids),) if request.request_id in resumed else None
        )
        data.num_computed_tokens.append(before)
        output.num_scheduled_tokens[request.request_id] = count
    output.scheduled_cached_reqs = data
    return output


@pytest.fixture
def ask_for():
    """Maker of requests, of so many tokens that differ by the first."""

    def make(name, num_tokens, first=0, params=None):
        return Request(name, [first, *range(1, num_tokens)], 100, params)

    return make


@pytest.fixture
def a_step():
    return step


@pytest.fixture
def weights():
    held = process_weights.hold("A")
    yield held
    held.close()


@pytest.fixture
def bench(weights):
    """Maker of benches, which are closed with the test."""
    made = []

    def make(num_ranks=1, **options):
        made.append(Bench(num_ranks, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()
