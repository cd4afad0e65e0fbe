"""A manager and workers over a tier whose calls can be held, or fail."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import defaultdict

import torch

from wtransfer.config import OffloadingCacheConfig, OffloadingConfig, OffloadingParallelConfig
from wtransfer.kv.keys import fence_key, make_offload_key
from wtransfer.specs.arena import ArenaLayout
from wtransfer.specs.interface import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
)
from wtransfer.specs.tier import TierLoadStoreSpec
from wtransfer.specs.tier_spec import tier_spec
from wtransfer.testing.fakes import MemoryTier

PAGE, NUM_LAYERS, NUM_BLOCKS = 64, 2, 16
PATIENCE_S = 10.0
numbers = itertools.count()


def key(number, weights="weights"):
    # With a check hash, as hosts have them.
    return fence_key(make_offload_key(b"block %d" % number), weights, b"check %d" % number)


def until(condition):
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Gate(MemoryTier):
    """A tier whose calls can be held, or fail."""

    held: set[str]
    failing: set[str]
    error = ConnectionError
    entered: defaultdict[str, int]
    gate: threading.Event

    def call(self, name):
        self.entered[name] += 1
        if name in self.failing:
            raise self.error(f"{name} is refused")
        if name in self.held:
            self.gate.wait(30)

    def contains(self, keys):
        self.call("contains")
        return super().contains(keys)

    def put(self, key, data):
        self.call("put")
        super().put(key, data)

    def get(self, key, into):
        self.call("get")
        return super().get(key, into)

    def remove(self, keys):
        self.call("remove")
        super().remove(keys)

    def close(self):
        self.call("close")
        super().close()


class Rig:
    """A manager, and a worker and a cache of each rank, over one store."""

    def __init__(
        self,
        *,
        num_ranks=1,
        blocks_per_chunk=1,
        shelf=None,
        page=PAGE,
        num_slots=0,
        tier_cls=Gate,
        tells=False,
        **options,
    ):
        new = {"held": set(), "failing": set(), "entered": defaultdict(int)}
        self.tier_cls = type("Held", (tier_cls,), {**new, "gate": threading.Event()})
        if num_slots:
            options["cpu_bytes_to_use"] = 1 << 20
        options = {"shelf": shelf or f"shelf {next(numbers)}", **options}
        self.kept = MemoryTier.shelves[options["shelf"]]
        self.workers, self.caches = [], []
        engine_id = f"rig {os.getpid()} {next(numbers)}"
        for rank in range(num_ranks):
            config = OffloadingConfig(
                extra_config=options,
                engine_id=engine_id,
                worker_kv_bytes_per_block=NUM_LAYERS * page,
                cache=OffloadingCacheConfig(16, blocks_per_chunk),
                parallel=OffloadingParallelConfig(rank=rank, world_size=num_ranks),
                enable_kv_cache_events=tells,
            )
            spec = tier_spec(self.tier_cls)(config)
            if num_slots:
                # Of whole pages of memory, there would be more.
                part_nbytes = NUM_LAYERS * page * blocks_per_chunk
                spec.layout = ArenaLayout(num_slots, part_nbytes, num_ranks)
            layers = [torch.zeros(NUM_BLOCKS, page, dtype=torch.uint8) for _ in range(NUM_LAYERS)]
            tensors = [CanonicalKVCacheTensor(each, page) for each in layers]
            refs = [CanonicalKVCacheRef(n, page) for n in range(NUM_LAYERS)]
            self.caches.append(layers)
            self.workers.append(spec.get_worker(CanonicalKVCaches(tensors, [refs])))
        self.manager = spec.get_manager()
        self.num_slots = num_slots
        self.jobs = itertools.count()
        self.ended = [{} for _ in self.workers]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.tier_cls.gate.set()
        self.manager.shutdown()
        for worker in self.workers:
            worker.shutdown()

    @property
    def held(self):
        return self.tier_cls.held

    @property
    def failing(self):
        return self.tier_cls.failing

    def request(self):
        context = ReqContext(f"request {next(numbers)}")
        self.manager.on_new_request(context)
        return context

    def fill(self, block, seed):
        for rank, layers in enumerate(self.caches):
            for n, layer in enumerate(layers):
                generator = torch.Generator().manual_seed(1000 * seed + 10 * rank + n)
                layer[block] = torch.randint(0, 256, layer[block].shape, generator=generator)

    def content(self, block):
        return [layer[block].tolist() for layers in self.caches for layer in layers]

    def lookup(self, keys, context=None):
        """Return the answers, once there are some."""
        context, end = context or self.request(), time.monotonic() + PATIENCE_S
        while True:
            found = [self.manager.lookup(each, context) for each in keys]
            if LookupResult.RETRY not in found:
                return found
            assert time.monotonic() < end
            time.sleep(0.001)

    def places(self, keys):
        """Return the slots from 0 on, or the tier where there is no arena."""
        slots = range(len(keys)) if self.num_slots else ()
        return TierLoadStoreSpec(keys, in_arena=dict(enumerate(slots)))

    def submit_store(self, keys, blocks, **more):
        job = next(self.jobs)
        for worker in self.workers:
            source = GPULoadStoreSpec(blocks, **more)
            assert worker.submit_store(job, source, self.places(keys))
        return job

    def submit_load(self, keys, blocks, **more):
        job = next(self.jobs)
        for worker in self.workers:
            to = GPULoadStoreSpec(blocks, **more)
            assert worker.submit_load(job, self.places(keys), to)
        return job

    def has_ended(self, job, rank=0):
        for each, worker in zip(self.ended, self.workers, strict=True):
            each.update((result.job_id, result) for result in worker.get_finished())
        return job in self.ended[rank]

    def success(self, job, within_s=PATIENCE_S):
        """Wait until a job has ended on all ranks; return whether it succeeded on each."""
        end = time.monotonic() + within_s
        while not all(self.has_ended(job, rank) for rank in range(len(self.workers))):
            assert time.monotonic() < end
            time.sleep(0.001)
        return [each[job].success for each in self.ended]

    def keep(self, numbers, blocks=None, weights="weights"):
        """Store blocks as a host does; return whether there was room, and it succeeded."""
        context, blocks = self.request(), blocks or list(range(len(numbers)))
        for block, number in zip(blocks, numbers, strict=True):
            self.fill(block, number)
        room = self.manager.prepare_store([key(n, weights) for n in numbers], context)
        if room is None:
            return False
        to = [blocks[numbers.index(n)] for n in numbers if key(n, weights) in room.keys_to_store]
        job = next(self.jobs)
        for worker in self.workers:
            assert worker.submit_store(job, GPULoadStoreSpec(to), room.store_spec)
        success = all(self.success(job))
        self.manager.complete_store(room.keys_to_store, context, success)
        self.manager.on_request_finished(context)
        return success

    def begin_load(self, numbers, blocks, context=None):
        """Look blocks up, which are hits, and begin their load; return what `end_load` takes."""
        context, keys = context or self.request(), [key(n) for n in numbers]
        assert self.lookup(keys, context) == [LookupResult.HIT] * len(keys)
        source = self.manager.prepare_load(keys, context)
        job = next(self.jobs)
        for worker in self.workers:
            assert worker.submit_load(job, source, GPULoadStoreSpec(blocks))
        return job, keys, context

    def end_load(self, job, keys, context):
        """Return whether a load has succeeded, as a host does that was told by all ranks."""
        success = all(self.success(job))
        if not success:
            self.manager.load_failed(keys, context, suspect=True)
        self.manager.complete_load(keys, context)
        self.manager.on_request_finished(context)
        return success

    def load(self, numbers, blocks):
        return self.end_load(*self.begin_load(numbers, blocks))

    def is_right(self, block, number):
        """Return whether a block of the cache has what `fill` gives it."""
        found = self.content(block)
        self.fill(block, number)
        return found == self.content(block)

    def stats(self):
        return {**self.workers[0].get_stats(), **self.manager.get_stats()}

    def store(self, numbers):
        """Store blocks 0, 1, ... of the cache, filled by their numbers."""
        for block, number in enumerate(numbers):
            self.fill(block, number)
        return self.success(self.submit_store([key(n) for n in numbers], list(range(len(numbers)))))
