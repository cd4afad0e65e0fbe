"""What the tests of the mini engine share: reference outputs, tiers, a trainer."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from wtransfer import Publisher
from wtransfer.specs.arena import ArenaLayout
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, ModelShape
from wtransfer.testing.mini_engine.model import PagedTransformer
from wtransfer.testing.mini_engine.reference import reference_output

NEW_TOKENS = 4
PATIENCE_S = 30.0
MODEL = ModelShape()


def reference(prompt, seed=0, count=NEW_TOKENS):
    return list(reference_output(prompt, count, seed).output)


def references(all_prompts, seed=0, count=NEW_TOKENS):
    return [reference(prompt, seed, count) for prompt in all_prompts]


def nbytes_per_block(block_size):
    return EngineConfig(cache=CacheShape(block_size, 1)).kv_cache_config.bytes_per_block


def cpu_tier(block_size, num_blocks):
    """Return options of the arena, for so many blocks."""
    layout = ArenaLayout(num_blocks, nbytes_per_block(block_size), 1)
    return {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": layout.used_nbytes}


def offloading(block_size, num_blocks):
    """Return settings of a host that keeps KV cache in the arena."""
    return {"connector": "OffloadingConnector", "options": cpu_tier(block_size, num_blocks)}


def manager_of(host):
    """Return the manager of the spec."""
    return host.scheduler.connector.side._manager


def tier_worker_of(host):
    """Return the worker of the spec."""
    return host.executor.worker.connector.side._made


def tier_stats(host):
    """Return the numbers of the scheduler's side."""
    return host.scheduler.connector.get_stats()


def record(host):
    """Return the plans of all steps to come."""
    plans, step = [], host.executor.step
    host.executor.step = lambda plan: plans.append(plan) or step(plan)
    return plans


def contents(host, request):
    """Return the keys and values that the only rank has of a request, as bytes."""
    count = request.num_computed_tokens
    cache, table = host.executor.worker.cache, torch.tensor(request.block_ids)
    layers = [cache.read(layer, table, count, count) for layer in range(MODEL.num_layers)]
    return [each.numpy().tobytes() for each in layers]


def check_pool(pool):
    """Check that every block is free or held, and that what is known of them fits together."""
    held = [block for block, count in enumerate(pool._num_pins) if count]
    assert min(pool._num_pins, default=0) >= 0
    assert sorted([*pool._free, *held]) == list(range(pool.num_blocks))
    assert {block: key for key, block in pool._blocks.items()} == pool._keys


class Trainer:
    """Publishes the weights of any seed."""

    def __init__(self):
        self._model = PagedTransformer(MODEL, 0)
        self._publisher = Publisher(self._model, engine="shm")
        self._threads = ThreadPoolExecutor(1)

    @property
    def settings(self):
        """Settings of an engine that gets these weights."""
        return {"join": self._publisher.address, "token": self._publisher.token}

    def publish(self, version, seed):
        """Publish the weights of a seed in the background; return the future report."""
        self._publisher.wait_for_workers(1, PATIENCE_S)
        self._model.draw_weights(seed)
        return self._threads.submit(self._publisher.publish, version)

    def close(self):
        self._publisher.close()
        self._threads.shutdown()
