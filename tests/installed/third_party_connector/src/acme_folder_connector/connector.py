"""Whole prompts in a folder, in the style of the first connectors: one class, two arguments.

It checks nothing, names blocks by their tokens alone, and leaves the rest to the host.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import torch

from wtransfer.connectors.interface import KVConnectorBase_V1, KVConnectorMetadata


@dataclass
class Plan(KVConnectorMetadata):
    loads: list = field(default_factory=list)
    saves: list = field(default_factory=list)


class FolderConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config, role):
        super().__init__(vllm_config, role)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.root = Path(options["folder"])
        self.block_size = vllm_config.cache_config.block_size
        self.requests, self.plan, self.failed = {}, Plan(), set()

    def place_of(self, tokens):
        return self.root / hashlib.sha256(repr(list(tokens)).encode()).hexdigest()

    # -- scheduler

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.requests[request.request_id] = request
        whole = (len(request.prompt_token_ids) - 1) // self.block_size * self.block_size
        place = self.place_of(request.prompt_token_ids[:whole])
        found = whole > num_computed_tokens and (place / "whole").exists()
        self.start = num_computed_tokens
        return (whole - num_computed_tokens if found else 0), False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            end = self.start + num_external_tokens
            (ids,) = blocks.get_block_ids()
            first, last = self.start // self.block_size, end // self.block_size
            place = self.place_of(request.prompt_token_ids[:end])
            self.plan.loads.append((str(place), first, ids[first:last]))

    def build_connector_meta(self, scheduler_output):
        for new in scheduler_output.scheduled_new_reqs:
            tokens = self.requests[new.req_id].prompt_token_ids
            computed = new.num_computed_tokens + scheduler_output.num_scheduled_tokens[new.req_id]
            whole = (len(tokens) - 1) // self.block_size
            if computed >= len(tokens) and whole:
                place = self.place_of(tokens[: whole * self.block_size])
                self.plan.saves.append((str(place), new.block_ids[0][:whole]))
        plan, self.plan = self.plan, Plan()
        return plan

    # -- worker

    def register_kv_caches(self, kv_caches):
        self.caches = kv_caches

    def start_load_kv(self, forward_context, **kwargs):
        for place, first, ids in self.metadata.loads:
            if not self.load(Path(place), first, ids):
                self.failed.update(ids)

    def load(self, place, first, ids):
        for name, cache in self.caches.items():
            try:
                kept = bytearray((place / name).read_bytes())
            except OSError:
                return False
            pages = torch.frombuffer(kept, dtype=cache.dtype).view(-1, *cache.shape[1:])
            cache[ids] = pages[first : first + len(ids)]
        return True

    def wait_for_layer_load(self, layer_name):
        pass

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        for place, ids in self.metadata.saves:
            Path(place).mkdir(exist_ok=True)
            kept = kv_layer[ids].contiguous().view(torch.uint8).numpy()
            (Path(place) / layer_name).write_bytes(kept.tobytes())

    def wait_for_save(self):
        for place, _ in self.metadata.saves:
            (Path(place) / "whole").touch()

    def get_block_ids_with_load_errors(self):
        failed, self.failed = self.failed, set()
        return failed
