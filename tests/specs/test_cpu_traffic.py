"""Manager and worker together, under traffic: many requests, few slots, jobs side by side, damage.

The checker is outside: it knows which bytes belong to which key, and looks at every block that was
loaded.
"""

import collections
import random

import numpy as np
import pytest
import torch

from wtransfer.specs.interface import GPULoadStoreSpec, LookupResult, ReqContext

NUM_BLOCKS = 32
PER_REQUEST = 4


class Traffic:
    """Requests that store the blocks of their keys, or load them where they are kept."""

    def __init__(self, rig, make_key, seed):
        self.rig, self.make_key = rig, make_key
        self.random = random.Random(seed)
        self.manager, self.worker = rig.spec.get_manager(), rig.worker
        self.free = list(range(NUM_BLOCKS))
        self.jobs = {}
        self.in_flight = {}
        # A block that could not be loaded is asked for under another key, as the fence does it.
        self.tries = collections.Counter()
        self.counts = {"loaded": 0, "refused": 0, "stored": 0, "not stored": 0, "full": 0}
        self.number = 0

    def bytes_of(self, number):
        nbytes = sum(tensor[0].nbytes for tensor in self.rig.tensors)
        return np.random.default_rng(number).integers(0, 256, nbytes, np.uint8)

    def write(self, block, number):
        values = np.split(self.bytes_of(number), len(self.rig.tensors))
        for tensor, value in zip(self.rig.tensors, values, strict=True):
            tensor[block] = torch.from_numpy(value)

    def begin(self):
        """Begin one request: a run of keys, as many as there are hits are loaded, or all stored."""
        if len(self.free) < PER_REQUEST:
            self.worker.wait(set(self.jobs))
            self.end()
        self.number += 1
        context = ReqContext(str(self.number))
        self.manager.on_new_request(context)
        first = self.random.randrange(40)
        numbers = list(range(first, first + self.random.randint(1, PER_REQUEST)))
        keys = [self.make_key(number + 1000 * self.tries[number]) for number in numbers]
        hits = 0
        while hits < len(keys) and self.manager.lookup(keys[hits], context) is LookupResult.HIT:
            hits += 1
        if hits:
            source = self.manager.prepare_load(keys[:hits], context)
            blocks = [self.free.pop() for _ in range(hits)]
            for block in blocks:
                self.write(block, 10**6 + self.number)
            assert self.worker.submit_load(self.number, source, GPULoadStoreSpec(blocks))
            self.in_flight[self.number] = source.slots
            self.jobs[self.number] = ("load", keys[:hits], numbers, blocks, context)
            return
        output = self.manager.prepare_store(keys, context)
        if output is None:
            self.counts["full"] += 1
            return
        by_key = dict(zip(keys, numbers, strict=True))
        blocks = [self.free.pop() for _ in output.keys_to_store]
        for block, key in zip(blocks, output.keys_to_store, strict=True):
            self.write(block, by_key[key])
        assert self.worker.submit_store(self.number, GPULoadStoreSpec(blocks), output.store_spec)
        self.in_flight[self.number] = output.store_spec.slots
        self.jobs[self.number] = ("store", output.keys_to_store, numbers, blocks, context)

    def end(self):
        """Take what has ended."""
        for result in self.worker.get_finished():
            del self.in_flight[result.job_id]
            kind, keys, numbers, blocks, context = self.jobs.pop(result.job_id)
            if kind == "load":
                if result.success:
                    for block, number in zip(blocks, numbers, strict=False):
                        assert self.rig.block(block) == self.bytes_of(number).tobytes()
                else:
                    self.tries.update(numbers)
                self.counts["loaded" if result.success else "refused"] += 1
                self.manager.complete_load(keys, context)
            else:
                self.counts["stored" if result.success else "not stored"] += 1
                self.manager.complete_store(keys, context, result.success)
            self.free += blocks

    def flip(self):
        """Flip a bit at rest: one that is flipped under a copy, once judged, nobody can see."""
        part = self.rig.part
        slot = self.random.randrange(part.layout.num_slots)
        if not any(slot in slots for slots in self.in_flight.values()):
            where = part.slots if self.random.random() < 0.7 else part._headers
            where[slot, self.random.randrange(where.shape[1])] ^= 1 << self.random.randrange(8)

    def run(self, num_steps, damage=0.0):
        for _ in range(num_steps):
            self.begin()
            if self.random.random() < damage:
                self.flip()
            if self.random.random() < 0.3:
                self.end()
            if self.random.random() < 0.15:
                # Copies are slow where others work, and what is in flight is no hit.
                self.worker.wait(set(self.jobs))
            if self.random.random() < 0.02:
                self.manager.reset_cache()
        self.worker.wait(set(self.jobs))
        self.end()
        assert not self.jobs
        assert sorted(self.free) == list(range(NUM_BLOCKS))


@pytest.fixture(params=["lru", "arc"])
def rig(request, make_rig):
    return make_rig(
        num_layers=4,
        page_nbytes=(512,),
        num_blocks=NUM_BLOCKS,
        num_slots=4,
        eviction_policy=request.param,
    )


@pytest.mark.parametrize("num_steps", [400, pytest.param(6_000, marks=pytest.mark.nightly)])
def test_every_block_that_is_loaded_is_the_one_that_was_asked_for(rig, arena_rig, num_steps):
    traffic = Traffic(rig, arena_rig.key, 1)
    traffic.run(num_steps)
    assert traffic.counts["loaded"] > num_steps / 40
    assert traffic.counts["stored"] > num_steps / 40
    # Nobody has damaged anything: whatever a manager says is a hit can be loaded.
    assert (traffic.counts["refused"], traffic.counts["not stored"]) == (0, 0)
    assert rig.spec.get_manager().get_stats()["evictions_total"] > 0


@pytest.mark.parametrize("num_steps", [400, pytest.param(6_000, marks=pytest.mark.nightly)])
def test_damage_is_refused_and_nothing_else(rig, arena_rig, num_steps):
    traffic = Traffic(rig, arena_rig.key, 2)
    traffic.run(num_steps, damage=0.5)
    assert traffic.counts["loaded"] > 5
    assert traffic.counts["refused"] > 5
    assert set(rig.failures()) <= {
        "loads_failed_checksum",
        "loads_failed_torn",
        "loads_failed_absent",
        "loads_failed_reused",
    }
