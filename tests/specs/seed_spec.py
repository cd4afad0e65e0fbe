"""A spec as it was written in the seed's time, but for the module that its bases come from.

What it does is what vLLM 0.17 does on its way to host memory: hashes, numbers in arrays, handlers
that find the dimension of the blocks by asking the attention backend.
"""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from wtransfer.specs.interface import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingHandler,
    OffloadingManager,
    OffloadingSpec,
)


class SeedLoadStoreSpec(LoadStoreSpec):
    def __init__(self, block_ids):
        self.block_ids = np.array(block_ids, dtype=np.int64)

    @staticmethod
    def medium():
        return "CPU"


@dataclass
class PrepareStoreOutput:
    block_hashes_to_store: list[bytes]
    store_spec: LoadStoreSpec
    block_hashes_evicted: list[bytes]


@dataclass
class OffloadingEvent:
    block_hashes: list[bytes]
    block_size: int
    medium: str
    removed: bool


@dataclass
class Status:
    number: int
    ref_cnt: int = -1


class SeedManager(OffloadingManager):
    """Asserts what it is promised, and forgets nothing by itself."""

    def __init__(self, num_blocks, block_size):
        self.free = list(range(num_blocks))
        self.blocks: OrderedDict[bytes, Status] = OrderedDict()
        self.block_size = block_size
        self.events: list[OffloadingEvent] = []

    def lookup(self, block_hashes):
        hits = 0
        for block_hash in block_hashes:
            block = self.blocks.get(block_hash)
            if block is None or block.ref_cnt < 0:
                break
            hits += 1
        return hits

    def prepare_load(self, block_hashes):
        numbers = []
        for block_hash in block_hashes:
            block = self.blocks[block_hash]
            assert block.ref_cnt >= 0
            block.ref_cnt += 1
            numbers.append(block.number)
        return SeedLoadStoreSpec(numbers)

    def touch(self, block_hashes):
        for block_hash in reversed(list(block_hashes)):
            if block_hash in self.blocks:
                self.blocks.move_to_end(block_hash)

    def complete_load(self, block_hashes):
        for block_hash in block_hashes:
            block = self.blocks[block_hash]
            assert block.ref_cnt > 0
            block.ref_cnt -= 1

    def prepare_store(self, block_hashes):
        new = [each for each in block_hashes if each not in self.blocks]
        missing = len(new) - len(self.free)
        evicted = []
        if missing > 0:
            idle = [each for each, block in self.blocks.items() if block.ref_cnt == 0]
            evicted = [each for each in idle if each not in block_hashes][:missing]
            if len(evicted) < missing:
                return None
        for each in evicted:
            self.free.append(self.blocks.pop(each).number)
        if evicted:
            self.events.append(OffloadingEvent(evicted, self.block_size, "CPU", removed=True))
        for each in new:
            self.blocks[each] = Status(self.free.pop())
        where = SeedLoadStoreSpec([self.blocks[each].number for each in new])
        return PrepareStoreOutput(new, where, evicted)

    def complete_store(self, block_hashes, success=True):
        stored = []
        for each in block_hashes:
            block = self.blocks[each]
            assert block.ref_cnt == -1
            if success:
                block.ref_cnt = 0
                stored.append(each)
            else:
                self.free.append(self.blocks.pop(each).number)
        if stored:
            self.events.append(OffloadingEvent(stored, self.block_size, "CPU", removed=False))

    def take_events(self):
        yield from self.events
        self.events.clear()


def expand(numbers, factor, skip=0):
    whole = (numbers[:, None] * factor + np.arange(factor)).reshape(-1)
    return whole[skip:]


class SeedHandler(OffloadingHandler):
    """Copies in one direction, on a thread, in the order of submission."""

    def __init__(self, source, destination, source_factor, destination_factor):
        self.source, self.destination = source, destination
        self.source_factor, self.destination_factor = source_factor, destination_factor
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="seed-handler")
        self.jobs: dict[int, Any] = {}

    def transfer_async(self, job_id, spec):
        source, destination = spec
        assert source.block_ids.ndim == destination.block_ids.ndim == 1
        skip = -destination.block_ids.size % self.source_factor
        rows_from = expand(source.block_ids, self.source_factor, skip)
        rows_to = expand(destination.block_ids, self.destination_factor)
        # The last chunk may be filled in part.
        count = min(rows_from.size, rows_to.size)
        self.jobs[job_id] = self.pool.submit(self.copy, rows_from[:count], rows_to[:count])
        return True

    def copy(self, rows_from, rows_to):
        for source, destination in zip(self.source, self.destination, strict=True):
            destination[torch.from_numpy(rows_to)] = source[torch.from_numpy(rows_from)]

    def get_finished(self):
        done = [job_id for job_id, job in self.jobs.items() if job.done()]
        return [(job_id, self.jobs.pop(job_id).exception() is None) for job_id in done]

    def wait(self, job_ids):
        for job_id in job_ids & self.jobs.keys():
            self.jobs[job_id].exception()

    def shutdown(self):
        self.pool.shutdown()


class SeedSpec(OffloadingSpec):
    def __init__(self, vllm_config, kv_cache_config):
        super().__init__(vllm_config, kv_cache_config)
        self.factor, rest = divmod(self.offloaded_block_size, self.gpu_block_size)
        assert rest == 0
        nbytes = kv_cache_config.bytes_per_block * self.factor
        nbytes *= vllm_config.parallel_config.world_size
        self.num_blocks = int(self.extra_config["cpu_bytes_to_use"]) // nbytes
        self.manager = None

    def get_manager(self):
        if self.manager is None:
            self.manager = SeedManager(self.num_blocks, self.offloaded_block_size)
        return self.manager

    def get_handlers(self, kv_caches, attn_backends):
        gpu, cpu = [], []
        for name, tensor in kv_caches.items():
            shape = attn_backends[name].get_kv_cache_shape(
                num_blocks=1234, block_size=16, num_kv_heads=8, head_size=256
            )
            assert len(shape) == tensor.ndim
            assert shape.index(1234) == 0
            assert tensor.shape[shape.index(16)] == self.gpu_block_size
            cpu.append(torch.zeros(self.num_blocks * self.factor, *tensor.shape[1:]).to(tensor))
            gpu.append(tensor)
        yield GPULoadStoreSpec, SeedLoadStoreSpec, SeedHandler(gpu, cpu, 1, self.factor)
        yield SeedLoadStoreSpec, GPULoadStoreSpec, SeedHandler(cpu, gpu, self.factor, 1)
