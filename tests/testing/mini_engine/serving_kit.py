"""What the tests of the mini engine share: conversations, and their reference outputs."""

from __future__ import annotations

import json
import random
import secrets
import socket

import torch

from wtransfer.connectors.naming import BlockNaming
from wtransfer.specs.shared_region import ArenaLayout
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, ModelShape
from wtransfer.testing.mini_engine.reference import (  # noqa: F401
    reference_model,
    reference_output,
)

NEW_TOKENS = 4
PATIENCE_S = 30.0
MODEL = ModelShape()


def prompts(block_size, count=6, seed=0):
    """Return prompts of three whole blocks or more, which begin alike and part after some."""
    drawn = random.Random(seed)

    def text(length):
        return [drawn.randrange(MODEL.vocabulary) for _ in range(length)]

    unit = max(block_size, 16)
    common = text(2 * unit)
    return [
        common[: drawn.randrange(unit // 2, 2 * unit)] + text(2 * unit + drawn.randrange(unit))
        for _ in range(count)
    ]


def reference(prompt, seed=0, count=NEW_TOKENS):
    return list(reference_output(prompt, count, seed).output)


def references(all_prompts, seed=0, count=NEW_TOKENS):
    return [reference(prompt, seed, count) for prompt in all_prompts]


def blocks_for(prompt, block_size, count=NEW_TOKENS):
    return -(-(len(prompt) + count) // block_size)


def nbytes_per_block(block_size, num_ranks=1):
    settings = EngineConfig(cache=CacheShape(block_size, 1), num_ranks=num_ranks)
    return settings.kv_cache_config.bytes_per_block


def cpu_tier(block_size, num_blocks, num_ranks=1, **options):
    """Return options of the arena, for so many blocks."""
    layout = ArenaLayout(num_blocks, nbytes_per_block(block_size, num_ranks), num_ranks)
    nbytes = layout.used_nbytes
    return {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": nbytes, **options}


def shelf_tier(num_blocks, **place):
    """Return options of the third party's spec; its place is a shelf in memory, or a folder."""
    place = place or {"shelf": secrets.token_hex(4)}
    named = {"spec_name": "ShelfSpec", "spec_module_path": "shelf_spec"}
    return {**named, "num_blocks": num_blocks, **place}


def seed_tier(block_size, num_chunks, per_chunk=1):
    """Return options of a spec in the seed's style, for so many chunks of several blocks."""
    return {
        "spec_name": "SeedSpec",
        "spec_module_path": "seed_spec",
        "cpu_bytes_to_use": num_chunks * per_chunk * nbytes_per_block(block_size),
        "block_size": per_chunk * block_size,
    }


def publisher_of(trainer):
    """Return the settings of an engine whose weights a trainer publishes."""
    return dict(zip(("join", "token"), trainer.where, strict=True))


def offloading(tier):
    """Return the settings of a host that keeps KV cache in a tier; None: it has none."""
    return {} if tier is None else {"connector": "OffloadingConnector", "options": tier}


def scheduler_side(host):
    """Return the scheduler's side of a built-in connector."""
    return host.scheduler.connector.side


def worker_side(host):
    """Return the worker's side of a built-in connector, on the only rank."""
    return host.executor.worker.connector.side


def manager_of(host):
    """Return the manager of the spec."""
    return scheduler_side(host)._manager


def tier_worker_of(host):
    """Return the worker of the spec."""
    return worker_side(host)._made


def tier_stats(host):
    """Return the numbers of the scheduler's side."""
    return host.scheduler.connector.get_stats()


def name_by(host, hash_function):
    """Let the connector name blocks by another hash, as `make_local_host` lets the host."""
    side = scheduler_side(host)
    naming = side._naming
    side._naming = BlockNaming(naming.block_size, naming._root, hash_function)


def record(host):
    """Return the plans of all steps to come."""
    plans, step = [], host.executor.step
    host.executor.step = lambda plan: plans.append(plan) or step(plan)
    return plans


def contents(host, request, count=None):
    """Return the keys and values that the only rank has of a request's first tokens, as bytes."""
    count = request.num_computed_tokens if count is None else count
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
    """A publisher in a process of its own."""

    def __init__(self, zygote, log):
        address = f"\0wtransfer-test-{secrets.token_hex(8)}"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)
            listener.listen(1)
            listener.settimeout(PATIENCE_S)
            self.child = zygote.spawn("serving_trainer:main", address, stdout=log, stderr=log)
            self._socket, _ = listener.accept()
        self._socket.settimeout(PATIENCE_S)
        self.where = self._answer()

    def begin(self, label, seed, num_workers=1):
        """Publish the weights of a seed, in the background."""
        order = {"label": label, "seed": seed, "num_workers": num_workers}
        self._socket.send(json.dumps(order).encode())

    def result(self):
        """Return whether all workers committed, and the fingerprint."""
        return self._answer()

    def end(self):
        """Close the publisher; the rest is the interpreter's exit, a second of CPU, and spared."""
        self._socket.send(b"null")
        assert self._answer() == []
        self._socket.close()
        self.child.kill()
        self.child.wait(PATIENCE_S)

    def _answer(self):
        return json.loads(self._socket.recv(1 << 16))
