"""A world in which a fence is tried: a spec that trusts all, ranks with weights, and a checker.

Every block is filled with what it was really computed from: the weights of all ranks, and the
blocks before it. So whoever loads one can see, from outside of the code under test, whether it is
what it should be.
"""

from __future__ import annotations

import collections
import itertools

from wtransfer.blocks import hash_blocks, make_offload_key, witness_blocks
from wtransfer.errors import BlockNotKeptError
from wtransfer.specs.fenced import BlockWitnesses, FencedSpec
from wtransfer.specs.interface import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    LookupResult,
    Medium,
    OffloadingEvent,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    TransferResult,
)
from wtransfer.weights import ProcessWeights


class NamedPlaces(LoadStoreSpec):
    def __init__(self, keys):
        self.keys = keys


class PlainManager(OffloadingManager):
    """Keeps a few keys, the oldest ones give way; it notes every call."""

    def __init__(self, capacity):
        self.capacity = capacity
        self.kept = {}
        self.pins = collections.Counter()
        self.events = []
        self.num_changes = 0
        self.finished = []

    def on_new_request(self, req_context):
        return RequestOffloadingContext()

    def lookup(self, key, req_context):
        whole = self.kept.get(key)
        if whole is None:
            return LookupResult.MISS
        return LookupResult.HIT if whole else LookupResult.HIT_PENDING

    def prepare_load(self, keys, req_context):
        if not all(self.kept.get(key) for key in keys):
            raise BlockNotKeptError("not kept")
        self.pins.update(keys)
        return NamedPlaces(list(keys))

    def complete_load(self, keys, req_context):
        self.pins.subtract(keys)
        assert min(self.pins.values(), default=0) >= 0

    def prepare_store(self, keys, req_context):
        new = [key for key in dict.fromkeys(keys) if key not in self.kept]
        free = [k for k, whole in self.kept.items() if whole and not self.pins[k] and k not in keys]
        excess = max(len(self.kept) + len(new) - self.capacity, 0)
        if excess > len(free):
            return None
        for key in free[:excess]:
            del self.kept[key]
        if free[:excess]:
            self.events.append(OffloadingEvent(free[:excess], Medium.CPU, removed=True))
        self.kept.update(dict.fromkeys(new, False))
        return PrepareStoreOutput(new, NamedPlaces(new), free[:excess])

    def complete_store(self, keys, req_context, success=True):
        for key in keys:
            if success:
                self.kept[key] = True
            else:
                del self.kept[key]
        if success and keys:
            self.events.append(OffloadingEvent(list(keys), Medium.CPU, removed=False))

    def on_request_finished(self, req_context):
        self.finished.append(req_context)

    def weights_changed(self):
        self.num_changes += 1

    def take_events(self):
        events, self.events = self.events, []
        return events

    def get_stats(self):
        return {"kept": len(self.kept)}


class PlainWorker(OffloadingWorker):
    """Copies when it is told to, after or before it was told that weights have changed."""

    def __init__(self, cache, tier, rank):
        self.cache, self.tier, self.rank = cache, tier, rank
        self.jobs = {}
        self.done = []
        self.is_shut_down = False

    def submit_store(self, job_id, src_spec, dst_spec):
        self.jobs[job_id] = ("store", src_spec.block_ids, dst_spec.keys)
        return True

    def submit_load(self, job_id, src_spec, dst_spec):
        self.jobs[job_id] = ("load", dst_spec.block_ids, src_spec.keys)
        return True

    def run(self, job_id):
        """Copy, whatever it is."""
        if job_id not in self.jobs:
            return
        kind, block_ids, keys = self.jobs.pop(job_id)
        for block, key in zip(block_ids, keys, strict=True):
            if kind == "store":
                self.tier[self.rank, key] = self.cache[block]
            else:
                self.cache[block] = self.tier[self.rank, key]
        self.done.append(TransferResult(job_id, success=True, transfer_size=len(keys)))

    def get_finished(self):
        done, self.done = self.done, []
        return done

    def wait(self, job_ids):
        for job_id in job_ids:
            assert job_id in self.jobs, f"job {job_id} never came here"
            self.run(job_id)

    def get_stats(self):
        return {"jobs": len(self.jobs)}

    def shutdown(self):
        self.is_shut_down = True


class PlainSpec(OffloadingSpec):
    def __init__(self, capacity=8, tier=None, rank=0):
        self._manager = PlainManager(capacity)
        self._tier = {} if tier is None else tier
        self._rank = rank
        self._worker = None

    def get_manager(self):
        return self._manager

    def get_worker(self, kv_caches):
        if self._worker is None:
            self._worker = PlainWorker(kv_caches, self._tier, self._rank)
        return self._worker


class Rank:
    """A process: weights, a cache of named contents, and a fenced worker."""

    def __init__(self, number, tier):
        self.weights = ProcessWeights()
        self.model = self.weights.hold("A")
        self.changing = None
        self.cache = {}
        spec = FencedSpec(PlainSpec(tier=tier, rank=number), rank=number, weights=self.weights)
        self.worker = spec.get_worker(self.cache)
        self.inner = self.worker._inner
        self.name = "A"

    def commit(self, name):
        """Change to other weights, or to the same ones, or end a change that has begun."""
        self.begin_change()
        self.name = name
        self.changing.__exit__(None, None, None)
        self.changing = None

    def begin_change(self):
        if self.changing is None:
            self.changing = self.model.changing(lambda: self.name)
            self.changing.__enter__()
            self.name = None


class Request:
    """Tokens of which some blocks have contents; one token is one block."""

    def __init__(self, tokens, names, witnesses, stamps):
        self.tokens, self.names, self.witnesses = tokens, names, witnesses
        self.began_with = stamps
        self.context = ReqContext(f"request {id(self)}")
        self.blocks = []
        self.num_computed = 0
        self.busy = False


class World:
    """Manager, ranks and requests; `check` is the judge."""

    def __init__(self, num_ranks, *, capacity=8, hash_nbits=128, with_witnesses=True):
        tier = {}
        self.ranks = [Rank(number, tier) for number in range(num_ranks)]
        self.manager = FencedSpec(PlainSpec(capacity)).get_manager()
        self.inner = self.manager._inner
        self.hash_nbits = hash_nbits
        self.with_witnesses = with_witnesses
        self.block_numbers = itertools.count()
        self.job_ids = itertools.count()
        self.jobs = {}
        self.num_loaded = 0
        self.index = set()

    # -- weights

    def stamps(self):
        return [rank.worker.stamp() for rank in self.ranks]

    def tell(self):
        self.manager.weights_are(self.stamps())

    def names(self):
        return tuple(rank.name for rank in self.ranks)

    # -- what is what

    def _weak(self, data):
        import xxhash

        whole = xxhash.xxh3_128_intdigest(data)
        return (whole % (1 << self.hash_nbits)).to_bytes(16, "big")

    def named(self, tokens):
        keys = [make_offload_key(each) for each in hash_blocks(tokens, 1, b"", self._weak)]
        return keys, list(witness_blocks(tokens, 1))

    def ideal(self, names, tokens):
        """Return what the last block of a sequence is, computed with certain weights all along."""
        content = ()
        for token in tokens:
            content = (names, token, content)
        return content

    # -- requests

    def start(self, tokens):
        keys, witnesses = self.named(tokens)
        request = Request(tokens, keys, witnesses, self.names())
        if self.with_witnesses:
            known = zip(keys, witnesses, strict=True)
            request.context.set_state(BlockWitnesses(known))
        self.manager.on_new_request(request.context)
        return request

    def compute(self, request):
        """Compute the next block with whatever weights there are."""
        assert not request.busy
        number = next(self.block_numbers)
        for rank in self.ranks:
            before = rank.cache[request.blocks[-1]] if request.blocks else ()
            token = request.tokens[len(request.blocks)]
            rank.cache[number] = (self.names(), token, before)
        request.blocks.append(number)

    def load(self, request):
        """Begin to load all that is found behind what the request has."""
        first = len(request.blocks)
        keys = []
        for key in request.names[first:]:
            if self.manager.lookup(key, request.context) is not LookupResult.HIT:
                break
            keys.append(key)
        if not keys:
            return None
        numbers = [next(self.block_numbers) for _ in keys]
        place = self.manager.prepare_load(keys, request.context)
        request.blocks += numbers
        return self._enter(request, "load", keys, numbers, place)

    def store(self, request):
        """Begin to store all blocks that the request has."""
        keys = request.names[: len(request.blocks)]
        output = self.manager.prepare_store(keys, request.context)
        if output is None:
            return None
        blocks = dict(zip(keys, request.blocks, strict=False))
        numbers = [blocks[key] for key in output.keys_to_store]
        return self._enter(request, "store", output.keys_to_store, numbers, output.store_spec)

    def _enter(self, request, kind, keys, numbers, place):
        job_id = next(self.job_ids)
        waiting, submitted = set(range(len(self.ranks))), set()
        self.jobs[job_id] = [request, kind, keys, numbers, place, waiting, submitted, True]
        request.busy = True
        return job_id

    def submit(self, job_id, number):
        """Let a job arrive at a rank."""
        _, kind, _, numbers, place, _, submitted, _ = self.jobs[job_id]
        if number in submitted:
            return
        submitted.add(number)
        worker, blocks = self.ranks[number].worker, GPULoadStoreSpec(numbers)
        if kind == "load":
            assert worker.submit_load(job_id, place, blocks)
        else:
            assert worker.submit_store(job_id, blocks, place)

    def collect(self, number):
        """Take what a rank has finished, and complete what all have."""
        rank = self.ranks[number]
        for result in rank.worker.get_finished():
            job = self.jobs[result.job_id]
            request, kind, keys, numbers, _, waiting, _, _ = job
            waiting.remove(number)
            job[-1] &= result.success
            if kind == "load" and result.success:
                assert rank.name == request.began_with[number], "loaded for weights that are gone"
            if waiting:
                continue
            del self.jobs[result.job_id]
            request.busy = False
            if kind == "store":
                self.manager.complete_store(keys, request.context, job[-1])
                continue
            self.manager.complete_load(keys, request.context)
            first = len(request.blocks) - len(numbers)
            if job[-1]:
                self.check(request, numbers, first)
            else:
                self.manager.load_failed(keys, request.context)
                del request.blocks[first:]

    def check(self, request, numbers, first):
        """Judge blocks that were loaded."""
        for place, number in enumerate(numbers, first):
            wanted = self.ideal(request.began_with, request.tokens[: place + 1])
            assert [wanted] * len(self.ranks) == [rank.cache[number] for rank in self.ranks]
        self.num_loaded += len(numbers)

    def finish_all(self):
        """Let every job come to its end."""
        for job_id in list(self.jobs):
            for number, rank in enumerate(self.ranks):
                self.submit(job_id, number)
                rank.inner.run(job_id)
        for number in range(len(self.ranks)):
            self.collect(number)

    def take_events(self):
        """Keep an index as a router would."""
        events = list(self.manager.take_events())
        for event in events:
            for key in event.keys:
                (self.index.discard if event.removed else self.index.add)(key)
        return events
