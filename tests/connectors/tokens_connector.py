"""A third party's connector that knows nothing of weights: blocks in a folder, named by tokens.

There is one in two sides, and one in the style of the seed. Options:

    folder      where the blocks are; it may outlive an instance, or be shared
    outlasts    whether loads end beyond their step: in the next one
    hands_over  whether an ended request says something to the next instance
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import torch

from wtransfer.connectors.interface import (
    ConnectorScheduler,
    ConnectorWorker,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from wtransfer.connectors.tracked_requests import TrackedRequests


@dataclass
class Move:
    request_id: str
    names: list[str]
    block_ids: list[int]


@dataclass
class Moves(KVConnectorMetadata):
    loads: list[Move] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)


@dataclass
class Saved(KVConnectorWorkerMetadata):
    number: int = 0

    def aggregate(self, other):
        return Saved(self.number + other.number)


@dataclass
class Hello(KVConnectorHandshakeMetadata):
    rank: int = 0


class Scheduling:
    """The scheduler's side. `calls` is what it heard of requests."""

    def begin_scheduling(self, config):
        self.read(config)
        self.progress, self.first, self.loads = TrackedRequests(), {}, []
        # The latest: nothing is kept of ended requests for good.
        self.calls, self.steps = deque(maxlen=100), deque(maxlen=100)
        self.requests, self.num_saved, self.met = {}, 0, None

    def read(self, config):
        options = config.kv_transfer_config.kv_connector_extra_config
        self.folder = Path(options["folder"])
        self.outlasts = options.get("outlasts", False)
        self.hands_over = options.get("hands_over", False)
        self.block_size = config.cache_config.block_size
        self.rank = config.parallel_config.rank
        self.num_ranks = config.parallel_config.world_size

    def names(self, request):
        tokens = request.all_token_ids
        ends = range(self.block_size, len(tokens) + 1, self.block_size)
        return [hashlib.sha256(repr(list(tokens[:end])).encode()).hexdigest() for end in ends]

    def on_new_request(self, request):
        self.calls.append(("new", request.request_id))
        self.requests[request.request_id] = request
        self.progress.know(request)

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.calls.append(("asked", request.request_id))
        first = self.first[request.request_id] = num_computed_tokens // self.block_size
        last, count = (request.num_tokens - 1) // self.block_size, 0
        for name in self.names(request)[first:last]:
            if not all((self.folder / f"{name}.{rank}").exists() for rank in range(self.num_ranks)):
                break
            count += self.block_size
        return count, self.outlasts and count > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.calls.append(("allocated", request.request_id))
        if num_external_tokens:
            first = self.first[request.request_id]
            part = slice(first, first + num_external_tokens // self.block_size)
            names, (block_ids,) = self.names(request), blocks.get_block_ids()
            self.loads.append(Move(request.request_id, names[part], block_ids[part]))

    def build_connector_meta(self, scheduler_output):
        self.steps.append(scheduler_output)
        saves = []
        for tracked in self.progress.step(scheduler_output):
            numbers = (tracked.num_before, tracked.num_computed)
            part = slice(*(number // self.block_size for number in numbers))
            names = self.names(tracked.request)[part]
            saves.append(Move(tracked.request.request_id, names, tracked.block_ids[part]))
        loads, self.loads = self.loads, []
        return Moves(loads, [save for save in saves if save.names])

    def request_finished(self, request, block_ids):
        self.calls.append(("finished", request.request_id, len(block_ids)))
        self.progress.forget(request.request_id)
        self.requests.pop(request.request_id)
        self.first.pop(request.request_id)
        told = {"do_remote_prefill": True, "num_blocks": len(block_ids)}
        return False, told if self.hands_over else None

    def update_connector_output(self, connector_output):
        if connector_output.kv_connector_worker_meta is not None:
            self.num_saved += connector_output.kv_connector_worker_meta.number

    def set_xfer_handshake_metadata(self, metadata):
        assert self.met is None, "called once"
        self.met = metadata


class Working:
    """A worker's side."""

    def begin_working(self, config):
        Scheduling.read(self, config)
        self.caches, self.staged, self.num_saved = {}, {}, 0
        self.bad_blocks, self.received, self.ended = set(), set(), set()

    def register_kv_caches(self, kv_caches):
        self.caches = kv_caches

    def path(self, name):
        return self.folder / f"{name}.{self.rank}"

    def start_load_kv(self, forward_context, **kwargs):
        self.ended |= self.received
        self.received = set()
        for move in self.metadata.loads:
            for name, block in zip(move.names, move.block_ids, strict=True):
                self.load(name, block)
            if self.outlasts:
                self.received.add(move.request_id)

    def load(self, name, block):
        whole = sum(cache[block].nbytes for cache in self.caches.values())
        data = self.path(name).read_bytes() if self.path(name).exists() else b""
        if len(data) != whole:
            self.bad_blocks.add(block)
            return
        for cache in self.caches.values():
            part, data = data[: cache[block].nbytes], data[cache[block].nbytes :]
            cache[block] = torch.frombuffer(bytearray(part), dtype=cache.dtype).view(
                cache[block].shape
            )

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        for move in self.metadata.saves:
            for name, block in zip(move.names, move.block_ids, strict=True):
                page = kv_layer[block].contiguous().view(torch.uint8).numpy().tobytes()
                # By layer: equal prompts in one step have blocks of the same name.
                self.staged.setdefault(name, {})[layer_name] = page

    def wait_for_save(self):
        for name, pages in self.staged.items():
            beside = self.path(f"{name}-{os.getpid()}")
            # A save that fails is a later miss.
            with contextlib.suppress(OSError):
                beside.write_bytes(b"".join(pages[layer] for layer in self.caches))
                beside.rename(self.path(name))
        self.num_saved += len(self.staged)

    def clear_connector_metadata(self):
        super().clear_connector_metadata()
        self.staged = {}

    def get_finished(self, finished_req_ids):
        ended, self.ended = self.ended, set()
        return None, ended or None

    def get_block_ids_with_load_errors(self):
        bad_blocks, self.bad_blocks = self.bad_blocks, set()
        return bad_blocks

    def build_connector_worker_meta(self):
        number, self.num_saved = self.num_saved, 0
        return Saved(number) if number else None

    def get_handshake_metadata(self):
        return Hello(self.rank)


class TokensScheduler(Scheduling, ConnectorScheduler):
    def __init__(self, config, kv_cache_config=None):
        super().__init__(config, kv_cache_config)
        self.begin_scheduling(config)


class TokensWorker(Working, ConnectorWorker):
    def __init__(self, config, kv_cache_config=None):
        super().__init__(config, kv_cache_config)
        self.begin_working(config)


class TokensConnector(KVConnectorBase_V1):
    scheduler_cls = TokensScheduler
    worker_cls = TokensWorker


class SeedTokensConnector(Scheduling, Working, KVConnectorBase_V1):
    def __init__(self, vllm_config, role):
        super().__init__(vllm_config, role)
        begin = self.begin_scheduling if role is KVConnectorRole.SCHEDULER else self.begin_working
        begin(vllm_config)
