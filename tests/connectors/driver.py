"""A serving instance in one process, small enough to be read: both sides of a connector, in order.

What it computes shows every mistake of a connector. The keys and values of a token are a digest of
the token, of the weights, and of what *all* ranks have in their caches for the token before it. So
one wrong byte in a block makes all later ones wrong, on all ranks, and the tokens that come out.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch
import xxhash

from wtransfer import KVConnectorFactory, KVTransferConfig, ServingConfig
from wtransfer.config import KVCacheConfig, ModelConfig, ParallelConfig
from wtransfer.connectors.interface import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorOutput,
    KVConnectorRole,
)
from wtransfer.specs.interface import LoadStoreSpec
from wtransfer.testing.mini_engine.contract import KVCacheBlocks as Blocks
from wtransfer.testing.mini_engine.contract import NewRequestData, SchedulerOutput

BLOCK_SIZE = 4
ROW_NBYTES = 16
"""Bytes of a token in a layer: one digest."""
PLAIN = (str, int, float, bool, bytes, type(None))


@dataclass
class Request:
    """What connectors read of a request, under the field's names."""

    request_id: str
    prompt_token_ids: list[int]
    max_tokens: int = 1
    kv_transfer_params: dict | None = None
    cache_salt: str | None = None
    lora_request: object = None
    mm_features: list = field(default_factory=list)
    prompt_embeds: object = None
    output_token_ids: list[int] = field(default_factory=list)
    # The driver's own.
    num_computed: int = 0
    block_ids: list[int] = field(default_factory=list)
    params: dict | None = None
    """What `request_finished` gave for the next instance."""
    num_loaded: int = 0
    """Tokens that the connector was asked to load."""
    num_failures: int = 0
    """Steps or loads after which blocks of it were invalid."""

    @property
    def all_token_ids(self):
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self):
        return len(self.all_token_ids)

    num_prompt_tokens = property(lambda self: len(self.prompt_token_ids))


def assert_plain(value):
    """Fail unless a host could move it to another process."""
    if dataclasses.is_dataclass(value) or isinstance(value, LoadStoreSpec):
        value = list(vars(value).values())
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if isinstance(value, (list, tuple, set)):
        for each in value:
            assert_plain(each)
    else:
        assert isinstance(value, PLAIN), type(value)


def names_in(folder):
    """Return the names of everything in a folder, sorted."""
    return sorted(each.name for each in Path(folder).iterdir())


def transfer_config(name, role="kv_both", engine_id="engine", **extra):
    return KVTransferConfig(name, engine_id, role, kv_connector_extra_config=extra)


@dataclass
class NoMetadata(KVConnectorMetadata):
    """Nothing to do."""


class Nothing(KVConnectorBase_V1):
    """A connector that never has anything."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def build_connector_meta(self, scheduler_output):
        return NoMetadata()

    def start_load_kv(self, forward_context, **kwargs):
        pass

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        pass

    def wait_for_save(self):
        pass


class Instance:
    """A scheduler with its side of a connector, and ranks with theirs.

    Args:
        transfer: Which connector; None: one that does nothing.
        num_ranks: Workers.
        num_blocks: Blocks of the cache.
        num_layers: Layers.
        weights: Whatever the model computes with; any text.
        budget: Tokens in a step, over all requests.
        keeps_saving: Whether ``wait_for_save`` is called also after a step that needed a load which
            failed, against the contract, as in vLLM.
    """

    def __init__(
        self,
        transfer,
        *,
        num_ranks=1,
        num_blocks=64,
        num_layers=3,
        weights="w1",
        budget=1024,
        keeps_saving=True,
        model="a model",
        dtype=torch.bfloat16,
    ):
        self.weights, self.budget, self.keeps_saving = weights, budget, keeps_saving
        self.layers = [f"layer.{n}" for n in range(num_layers)]
        config = ServingConfig(
            kv_transfer_config=transfer or KVTransferConfig(),
            cache_config=KVCacheConfig(
                num_blocks, BLOCK_SIZE, num_layers * BLOCK_SIZE * ROW_NBYTES
            ),
            model_config=ModelConfig(model, str(dtype)),
        )
        make = Nothing if transfer is None else KVConnectorFactory.create_connector
        parallel = [ParallelConfig(rank, num_ranks, num_ranks) for rank in range(num_ranks)]
        configs = [dataclasses.replace(config, parallel_config=each) for each in parallel]
        self.scheduler = make(configs[0], KVConnectorRole.SCHEDULER)
        self.workers = [make(each, KVConnectorRole.WORKER) for each in configs]
        width = ROW_NBYTES // dtype.itemsize
        shape = (num_blocks, 1, BLOCK_SIZE, width)
        self.caches = [
            {name: torch.full(shape, 1, dtype=dtype) for name in self.layers} for _ in configs
        ]
        for worker, caches in zip(self.workers, self.caches, strict=True):
            worker.register_kv_caches(caches)
        said = {rank: each.get_handshake_metadata() for rank, each in enumerate(self.workers)}
        said = {rank: each for rank, each in said.items() if each is not None}
        assert_plain(said)
        if said:
            self.scheduler.set_xfer_handshake_metadata(said)
        self.free = deque(range(1, num_blocks))
        self.waiting: deque[Request] = deque()
        self.loading: dict[str, Request] = {}
        self.running: dict[str, Request] = {}
        self.held: dict[str, list[int]] = {}
        self.done: dict[str, Request] = {}
        self.invalid: set[int] = set()
        self.num_steps = 0
        self._new: set[str] = set()
        self._received: dict[str, int] = {}
        self._sent: dict[str, int] = {}
        self._finished: set[str] = set()
        self._preempted: set[str] = set()
        self._resumed: set[str] = set()

    # -- requests

    def submit(self, request_id, tokens, max_tokens=1, **particulars):
        request = Request(request_id, list(tokens), max_tokens, **particulars)
        self.scheduler.on_new_request(request)
        self.waiting.append(request)
        return request

    def serve(self, request_id, tokens, max_tokens=1, **particulars):
        """Serve one request to its end, and return it."""
        request = self.submit(request_id, tokens, max_tokens, **particulars)
        self.run()
        return request

    def run(self, most_s=8.0):
        """Step until no request is left, no block is held, and the connector is done."""
        end = time.monotonic() + most_s
        while self.is_busy():
            if not self.step():
                time.sleep(0.0005)
            assert time.monotonic() < end, "no progress"

    def is_busy(self):
        requests = self.waiting or self.loading or self.running or self.held
        return bool(requests) or self.scheduler.has_pending_push_work()

    def abort(self, request_id):
        """End a request, as its user does."""
        everywhere = [*self.waiting, *self.loading.values(), *self.running.values()]
        self._finish(next(each for each in everywhere if each.request_id == request_id))

    def preempt(self, request_id):
        """Take a running request's blocks away; it begins anew when there are some."""
        request = self.running.pop(request_id)
        self.free.extend(request.block_ids)
        request.block_ids, request.num_computed = [], 0
        self.waiting.appendleft(request)
        self._preempted.add(request_id)

    def shutdown(self):
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.shutdown()

    # -- a step

    def step(self):
        """Make one step, whether there is something to compute or not; return whether there was."""
        self.num_steps += 1
        self._admit()
        output = self._schedule()
        told = self.scheduler.build_connector_meta(output)
        assert_plain(told)
        said = self._run_workers(output, told)
        self.invalid = said.invalid_block_ids
        self.scheduler.update_connector_output(said)
        self._after(output, said)
        return bool(output.num_scheduled_tokens)

    def _admit(self):
        # Only who is computed in this step as well, or loads beyond it.
        left = self.budget - sum(
            each.num_tokens - each.num_computed for each in self.running.values()
        )
        for request in list(self.waiting):
            if left <= 0:
                break
            found, later = self.scheduler.get_num_new_matched_tokens(request, 0)
            needed = -(-(request.num_tokens + request.max_tokens) // BLOCK_SIZE)
            if found is None or needed > len(self.free):
                continue
            assert 0 <= found < request.num_tokens
            self.waiting.remove(request)
            request.block_ids = [self.free.popleft() for _ in range(needed)]
            request.num_computed = request.num_loaded = found
            self.scheduler.update_state_after_alloc(request, Blocks(request.block_ids), found)
            if later and found:
                self.loading[request.request_id] = request
            else:
                left -= request.num_tokens - request.num_computed
                self._start(request)

    def _start(self, request):
        self.running[request.request_id] = request
        self._new.add(request.request_id)

    def _schedule(self):
        output = SchedulerOutput(finished_req_ids=self._finished, preempted_req_ids=self._preempted)
        self._resumed |= self._preempted
        self._finished, self._preempted, left = set(), set(), self.budget
        for request_id, request in self.running.items():
            number = min(left, request.num_tokens - request.num_computed)
            if number <= 0:
                continue
            left -= number
            output.num_scheduled_tokens[request_id] = number
            blocks = (list(request.block_ids),)
            cached = output.scheduled_cached_reqs
            if request_id not in self._new:
                cached.req_ids.append(request_id)
                cached.new_block_ids.append(None)
                cached.num_computed_tokens.append(request.num_computed)
            elif request_id in self._resumed:
                self._resumed.discard(request_id)
                cached.resumed_req_ids.add(request_id)
                cached.req_ids.append(request_id)
                cached.new_block_ids.append(blocks)
                cached.num_computed_tokens.append(request.num_computed)
            else:
                output.scheduled_new_reqs.append(
                    NewRequestData(
                        request_id, request.prompt_token_ids, blocks, request.num_computed
                    )
                )
            self._new.discard(request_id)
        return output

    def _run_workers(self, output, told):
        computes = bool(output.num_scheduled_tokens)
        for worker in self.workers:
            worker.handle_preemptions(told)
            worker.bind_connector_metadata(told)
            worker.start_load_kv(None)
        self.compute(output)
        for worker, caches in zip(self.workers, self.caches, strict=True):
            for name in self.layers if computes else ():
                worker.wait_for_layer_load(name)
                worker.save_kv_layer(name, caches[name], None)
        failed = [worker.get_block_ids_with_load_errors() for worker in self.workers]
        used = {n for each in output.num_scheduled_tokens for n in self.running[each].block_ids}
        if computes and (self.keeps_saving or used.isdisjoint(set().union(*failed))):
            for worker in self.workers:
                worker.wait_for_save()
        said = KVConnectorOutput(invalid_block_ids=set().union(*failed))
        said.finished_sending, said.finished_recving = set(), set()
        for worker in self.workers:
            sent, received = worker.get_finished(output.finished_req_ids)
            said.finished_sending |= self._by_all(self._sent, sent)
            said.finished_recving |= self._by_all(self._received, received)
            # As in vLLM: what ends here is reported with its failures.
            said.invalid_block_ids |= worker.get_block_ids_with_load_errors()
            meta = worker.build_connector_worker_meta()
            assert_plain(meta)
            known = said.kv_connector_worker_meta
            said.kv_connector_worker_meta = (
                meta if known is None else known if meta is None else known.aggregate(meta)
            )
            worker.clear_connector_metadata()
        return said

    def _by_all(self, counted, named):
        """Return the requests that the last rank has named now."""
        for request_id in named or ():
            counted[request_id] = counted.get(request_id, 0) + 1
        needed = self.scheduler.get_finished_count() or len(self.workers)
        done = {each for each, number in counted.items() if number >= needed}
        for each in done:
            del counted[each]
        return done

    def _after(self, output, said):
        for request_id in said.finished_sending:
            self.free.extend(self.held.pop(request_id))
        # Also before all ranks have ended their loads: one of them may have failed sooner.
        for request in self.loading.values():
            self._recompute(request, said.invalid_block_ids)
        for request_id in said.finished_recving:
            request = self.loading.pop(request_id, None)
            if request is None:
                # It was given up meanwhile; nobody writes into its blocks any more.
                self.free.extend(self.held.pop(request_id))
                continue
            self._start(request)
        for request_id, number in output.num_scheduled_tokens.items():
            request = self.running[request_id]
            if self._recompute(request, said.invalid_block_ids):
                continue
            request.num_computed += number
            if request.num_computed == request.num_tokens:
                request.output_token_ids.append(self.next_token(request))
                if len(request.output_token_ids) == request.max_tokens:
                    self._finish(request)

    def _recompute(self, request, invalid):
        wrong = [n for n, block in enumerate(request.block_ids) if block in invalid]
        if not wrong:
            return False
        request.num_failures += 1
        request.num_computed = min(request.num_computed, wrong[0] * BLOCK_SIZE)
        return True

    def _finish(self, request):
        request_id = request.request_id
        held, request.params = self.scheduler.request_finished(request, list(request.block_ids))
        assert_plain(request.params)
        if request in self.waiting:
            self.waiting.remove(request)
        self.running.pop(request_id, None)
        if self.loading.pop(request_id, None):
            held = True
        if held:
            self.held[request_id] = request.block_ids
        else:
            self.free.extend(request.block_ids)
        self._finished.add(request_id)
        self.done[request_id] = request

    # -- the model

    def compute(self, output):
        """Compute what a step has scheduled, from what the caches hold."""
        for request_id, number in output.num_scheduled_tokens.items():
            request = self.running[request_id]
            for position in range(request.num_computed, request.num_computed + number):
                state = self._state(request, position - 1)
                token = request.all_token_ids[position]
                self._write(request, position, f"{self.weights}|{token}|".encode() + state)

    def _state(self, request, position):
        if position < 0:
            return b""
        rows = [
            self._row(caches, name, request, position) for caches in self.caches for name in caches
        ]
        return b"".join(row.contiguous().view(torch.uint8).numpy().tobytes() for row in rows)

    def _write(self, request, position, state):
        for rank, caches in enumerate(self.caches):
            for name in caches:
                digest = bytearray(xxhash.xxh3_128_digest(state + f"|{rank}|{name}".encode()))
                row = self._row(caches, name, request, position)
                row.copy_(torch.frombuffer(digest, dtype=torch.uint8).view(row.dtype))

    def _row(self, caches, name, request, position):
        block = request.block_ids[position // BLOCK_SIZE]
        return caches[name][block, 0, position % BLOCK_SIZE]

    def next_token(self, request):
        state = self._state(request, request.num_computed - 1)
        return xxhash.xxh3_64_intdigest(state) % 50_000


def answer(tokens, max_tokens=1, **instance):
    """Return what an instance says that computes everything itself."""
    alone = Instance(None, **instance)
    return alone.serve("alone", tokens, max_tokens).output_token_ids
