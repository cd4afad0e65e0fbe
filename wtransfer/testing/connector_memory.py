"""The smallest connector that keeps every promise: blocks lie in a dictionary of this process.

A fake in the sense that all its sides must live in one process, and otherwise real. Tests run
faults against it that a faster connector could hide; authors may read it as an example.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from wtransfer.blocks import checksum
from wtransfer.connectors.fenced import WeightHandshake, WeightReport
from wtransfer.connectors.interface import (
    ConnectorScheduler,
    ConnectorWorker,
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from wtransfer.connectors.naming import BlockNaming
from wtransfer.connectors.progress import Progress, Tracked, only_group
from wtransfer.connectors.settings import Instance
from wtransfer.kv.fence import SchedulerFence, WorkerFence

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from wtransfer.connectors.interface import KVConnectorOutput
    from wtransfer.connectors.naming import RequestNames
    from wtransfer.weights import Stamps


class Kept(NamedTuple):
    """One block of one rank."""

    pages: dict[str, torch.Tensor]
    """By layer."""
    checksums: dict[str, bytes]
    """By layer."""


SHELVES: defaultdict[str, dict[tuple[bytes, int], Kept]] = defaultdict(dict)
"""By the option ``shelf``: what is kept, by name of the block and rank."""


@dataclass
class Item:
    """Blocks of one request that come or go."""

    request_id: str
    """The request."""
    names: list[bytes]
    """Name of each block."""
    block_ids: list[int]
    """Where each is in the cache."""
    versions: Stamps
    """What the request began with; none where that is no more."""


@dataclass
class MemoryMetadata(KVConnectorMetadata):
    """What the workers do in a step."""

    loads: list[Item] = field(default_factory=list)
    """Blocks to load."""
    saves: list[Item] = field(default_factory=list)
    """Blocks to keep once the step has computed them."""


class MemoryScheduler(ConnectorScheduler):
    """Looks for names on the shelf."""

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        self.instance = Instance.of(config)
        options = config.kv_transfer_config.kv_connector_extra_config
        self.shelf = SHELVES[options["shelf"]]
        self.outlasts = bool(options.get("outlasts", False))
        self.fence = SchedulerFence(self.instance.num_ranks)
        self.naming = BlockNaming(self.instance.block_size, self.instance.root)
        self.progress = Progress()
        self.names: dict[str, RequestNames] = {}
        self.first: dict[str, int] = {}
        self.loads: list[Item] = []
        self.counts = Counter(loads_total=0)

    def on_new_request(self, request: Any) -> None:
        """Take note of it."""
        self.progress.know(request)
        self.names[request.request_id] = self.naming.of(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the blocks that all ranks have kept."""
        block_size, request_id = self.instance.block_size, request.request_id
        first = self.first[request_id] = num_computed_tokens // block_size
        fingerprint = self.fence.begin(request_id)
        if fingerprint is None:
            return 0, False
        names = self.named(request_id, fingerprint)[first : (request.num_tokens - 1) // block_size]
        found = sum(1 for _ in itertools.takewhile(self.is_kept, names)) * block_size
        return found, self.outlasts and found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note the blocks to load into."""
        request_id = request.request_id
        self.fence.ensure_begun(request_id)
        if not num_external_tokens:
            return
        first = self.first[request_id]
        part = slice(first, first + num_external_tokens // self.instance.block_size)
        block_ids = only_group(blocks.get_block_ids())[part]
        names = self.named(request_id, self.fence.fingerprint(request_id) or "")[part]
        self.loads.append(Item(request_id, names, block_ids, self.versions(request_id)))
        self.counts["loads_total"] += 1

    def build_connector_meta(self, scheduler_output: Any) -> MemoryMetadata:
        """Return the loads, and the blocks that this step fills."""
        loads, self.loads = self.loads, []
        saves = [self.save(tracked) for tracked in self.progress.step(scheduler_output)]
        return MemoryMetadata(loads, [save for save in saves if save is not None])

    def save(self, tracked: Tracked) -> Item | None:
        """Return the blocks of a request that a step fills, if there are any."""
        request_id, block_size = tracked.request.request_id, self.instance.block_size
        fingerprint = self.fence.fingerprint(request_id)
        part = slice(tracked.num_before // block_size, tracked.num_computed // block_size)
        if fingerprint is None or part.start == part.stop:
            return None
        names = self.named(request_id, fingerprint)[part]
        return Item(request_id, names, tracked.block_ids[part], self.versions(request_id))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Hear what the workers compute with."""
        said = connector_output.kv_connector_worker_meta
        if isinstance(said, WeightReport):
            self.fence.update(said.versions)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Hear it before the first step."""
        self.fence.update({rank: each.version for rank, each in metadata.items()})

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget it: blocks are copied within their step."""
        self.progress.forget(request.request_id)
        self.fence.forget(request.request_id)
        self.names.pop(request.request_id, None)
        self.first.pop(request.request_id, None)
        return False, None

    def get_stats(self) -> Mapping[str, float]:
        """Return how many loads there were."""
        return self.counts

    # -- what broken ones have otherwise

    def named(self, request_id: str, fingerprint: str) -> list[bytes]:
        """Return the names of a request's blocks."""
        return [bytes(name) for name in self.names[request_id].under(fingerprint)]

    def versions(self, request_id: str) -> Stamps:
        """Return what a request began with."""
        return self.fence.versions(request_id) or ()

    def is_kept(self, name: bytes) -> bool:
        """Return whether all ranks have kept a block."""
        return all((name, rank) in self.shelf for rank in range(self.instance.num_ranks))


class MemoryWorker(ConnectorWorker):
    """Copies blocks."""

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        options = config.kv_transfer_config.kv_connector_extra_config
        self.shelf = SHELVES[options["shelf"]]
        self.outlasts = bool(options.get("outlasts", False))
        self.rank = Instance.of(config).rank
        self.fence = WorkerFence(self.rank)
        self.caches: Mapping[str, torch.Tensor] = {}
        self.staged: dict[bytes, Kept] = {}
        self.errors: set[int] = set()
        self.received: set[str] = set()
        self.counts = Counter(blocks_loaded_total=0)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Take the caches."""
        self.caches = kv_caches

    def get_handshake_metadata(self) -> WeightHandshake:
        """Say what this rank computes with."""
        return WeightHandshake(self.fence.version())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Load what is whole; name the blocks that are not."""
        for item in self.metadata.loads:
            self.load(item)

    def load(self, item: Item) -> None:
        """Load one request's blocks."""
        admitted = self.admits(item)
        for name, block in zip(item.names, item.block_ids, strict=False):
            if not admitted or not self.load_block(name, block):
                self.errors.add(block)
        # Without names: the weights have changed since.
        self.errors.update(item.block_ids[len(item.names) :])
        if self.outlasts:
            self.received.add(item.request_id)

    def load_block(self, name: bytes, block: int) -> bool:
        """Load a block; return whether it is there, and whole."""
        kept = self.shelf.get((name, self.rank))
        if kept is None or not self.is_whole(kept):
            # A whole one may take its place.
            self.shelf.pop((name, self.rank), None)
            return False
        for layer, page in kept.pages.items():
            self.caches[layer][block] = page
        self.counts["blocks_loaded_total"] += 1
        return True

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return: what can be loaded is there."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Copy what the step has computed of a layer."""
        for item in self.metadata.saves:
            for name, block in zip(item.names, item.block_ids, strict=True):
                kept = self.staged.setdefault(name, Kept({}, {}))
                kept.pages[layer_name] = page = kv_layer[block].clone()
                kept.checksums[layer_name] = checksum(page.numpy())

    def wait_for_save(self) -> None:
        """Put it on the shelf: the step counts."""
        for item in self.metadata.saves:
            for name in item.names if self.admits(item) else ():
                self.keep(name, self.staged[name])

    def keep(self, name: bytes, kept: Kept) -> None:
        """Put a block on the shelf."""
        self.shelf[name, self.rank] = kept

    def clear_connector_metadata(self) -> None:
        """Drop what was copied of a step that did not count."""
        super().clear_connector_metadata()
        self.staged = {}

    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests that were loaded, where that outlasts the step."""
        received, self.received = self.received, set()
        return None, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not loaded."""
        errors, self.errors = self.errors, set()
        return errors

    def build_connector_worker_meta(self) -> WeightReport:
        """Say what this rank computes with."""
        return WeightReport(self.fence.report())

    def get_stats(self) -> Mapping[str, float]:
        """Return how many blocks were loaded."""
        return self.counts

    # -- what broken ones have otherwise

    def admits(self, item: Item) -> bool:
        """Return whether something planned may be done now."""
        return self.fence.admits(item.versions)

    def is_whole(self, kept: Kept) -> bool:
        """Return whether a block is as it was kept."""
        return all(
            checksum(page.numpy()) == kept.checksums[layer] for layer, page in kept.pages.items()
        )


class MemoryConnector(KVConnectorBase_V1):
    """Keeps blocks under ``shelf``; with ``outlasts`` its loads end beyond their step."""

    scheduler_cls = MemoryScheduler
    worker_cls = MemoryWorker
    names_weights = True
