"""In-memory backends: an engine, a connector, a spec and a tier that keep each promise.

Fakes only in that both sides must live in one process: the kits pass on them. Break the fake of
your kind to test a kit; what a backend is begun from is in `wtransfer.scaffold`.
"""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from wtransfer.config import KVCacheGroup, cache_groups
from wtransfer.connectors.fenced import WeightHandshake, WeightReport
from wtransfer.connectors.interface import (
    ConnectorScheduler,
    ConnectorWorker,
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from wtransfer.connectors.naming import BlockNaming
from wtransfer.connectors.serving_config import Instance
from wtransfer.connectors.tracked_requests import Tracked, TrackedRequests
from wtransfer.engines.interface import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from wtransfer.kv.fence import SchedulerFence, WorkerFence
from wtransfer.kv.groups import first_needed, longest_prefix
from wtransfer.kv.header import checksum
from wtransfer.scaffold.memory_spec import MemorySpec as MemorySpec  # noqa: PLC0414  # public
from wtransfer.specs.interface import Tier

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wtransfer.connectors.interface import KVConnectorOutput
    from wtransfer.connectors.naming import RequestNames
    from wtransfer.weight_version import WeightVersions
    from wtransfer.weights import LoadWeights

# -- engine

_SENT: dict[str, dict[str, torch.Tensor]] = {}


@dataclass
class MemoryInitInfo(WeightTransferInitInfo):
    """Location of the trainer's tensors."""

    shelf: str
    """Key in this process's dictionary of sent tensors."""


@dataclass
class MemoryUpdateInfo(WeightTransferUpdateInfo):
    """Names of the tensors that were sent."""

    names: list[str] = field(default_factory=list)
    """Names of the tensors."""


class MemoryTrainerEngine(TrainerWeightTransferEngine[TrainerInitInfo]):
    """Copy all tensors into a dictionary."""

    init_info_cls = TrainerInitInfo

    def __init__(self, init_info: TrainerInitInfo, **arguments: Any) -> None:
        super().__init__(init_info, **arguments)
        self._shelf = secrets.token_hex(8)
        _SENT[self._shelf] = {}

    def worker_init_info(self) -> dict[str, Any]:
        """Return the key of the dictionary."""
        return {"shelf": self._shelf}

    def send_weights(self) -> None:
        """Copy the tensors and notify the workers."""
        assert self.source is not None
        tensors = {name: tensor.clone() for name, tensor in self.source.iter_full()}
        _SENT[self._shelf] = tensors
        self.client.update_weights({"names": list(tensors)})

    def shutdown(self) -> None:
        """Drop the tensors."""
        _SENT.pop(self._shelf, None)


class MemoryEngine(WeightTransferEngine[MemoryInitInfo, MemoryUpdateInfo]):
    """Deliver tensors one after the other through one buffer.

    The buffer is overwritten as soon as ``load_weights`` has returned, as real transports do.
    """

    init_info_cls = MemoryInitInfo
    update_info_cls = MemoryUpdateInfo
    trainer_cls: ClassVar[type] = MemoryTrainerEngine

    def init_transfer_engine(self, init_info: MemoryInitInfo) -> None:
        """Store the key."""
        self._shelf = init_info.shelf

    def receive_weights(self, update_info: MemoryUpdateInfo, load_weights: LoadWeights) -> None:
        """Deliver each tensor in the buffer."""
        tensors = _SENT[self._shelf]
        largest = max((tensors[name].nbytes for name in update_info.names), default=0)
        buffer = torch.empty(largest, dtype=torch.uint8, device="cpu")
        for name in update_info.names:
            tensor = tensors[name]
            view = buffer[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            load_weights([(name, view.copy_(tensor))])
            buffer.fill_(0xFF)

    def shutdown(self) -> None:
        """Do nothing: no resource is held."""


# -- tier


@dataclass(kw_only=True)
class MemoryTierOptions:
    """Options of the tier."""

    shelf: str = ""
    """Key in this process's dictionary of stores."""


class MemoryTier(Tier):
    """Keep bytes in this process, under the option ``shelf``."""

    options_cls = MemoryTierOptions
    shelves: ClassVar[defaultdict[str, dict[bytes, bytes]]] = defaultdict(dict)

    def __init__(self, options: MemoryTierOptions) -> None:
        self.kept = self.shelves[options.shelf]

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return for each key whether a value is kept."""
        return [key in self.kept for key in keys]

    def put(self, key: bytes, data: memoryview) -> None:
        """Keep a copy."""
        self.kept[key] = bytes(data)

    def get(self, key: bytes, into: memoryview) -> bool:
        """Copy the value that is kept, if it has this length."""
        return self.fill(into, self.kept.get(key))

    def remove(self, keys: Sequence[bytes]) -> None:
        """Drop keys."""
        for key in keys:
            self.kept.pop(key, None)


# -- connector


class Kept(NamedTuple):
    """One block of one rank, by layer."""

    pages: dict[str, torch.Tensor]
    checksums: dict[str, bytes]


SHELVES: defaultdict[str, dict[tuple[bytes, int], Kept]] = defaultdict(dict)
"""By the option ``shelf``: stored blocks, by name of the block and rank."""


@dataclass
class Item:
    """Blocks of one request to load or to save."""

    request_id: str
    names: list[bytes]
    """Name of each block."""
    block_ids: list[int]
    """Its number in the cache."""
    versions: WeightVersions
    """Weights with which the request began, by rank; empty if they have changed since."""
    group: int = 0
    """KV cache group of the blocks."""


@dataclass
class MemoryMetadata(KVConnectorMetadata):
    """Loads and saves of one step."""

    loads: list[Item] = field(default_factory=list)
    saves: list[Item] = field(default_factory=list)
    """Blocks to save once the step has computed them."""


class MemoryScheduler(ConnectorScheduler):
    """Look blocks up by name."""

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        self.instance = Instance.of(config)
        self.shelf = SHELVES[self.options.shelf]
        # By KV cache group.
        groups = cache_groups(kv_cache_config or config.cache_config)
        self.windows = [group.window for group in groups]
        self.outlasts = self.options.outlasts or self.windows != [None]
        self.fence = SchedulerFence(self.instance.num_ranks)
        self.naming = BlockNaming(self.instance.block_size, self.instance.root)
        self.progress = TrackedRequests()
        self.names: dict[str, RequestNames] = {}
        self.first: dict[str, int] = {}
        self.loads: list[Item] = []
        self.counts = Counter(loads_total=0)

    def on_new_request(self, request: Any) -> None:
        """Record the request."""
        self.progress.know(request)
        self.names[request.request_id] = self.naming.of(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the blocks that all ranks have saved."""
        block_size, request_id = self.instance.block_size, request.request_id
        first = self.first[request_id] = num_computed_tokens // block_size
        fingerprint = self.fence.begin(request_id)
        if fingerprint is None:
            return 0, False
        names = [self.named(request_id, fingerprint, n) for n in range(len(self.windows))]
        last = min((request.num_tokens - 1) // block_size, len(names[0]))
        end, _ = longest_prefix(
            self.windows, block_size, first, last, lambda n, block: self.is_kept(names[n][block])
        )
        found = max(end - first, 0) * block_size
        return found, self.outlasts and found > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the blocks to load into."""
        request_id = request.request_id
        self.fence.ensure_begun(request_id)
        if not num_external_tokens:
            return
        first, size = self.first[request_id], self.instance.block_size
        end = first + num_external_tokens // size
        fingerprint = self.fence.fingerprint(request_id) or ""
        for group, block_ids in enumerate(blocks.get_block_ids()):
            # Of a window the last blocks: those before it were not allocated.
            part = slice(max(first, first_needed(self.windows[group], end * size, size)), end)
            names = self.named(request_id, fingerprint, group)[part]
            versions = self.versions(request_id)
            self.loads.append(Item(request_id, names, block_ids[part], versions, group))
        self.counts["loads_total"] += 1

    def build_connector_meta(self, scheduler_output: Any) -> MemoryMetadata:
        """Return the loads, and saves of the blocks that this step fills."""
        loads, self.loads = self.loads, []
        groups = range(len(self.windows))
        progress = self.progress.step(scheduler_output)
        saves = [self.save(tracked, group) for tracked in progress for group in groups]
        return MemoryMetadata(loads, [save for save in saves if save is not None])

    def save(self, tracked: Tracked, group: int = 0) -> Item | None:
        """Return the blocks of a request and a group that this step fills; None without any."""
        request_id, block_size = tracked.request.request_id, self.instance.block_size
        fingerprint = self.fence.fingerprint(request_id)
        part = slice(tracked.num_before // block_size, tracked.num_computed // block_size)
        if fingerprint is None or part.start == part.stop:
            return None
        names = self.named(request_id, fingerprint, group)[part]
        if not names:
            # A request with an adapter or the like is uncacheable.
            return None
        # Saves end within their step, in which no window gives a block away.
        block_ids = tracked.groups[group][part]
        return Item(request_id, names, block_ids, self.versions(request_id), group)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Update the fence with the weights of the workers."""
        said = connector_output.kv_connector_worker_meta
        if isinstance(said, WeightReport):
            self.fence.update(said.versions)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Set the fence before the first step."""
        self.fence.update({rank: each.version for rank, each in metadata.items()})

    def request_finished(
        self,
        request: Any,
        block_ids: list[int],  # noqa: ARG002
    ) -> tuple[bool, dict[str, Any] | None]:
        """Drop the request's state; its blocks are free, as saves end within their step."""
        self.progress.forget(request.request_id)
        self.fence.forget(request.request_id)
        self.names.pop(request.request_id, None)
        self.first.pop(request.request_id, None)
        return False, None

    def get_stats(self) -> Mapping[str, float]:
        """Return the number of loads."""
        return self.counts

    # -- overridden by the broken connectors of the kit's own tests

    def named(self, request_id: str, fingerprint: str, group: int = 0) -> list[bytes]:
        """Return the names of a request's blocks of one group."""
        return [bytes(name) for name in self.names[request_id].under(fingerprint, group=group)]

    def versions(self, request_id: str) -> WeightVersions:
        """Return the weights with which a request began."""
        return self.fence.versions(request_id) or ()

    def is_kept(self, name: bytes) -> bool:
        """Return whether all ranks have saved a block."""
        return all((name, rank) in self.shelf for rank in range(self.instance.num_ranks))


class MemoryWorker(ConnectorWorker):
    """Copy blocks between the caches and the dictionary."""

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        self.shelf = SHELVES[self.options.shelf]
        self.groups = cache_groups(kv_cache_config or config.cache_config)
        self.outlasts = self.options.outlasts or self.groups != (KVCacheGroup(),)
        self.rank = Instance.of(config).rank
        self.fence = WorkerFence(self.rank)
        self.caches: Mapping[str, torch.Tensor] = {}
        self.staged: dict[bytes, Kept] = {}
        self.errors: set[int] = set()
        self.received: set[str] = set()
        self.counts = Counter(blocks_loaded_total=0)

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Store the caches."""
        self.caches = kv_caches

    def get_handshake_metadata(self) -> WeightHandshake:
        """Return the weights of this rank."""
        return WeightHandshake(self.fence.version())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Load the blocks of this step."""
        for item in self.metadata.loads:
            self.load(item)

    def load(self, item: Item) -> None:
        """Load one request's blocks; report those that cannot be loaded."""
        admitted = self.admits(item)
        for name, block in zip(item.names, item.block_ids, strict=False):
            if not admitted or not self.load_block(name, block):
                self.errors.add(block)
        # The names are missing if the weights have changed since.
        self.errors.update(item.block_ids[len(item.names) :])
        if self.outlasts:
            self.received.add(item.request_id)

    def load_block(self, name: bytes, block: int) -> bool:
        """Load a block; return whether it was stored and is whole."""
        kept = self.shelf.get((name, self.rank))
        if kept is None or not self.is_whole(kept):
            # A later save replaces a damaged block.
            self.shelf.pop((name, self.rank), None)
            return False
        for layer, page in kept.pages.items():
            self.caches[layer][block] = page
        self.counts["blocks_loaded_total"] += 1
        return True

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: loads end in ``start_load_kv``."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,  # noqa: ARG002
        **kwargs: Any,  # noqa: ARG002
    ) -> None:
        """Copy one layer of the blocks that the step fills."""
        for item in self.metadata.saves:
            if layer_name not in (self.groups[item.group].layer_names or self.caches):
                continue
            for name, block in zip(item.names, item.block_ids, strict=True):
                kept = self.staged.setdefault(name, Kept({}, {}))
                # The dimensions may lie in another order in the cache's memory.
                page = kv_layer[block].clone(memory_format=torch.contiguous_format)
                kept.pages[layer_name] = page
                kept.checksums[layer_name] = checksum(page.numpy())

    def wait_for_save(self) -> None:
        """Store the copies: the step was computed under the planned weights."""
        for item in self.metadata.saves:
            for name in item.names if self.admits(item) else ():
                self.keep(name, self.staged[name])

    def keep(self, name: bytes, kept: Kept) -> None:
        """Store a block."""
        self.shelf[name, self.rank] = kept

    def clear_connector_metadata(self) -> None:
        """Drop the copies of a step that was not executed."""
        super().clear_connector_metadata()
        self.staged = {}

    def get_finished(
        self,
        finished_req_ids: set[str],  # noqa: ARG002
    ) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose loads outlast the step, once loaded."""
        received, self.received = self.received, set()
        return None, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that were not loaded."""
        errors, self.errors = self.errors, set()
        return errors

    def build_connector_worker_meta(self) -> WeightReport:
        """Return the weights of this rank."""
        return WeightReport(self.fence.report())

    def get_stats(self) -> Mapping[str, float]:
        """Return the number of blocks loaded."""
        return self.counts

    # -- overridden by the broken connectors of the kit's own tests

    def admits(self, item: Item) -> bool:
        """Return whether the weights are still those of the plan."""
        return self.fence.admits(item.versions)

    def is_whole(self, kept: Kept) -> bool:
        """Return whether a block has the bytes that were saved."""
        return all(
            checksum(page.numpy()) == kept.checksums[layer] for layer, page in kept.pages.items()
        )


@dataclass(kw_only=True)
class MemoryConnectorOptions:
    """Options of the connector."""

    shelf: str
    """Key in `SHELVES`."""
    outlasts: bool = False
    """True if loads end in a later step."""


class MemoryConnector(KVConnectorBase_V1):
    """Keep blocks under ``shelf``; with ``outlasts`` or groups, loads end in a later step."""

    options_cls = MemoryConnectorOptions
    scheduler_cls = MemoryScheduler
    worker_cls = MemoryWorker
    names_weights = True
    supports_hma = True
