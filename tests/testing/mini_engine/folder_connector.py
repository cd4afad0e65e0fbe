"""A third party's connector in the seed's style: both sides in one class, two arguments, in step.

It loads within the step that needs the bytes, block by block from a folder, knows nothing of
weights, and names blocks by their tokens alone. Options:

    folder      where the blocks are
    lazily      each layer is read when the forward pass has come to it
    behind      a thread reads layer after layer; blocks that are not there are known at once
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import torch

from wtransfer.connectors.interface import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole
from wtransfer.connectors.progress import Progress
from wtransfer.kv.keys import hash_blocks


@dataclass
class Move:
    name: str
    block: int


@dataclass
class Moves(KVConnectorMetadata):
    loads: list[Move] = field(default_factory=list)
    saves: list[Move] = field(default_factory=list)


class FolderConnector(KVConnectorBase_V1):
    def __init__(self, vllm_config, role):
        super().__init__(vllm_config, role)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.folder = Path(options["folder"])
        self.lazily = options.get("lazily", False)
        self.behind = options.get("behind", False)
        self.block_size = vllm_config.cache_config.block_size
        self.rank = vllm_config.parallel_config.rank
        if role is KVConnectorRole.SCHEDULER:
            self.progress = Progress()
            self.loads = []
            self.there = {}
        else:
            self.caches = {}
            self.staged = defaultdict(list)
            self.bad_blocks = set()
            self.thread = None
            self.there = {}

    def names(self, request):
        return [each.hex() for each in hash_blocks(request.all_token_ids, self.block_size)]

    # -- the scheduler's side

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        first = self.there[request.request_id] = num_computed_tokens // self.block_size
        last = (request.num_tokens - 1) // self.block_size
        count = 0
        for name in self.names(request)[first:last]:
            if not (self.folder / f"{name}.0").exists():
                break
            count += 1
        return count * self.block_size, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.progress.know(request)
        names, (block_ids,) = self.names(request), blocks.get_block_ids()
        # The host's own blocks come first, and it says only how many more there are.
        first = self.there.pop(request.request_id)
        last = first + num_external_tokens // self.block_size
        self.loads += map(Move, names[first:last], block_ids[first:last])

    def build_connector_meta(self, scheduler_output):
        saves = []
        for tracked in self.progress.step(scheduler_output):
            names = self.names(tracked.request)
            first, last = (n // self.block_size for n in (tracked.num_before, tracked.num_computed))
            saves += map(Move, names[first:last], tracked.block_ids[first:last])
        loads, self.loads = self.loads, []
        return Moves(loads, saves)

    def request_finished(self, request, block_ids):
        self.progress.forget(request.request_id)
        return False, {"seen": len(block_ids)}

    # -- the worker's side

    def register_kv_caches(self, kv_caches):
        self.caches = kv_caches

    def start_load_kv(self, forward_context, **kwargs):
        if self.behind:
            self.load_behind()
        elif not self.lazily:
            for layer in self.caches:
                self.load(layer)

    def load_behind(self):
        for move in self._get_connector_metadata().loads:
            path = self.folder / f"{move.name}.{self.rank}"
            whole = sum(cache[0].nbytes for cache in self.caches.values())
            if not path.exists() or path.stat().st_size < whole:
                self.bad_blocks.add(move.block)
        self.there = {layer: threading.Event() for layer in self.caches}
        metadata = self._get_connector_metadata()

        def work():
            for layer, event in self.there.items():
                # As slow as a disk; who does not wait meets it at its work.
                time.sleep(0.02 if metadata.loads else 0.0)
                self.load(layer, metadata)
                event.set()

        self.thread = threading.Thread(target=work)
        self.thread.start()

    def wait_for_layer_load(self, layer_name):
        if self.behind:
            self.there[layer_name].wait()
            if layer_name == list(self.caches)[-1]:
                self.thread.join()
        elif self.lazily:
            self.load(layer_name)

    def load(self, layer, metadata=None):
        number, cache = list(self.caches).index(layer), self.caches[layer]
        for move in (metadata or self._get_connector_metadata()).loads:
            path = self.folder / f"{move.name}.{self.rank}"
            data = path.read_bytes() if path.exists() else b""
            part = data[number * cache[0].nbytes : (number + 1) * cache[0].nbytes]
            if len(part) == cache[0].nbytes:
                page = torch.frombuffer(bytearray(part), dtype=cache.dtype)
                cache[move.block] = page.view(cache[0].shape)
            else:
                self.bad_blocks.add(move.block)

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs):
        for move in self._get_connector_metadata().saves:
            self.staged[move.name].append(kv_layer[move.block].numpy().tobytes())

    def wait_for_save(self):
        for name, parts in self.staged.items():
            (self.folder / f"{name}.{self.rank}").write_bytes(b"".join(parts))
        self.staged.clear()

    def clear_connector_metadata(self):
        loads = self._get_connector_metadata().loads
        if loads and self.thread is not None and self.thread.is_alive():
            raise RuntimeError("the step is over, and nobody has waited for its loads")
        super().clear_connector_metadata()
        self.staged.clear()

    def get_block_ids_with_load_errors(self):
        bad_blocks, self.bad_blocks = self.bad_blocks, set()
        return bad_blocks
