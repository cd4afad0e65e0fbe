"""Both sides of a connector over small caches, for tests that make the calls of a step by hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch

from wtransfer import KVConnectorFactory, KVTransferConfig, ServingConfig
from wtransfer.config import KVCacheConfig, KVEventsConfig, ModelConfig, ParallelConfig
from wtransfer.connectors.interface import KVConnectorOutput, KVConnectorRole
from wtransfer.testing.mini_engine.contract import (
    CachedRequestData,
    KVCacheBlocks,
    NewRequestData,
    Request,
    SchedulerOutput,
    block_numbers,
)
from wtransfer.testing.mini_engine.serialize import deserialize, serialize

BLOCK_SIZE = 4
LAYERS = {"a": 8, "b": 8}
PATIENCE = 2000


def request_of(name, num_tokens, first=0, params=None, **particulars):
    """Return a request of so many tokens; prompts differ by the first."""
    request = Request(name, [first, *range(1, num_tokens)], 100, params)
    vars(request).update(particulars)
    return request


def step(new=(), cached=(), resumed=(), **more):
    """Return a step: requests, each with the tokens that are there, and those that are computed."""
    output = SchedulerOutput(**{name: set(each) for name, each in more.items()})
    for request, before, count in new:
        blocks = block_numbers(request.block_tables)
        output.scheduled_new_reqs.append(
            NewRequestData(request.request_id, request.prompt_token_ids, blocks, before)
        )
        output.num_scheduled_tokens[request.request_id] = count
    data = output.scheduled_cached_reqs = CachedRequestData(resumed_req_ids=set(resumed))
    for request, before, count in cached:
        blocks = block_numbers(request.block_tables) if request.request_id in resumed else None
        data.req_ids.append(request.request_id)
        data.new_block_ids.append(blocks)
        data.num_computed_tokens.append(before)
        output.num_scheduled_tokens[request.request_id] = count
    return output


class Sides:
    """A scheduler's side and the workers' sides, each worker with a cache of its own.

    Args:
        connector: Name of the connector.
        num_ranks: Workers.
        num_blocks: Blocks of each cache.
        model: Name of the model.
        engine_id: Name of the instance.
        role: ``kv_role``.
        module_path: Module of a connector that is not registered.
        meets: Whether the scheduler's side gets the handshakes before the first step.
        groups: KV cache groups; by default one.
        tells: Whether the host takes events; `told` has them, step by step.
        **options: Options of the connector.
    """

    def __init__(
        self,
        connector,
        num_ranks=1,
        *,
        num_blocks=16,
        model="model",
        engine_id="sides",
        role="kv_both",
        module_path=None,
        meets=True,
        groups=(),
        tells=False,
        **options,
    ):
        self.told = []
        self.caches = [
            {name: torch.zeros((num_blocks, BLOCK_SIZE, width)) for name, width in LAYERS.items()}
            for _ in range(num_ranks)
        ]
        nbytes = sum(each[0].nbytes for each in self.caches[0].values())
        config = ServingConfig(
            kv_transfer_config=KVTransferConfig(connector, engine_id, role, module_path, options),
            cache_config=KVCacheConfig(num_blocks, BLOCK_SIZE, nbytes, groups),
            model_config=ModelConfig(model, "float32"),
            kv_events_config=KVEventsConfig(tells),
        )
        parallel = [
            ParallelConfig(rank=rank, world_size=num_ranks, tensor_parallel_size=num_ranks)
            for rank in range(num_ranks)
        ]
        configs = [dataclasses.replace(config, parallel_config=each) for each in parallel]
        make = KVConnectorFactory.create_connector
        self.scheduler = make(configs[0], KVConnectorRole.SCHEDULER)
        self.workers = [make(each, KVConnectorRole.WORKER) for each in configs]
        for worker, cache in zip(self.workers, self.caches, strict=True):
            worker.register_kv_caches(cache)
        if meets:
            self.meet()

    def meet(self):
        """Give the scheduler's side the handshakes; return them."""
        said = {rank: each.get_handshake_metadata() for rank, each in enumerate(self.workers)}
        self.scheduler.set_xfer_handshake_metadata(said)
        return said

    # -- requests

    def ask(self, request, num_computed=0):
        return self.scheduler.get_num_new_matched_tokens(request, num_computed)

    def allocate(self, request, blocks, num_external=0):
        request.block_tables = list(map(list, blocks if isinstance(blocks, tuple) else (blocks,)))
        held = KVCacheBlocks(block_numbers(request.block_tables))
        self.scheduler.update_state_after_alloc(request, held, num_external)

    def begin(self, request, blocks=range(8)):
        """Let a request have blocks; return how many of its tokens are to be loaded."""
        self.scheduler.on_new_request(request)
        found, _ = self.ask(request)
        self.allocate(request, list(blocks), found)
        return found

    def keep(self, request, blocks, value=1.0):
        """Compute all of a request, let it be kept, and end it."""
        self.ask(request)
        self.allocate(request, blocks)
        self.fill(blocks, value)
        self.step(step(new=[(request, 0, request.num_tokens)]))
        self.settle()
        assert self.scheduler.request_finished(request, blocks) == (False, None)

    # -- the caches

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

    # -- steps

    def tell(self, output=None):
        """Return what the workers are told, as it comes to them."""
        return deserialize(serialize(self.scheduler.build_connector_meta(output or step())))

    def load(self, metadata):
        """Begin a step on every worker."""
        for worker in self.workers:
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(deserialize(serialize(metadata)))
            worker.start_load_kv(None)

    def save(self):
        """Let the step count; what is in the caches counts as computed."""
        for worker, cache in zip(self.workers, self.caches, strict=True):
            for name, layer in cache.items():
                worker.wait_for_layer_load(name)
                worker.save_kv_layer(name, layer, None)
            worker.wait_for_save()

    def end(self):
        """End the step; return what each worker has said."""
        said = []
        for worker in self.workers:
            sent, received = worker.get_finished(set())
            bad = worker.get_block_ids_with_load_errors()
            meta = worker.build_connector_worker_meta()
            worker.clear_connector_metadata()
            said.append(
                SimpleNamespace(sent=sent or set(), received=received or set(), bad=bad, meta=meta)
            )
        return said

    def work(self, metadata, *, counts=True):
        """Let every worker take a step; return what each has said."""
        self.load(metadata)
        if counts:
            self.save()
        return self.end()

    def hear(self, said):
        for each in said:
            meta = deserialize(serialize(each.meta))
            output = KVConnectorOutput(
                finished_recving=each.received,
                kv_connector_worker_meta=meta,
                invalid_block_ids=each.bad,
            )
            self.scheduler.update_connector_output(output)

    def step(self, output=None, *, counts=True):
        """Take a step; return what the workers were told, and what they have said."""
        metadata = self.tell(output)
        said = self.work(metadata, counts=counts)
        self.hear(said)
        self.told += self.scheduler.take_events()
        return metadata, said

    def settle(self):
        """Take steps until nothing is under way; return all that was said meanwhile."""
        heard = []
        for _ in range(PATIENCE):
            if not self.scheduler.has_pending_push_work():
                return heard
            heard += self.step()[1]
        raise AssertionError("jobs are under way and do not end")

    def close(self):
        for each in (self.scheduler, *self.workers):
            each.shutdown()
            each.shutdown()
