"""wtransfer's KV connectors as vLLM's: one adapter, as a class of its own for each name.

vLLM's factory asks this module for a class by a connector's name, and gets one made for it. The
adapter hands every call on to the connector, which wtransfer's factory makes. Differences between
the two contracts are decided here and nowhere else:

*   vLLM calls ``wait_for_save`` after every step, and with speculative decoding last of all; a
    connector of wtransfer gets that call only after a step whose own loads have all come, and
    before ``get_finished``.
*   vLLM calls ``wait_for_layer_load`` only within a forward pass; a connector of wtransfer gets it
    for every layer before a step ends.
*   vLLM's engine core ends if ``get_finished`` names a request that it does not wait for; a
    connector of wtransfer may name a request early, late or twice.
*   Of a model with several KV cache groups vLLM takes no block that could not be loaded, and with a
    window it would go on from such a block, although those before it in the window are gone. A
    connector of wtransfer names blocks; vLLM is told of the requests, which begin anew.
"""

from __future__ import annotations

import copy
import itertools
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.platforms import current_platform
from vllm.v1 import kv_cache_interface
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from wtransfer import KVCacheConfig, KVConnectorFactory
from wtransfer.config import KVCacheGroup
from wtransfer.connectors.interface import KVConnectorRole as Role
from wtransfer.connectors.interface import KVEvent
from wtransfer.errors import ConnectorOptionError
from wtransfer.registry.resolve import registry

from wtransfer_vllm.kv_stats import KVPromMetrics, KVStats, KVStatsInterval
from wtransfer_vllm.names import is_ours, our_name
from wtransfer_vllm.vouching import vouch_for_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from wtransfer.connectors.interface import KVConnectorBase_V1 as Connector

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it

WHOLE_PREFIX = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
"""Kinds of KV cache in which a request keeps every block of its prefix."""
WINDOW = "SlidingWindowSpec"
"""Kind of KV cache in which a request keeps the last blocks of its prefix."""
STATES = "MambaSpec"
"""Kind of KV cache in which a request keeps the states after some of its blocks."""
UNIFIED = (
    "start vLLM with --disable-hybrid-kv-cache-manager, which makes one group of full attention "
    "and windows, and keeps whole prefixes for both"
)
"""Way out for a model of several groups, at the cost of the memory that windows would save."""
CAN_RESTART = hasattr(KVConnectorBase_V1, "get_transfer_results")
"""True if this vLLM lets a request begin anew in other blocks."""


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Connector metadata of one step, with what vLLM waits for."""

    inner: Any = None
    """The connector's own metadata."""
    sync_blocks: set[int] = field(default_factory=set)
    """Blocks of the requests that load within this step and compute in it."""
    loading: dict[str, set[int]] = field(default_factory=dict)
    """Requests whose load begins and outlasts the step; vLLM waits until each is received. With
    their blocks where vLLM has to be told of requests, and not of blocks."""
    ended: set[str] = field(default_factory=set)
    """Requests that have ended and keep their blocks; vLLM waits until each is sent."""
    is_idle: bool = False
    """True if nothing is computed in the step: no other may follow for a long time."""


class WTransferConnector(KVConnectorBase_V1):
    """A connector of wtransfer, as vLLM's scheduler and workers see it.

    Args:
        vllm_config: vLLM's own.
        role: Scheduler's or worker's side.
        kv_cache_config: Shape of the KV cache.

    Raises:
        ConnectorOptionError: An option cannot be used, or the connector cannot move this model's KV
            cache.
    """

    connector_name = ""
    """The connector's name in wtransfer's registry; set by the class that is made for it."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # vLLM computes a draft model's layers after the step in which their tokens are verified.
        speculative = getattr(vllm_config, "speculative_config", None)
        draft = getattr(speculative, "draft_model_config", None)
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        if draft is not None and self.requires_piecewise_for_cudagraph(options):
            raise ConnectorOptionError(
                f"{self.connector_name} saves KV layer by layer, and the draft model of "
                "speculative_config has layers that vLLM computes later; use a connector that "
                "moves whole blocks (OffloadingConnector, SharedStorageConnector), or speculate "
                "without a draft model"
            )
        self._num_blocks = kv_cache_config.num_blocks
        is_worker = role is KVConnectorRole.WORKER
        if is_worker:
            vouch_for_checkpoint(vllm_config)
        supports_hma = CAN_RESTART and self._connector_class().supports_hma
        shape = cache_shape(vllm_config, kv_cache_config, supports_hma=supports_hma)
        self._tells_requests = shape.groups != KVCacheConfig().groups
        self._inner: Connector = KVConnectorFactory.create_connector_v1(
            with_our_names(vllm_config, self.connector_name), Role[role.name], shape
        )
        self._tp_size = vllm_config.parallel_config.tensor_parallel_size
        self._is_idle = False
        self._stats = KVStatsInterval("worker" if is_worker else "scheduler", self._inner.get_stats)
        # Scheduler's side.
        events = getattr(vllm_config, "kv_events_config", None)
        self._kinds = (
            [_kind_in_events(each) for each in kv_cache_config.kv_cache_groups]
            if getattr(events, "enable_kv_cache_events", False)
            else []
        )
        self._outlasts: dict[str, bool] = {}
        self._loading: set[str] = set()
        self._next = StepMetadata()
        # Worker's side.
        self._layers: tuple[str, ...] = ()
        self._waited: set[str] = set()
        self._step = StepMetadata()
        self._awaited_received: dict[str, set[int]] = {}
        self._awaited_sent: set[str] = set()
        self._early: set[str] = set()
        self._failed: set[str] = set()
        self._load_errors: set[int] = set()
        self._is_judged = False
        # A step may be planned before the scheduler learns of the failed load of an earlier step on
        # which it builds.
        self._num_overlapping = getattr(vllm_config, "max_concurrent_batches", 1) - 1
        self._num_doubtful = 0
        if not is_worker and self._kv_transfer_config.kv_load_failure_policy == "fail":
            logger.warning(
                "kv_load_failure_policy is 'fail', vLLM's default: a request whose KV blocks turn "
                'out damaged or lost ends with an error. Set "kv_load_failure_policy": "recompute" '
                "in --kv-transfer-config to compute them instead"
            )

    # -- class-level answers, before vLLM makes an instance

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        config = with_our_names(vllm_config, cls.connector_name)
        layout: str | None = cls._connector_class().get_required_kvcache_layout(config)
        return layout

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether the connector works layer by layer, which one whole graph leaves out."""
        options = _our_options(extra_config)
        return bool(cls._connector_class().requires_piecewise_for_cudagraph(options))

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVStats:
        return KVStats() if data is None else KVStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> Any:
        return KVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def requires_kv_delivery(self) -> bool:
        """True if a request must hand its KV on. False where a lost block is only a later miss."""
        return self._inner.requires_kv_delivery

    @classmethod
    def _connector_class(cls) -> Any:
        return registry("connectors").get(cls.connector_name)

    # -- the scheduler's side

    def on_new_request(self, request: Any) -> None:
        self._inner.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of further tokens to load, and whether the load outlasts the step."""
        found, outlasts = self._inner.get_num_new_matched_tokens(request, num_computed_tokens)
        if found and self._tells_requests and not outlasts:
            # vLLM takes no failure of such a load; what it then computes would be of other bytes.
            logger.warning(
                "%s loads within a step, which this model's KV cache groups do not allow; the "
                "prefix of request %s is computed",
                self.connector_name,
                request.request_id,
            )
            found = 0
        self._outlasts[request.request_id] = outlasts
        return found, outlasts

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Record the blocks of a request, and the kind of its load."""
        self._inner.update_state_after_alloc(request, blocks, num_external_tokens)
        request_id = request.request_id
        outlasts = self._outlasts.pop(request_id, False)
        if not num_external_tokens:
            return
        if outlasts:
            ids = blocks.get_block_ids() if self._tells_requests else ()
            self._next.loading[request_id] = set().union(*ids)
            self._loading.add(request_id)
        else:
            self._next.sync_blocks.update(*blocks.get_block_ids())

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        inner = self._inner.build_connector_meta(scheduler_output)
        step, self._next = self._next, StepMetadata()
        step.inner = inner
        step.is_idle = self._is_idle = not scheduler_output.total_num_scheduled_tokens
        return step

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the worker metadata of a step."""
        self._loading -= connector_output.finished_recving or set()
        self._inner.update_connector_output(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return whether the request keeps its blocks, and its ``kv_transfer_params``."""
        stays, params = self._inner.request_finished(request, block_ids)
        request_id = request.request_id
        self._outlasts.pop(request_id, None)
        # vLLM frees a request that ended while it was loaded as soon as it is received.
        if stays and request_id not in self._loading:
            self._next.ended.add(request_id)
        self._loading.discard(request_id)
        return stays, params

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Return the same; called where the connector supports several groups."""
        return self.request_finished(request, [block for group in block_ids for block in group])

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        """Take handshake metadata by rank, before the first step and after a commit."""
        self._inner.set_xfer_handshake_metadata(metadata)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], Any]) -> None:
        """Take the same, by pipeline and tensor-parallel rank."""
        by_rank = {pp * self._tp_size + tp: each for (pp, tp), each in metadata.items()}
        self._inner.set_xfer_handshake_metadata(by_rank)

    def has_pending_push_work(self) -> bool:
        return self._inner.has_pending_push_work()

    def has_pending_block_frees(self) -> bool:
        return self._inner.has_pending_block_frees()

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Pass vLLM's block pool on, where vLLM can let a request begin anew in other blocks."""
        if CAN_RESTART:
            self._inner.bind_gpu_block_pool(gpu_block_pool)

    def get_finished_count(self) -> int | None:
        return self._inner.get_finished_count()

    def take_events(self) -> list[Any]:
        """Return the events of a tier's blocks, which vLLM publishes with those of its own cache.

        Events of another class name blocks by other hashes than vLLM's, and are dropped.
        """
        told = (each for each in self._inner.take_events() if isinstance(each, KVEvent))
        events: list[Any] = []
        for (removed, medium, group), alike in itertools.groupby(
            told, lambda event: (event.removed, event.medium.value, event.blocks.group)
        ):
            if removed:
                hashes = [each for event in alike for each in event.blocks.block_hashes]
                fields = {"block_hashes": list(map(maybe_convert_block_hash, hashes))}
                events.append(_event(BlockRemoved, **fields, medium=medium, group_idx=group))
            else:
                events += [self._stored(event, medium) for event in alike]
        return events

    def _stored(self, event: KVEvent, medium: str) -> Any:
        blocks, parent = event.blocks, event.blocks.parent_block_hash
        return _event(
            BlockStored,
            block_hashes=list(map(maybe_convert_block_hash, blocks.block_hashes)),
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=list(blocks.token_ids),
            block_size=blocks.block_size,
            medium=medium,
            # Blocks of requests with an adapter are never kept.
            lora_id=None,
            lora_name=None,
            extra_keys=list(blocks.extra_keys),
            group_idx=blocks.group,
            **self._kinds[blocks.group],
        )

    def reset_cache(self) -> bool | None:
        """Forget nothing, and return None for that: vLLM asks at each pause and before it sleeps.

        Stored KV is named by its weights, so it stays right, and other instances may share it.
        """
        return None

    # -- the worker's side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the caches, by layer.

        Raises:
            ConnectorOptionError: The first dimension of a cache does not count blocks.
        """
        self._layers = tuple(kv_caches)
        for layer, cache in kv_caches.items():
            if cache.shape[0] != self._num_blocks:
                raise ConnectorOptionError(
                    f"the KV cache of layer {layer!r} has shape {tuple(cache.shape)}: expected "
                    f"that the first dimension counts its {self._num_blocks} blocks; choose an "
                    "attention backend with that layout"
                )
        self._inner.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> Any:
        return self._inner.get_handshake_metadata()

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        self._inner.handle_preemptions(kv_connector_metadata.inner)

    def bind_connector_metadata(self, connector_metadata: StepMetadata) -> None:
        """Take the connector metadata of the step that begins."""
        super().bind_connector_metadata(connector_metadata)
        self._is_idle = connector_metadata.is_idle
        self._step, self._is_judged = connector_metadata, False
        # A request id may be used again: an early report was of the earlier request.
        self._early -= connector_metadata.loading.keys()
        self._failed -= connector_metadata.loading.keys()
        self._awaited_received |= connector_metadata.loading
        self._awaited_sent |= connector_metadata.ended
        self._inner.bind_connector_metadata(connector_metadata.inner)

    def clear_connector_metadata(self) -> None:
        """End the step; after it no load of a layer may write any more."""
        for layer in self._layers:
            if layer not in self._waited:
                self._inner.wait_for_layer_load(layer)
        self._waited.clear()
        self._inner.clear_connector_metadata()
        super().clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._inner.start_load_kv(forward_context, **kwargs)

    def wait_for_layer_load(self, layer_name: str) -> None:
        self._waited.add(layer_name)
        self._inner.wait_for_layer_load(layer_name)

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        self._inner.save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)

    def wait_for_save(self) -> None:
        """Let the connector save, unless this step computed over blocks that could not be loaded.

        Failed loads of requests that wait for their loads beside the step do not touch it.
        """
        if self._is_judged:
            return
        self._is_judged = True
        self._load_errors |= self._inner.get_block_ids_with_load_errors()
        if not self._load_errors.isdisjoint(self._step.sync_blocks):
            self._num_doubtful = self._num_overlapping
        elif self._num_doubtful:
            self._num_doubtful -= 1
        else:
            self._inner.wait_for_save()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        """Return the requests sent and received that vLLM waits for, each once."""
        self.wait_for_save()
        sent, received = self._inner.get_finished(finished_req_ids)
        named = (sent or set()) | (received or set()) | self._early
        self._tell_requests()
        done_receiving = named & self._awaited_received.keys()
        for request_id in done_receiving:
            del self._awaited_received[request_id]
        done_sending = (named - done_receiving) & self._awaited_sent
        self._awaited_sent -= done_sending
        # A request may be named in the very step after which it turns out to have ended. Once it
        # has ended, the metadata's `ended` tells whether vLLM waits for it.
        self._early = named - done_receiving - done_sending - finished_req_ids
        return done_sending, done_receiving

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Return the same, and which of the received requests begin anew in other blocks."""
        results = super().get_transfer_results(finished_req_ids)
        self._failed |= self._inner.get_failed_recving()
        results.failed_recving = self._failed & results.finished_recving
        self._failed -= results.failed_recving
        return results

    def _tell_requests(self) -> None:
        """Replace blocks that could not be loaded by their requests, where vLLM wants these.

        A connector names blocks before their request is received, or with it, so after
        `get_finished` of the connector and before its answer is used.
        """
        if self._tells_requests:
            self._load_errors |= self._inner.get_block_ids_with_load_errors()
            for request_id, blocks in self._awaited_received.items():
                if not blocks.isdisjoint(self._load_errors):
                    self._failed.add(request_id)
            self._load_errors = set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors = self._load_errors | self._inner.get_block_ids_with_load_errors()
        self._load_errors = set()
        return errors

    def build_connector_worker_meta(self) -> Any:
        return self._inner.build_connector_worker_meta()

    # -- both

    def get_kv_connector_stats(self) -> KVStats | None:
        return self._stats.take(at_once=self._is_idle)

    def shutdown(self) -> None:
        self._inner.shutdown()


def __getattr__(name: str) -> type[WTransferConnector]:
    """Return the adapter's class for a connector, by its name in vLLM; made on demand.

    Raises:
        AttributeError: No connector of wtransfer has that name in vLLM.
    """
    if not is_ours("connectors", name):
        raise AttributeError(name)
    ours = our_name("connectors", name)
    attributes = {"connector_name": ours, "__module__": __name__}
    # By this base vLLM decides whether it may keep its hybrid memory allocator.
    supports_hma = CAN_RESTART and registry("connectors").get(ours).supports_hma
    bases = (WTransferConnector, SupportsHMA) if supports_hma else (WTransferConnector,)
    made = globals()[name] = type(name, bases, attributes)
    return made


def with_our_names(vllm_config: Any, connector_name: str) -> Any:
    """Return a copy of vLLM's configuration with the names that wtransfer's factories know.

    Args:
        vllm_config: vLLM's own.
        connector_name: The connector's name in wtransfer's registry.
    """
    config = copy.copy(vllm_config)
    config.kv_transfer_config = transfer = copy.copy(vllm_config.kv_transfer_config)
    transfer.kv_connector = connector_name
    transfer.kv_connector_module_path = None
    transfer.kv_connector_extra_config = _our_options(transfer.kv_connector_extra_config)
    return config


def _event(cls: type[Any], **fields: Any) -> Any:
    """Return an event of vLLM; older releases have some of the fields."""
    return cls(**{name: fields[name] for name in cls.__struct_fields__ if name in fields})


def _kind_in_events(group: Any) -> dict[str, Any]:
    """Return what vLLM's events say of the kind of a KV cache group; older releases say nothing."""
    kind_of = getattr(kv_cache_interface, "get_kv_cache_spec_kind", None)
    if kind_of is None:
        return {}
    return {
        "kv_cache_spec_kind": kind_of(group.kv_cache_spec).value,
        "kv_cache_spec_sliding_window": kv_cache_interface.get_kv_cache_spec_sliding_window(
            group.kv_cache_spec
        ),
    }


def _our_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which a spec and sub-connectors have their names in wtransfer."""
    ours = dict(options)
    if "spec_name" in ours:
        ours["spec_name"] = our_name("specs", ours["spec_name"])
    if isinstance(ours.get("connectors"), list):
        ours["connectors"] = [
            {
                **sub_connector,
                "kv_connector": our_name("connectors", sub_connector["kv_connector"]),
                "kv_connector_extra_config": _our_options(
                    sub_connector.get("kv_connector_extra_config") or {}
                ),
            }
            if isinstance(sub_connector, dict) and "kv_connector" in sub_connector
            else sub_connector  # MultiConnector says what is wrong with it
            for sub_connector in ours["connectors"]
        ]
    return ours


def cache_shape(vllm_config: Any, kv_cache_config: Any, *, supports_hma: bool) -> KVCacheConfig:
    """Return the shape of vLLM's KV cache in wtransfer's words.

    Args:
        vllm_config: vLLM's own.
        kv_cache_config: vLLM's own.
        supports_hma: True if the connector takes several groups, and windows.

    Raises:
        ConnectorOptionError: The connector cannot move the cache, as it has several groups or is of
            a kind that forgets parts of a prefix.
    """
    block_size = vllm_config.cache_config.block_size
    found = kv_cache_config.kv_cache_groups
    made = [_group(each, is_only=len(found) == 1) for each in found]
    groups = tuple(each for each in made if each is not None)
    parts = [getattr(each.kv_cache_spec, "kv_cache_specs", {}).values() for each in found]
    specs = itertools.chain([each.kv_cache_spec for each in found], *parts)
    is_latent = "MLAAttentionSpec" in {type(each).__name__ for each in specs}
    if (
        is_latent
        and current_platform.is_cpu()
        and not vllm_config.cache_config.enable_prefix_caching
    ):
        raise ConnectorOptionError(
            "vLLM on this CPU has its prefix cache off, for its latent attention (MLA) computes "
            "other tokens over a prefix that was loaded; start it without a KV connector"
        )
    if len(groups) < len(found) or (not supports_hma and groups != KVCacheConfig().groups):
        raise _refused(found, supports_hma=supports_hma)
    sizes = sorted({each.kv_cache_spec.block_size for each in found} | {block_size})
    if len(sizes) > 1:
        words = "connectors of wtransfer need blocks of one size, and this vLLM has blocks of "
        words += f"{' and '.join(map(str, sizes))} tokens"
        raise ConnectorOptionError(
            f"{words}, as layers with heads of several widths have (Gemma 4): {UNIFIED}"
            if len(found) > 1
            else f"{words}, as under context parallelism: start it without"
        )
    num_blocks = kv_cache_config.num_blocks
    # Each tensor states the size of the memory in which all of them lie.
    nbytes = max((tensor.size for tensor in kv_cache_config.kv_cache_tensors), default=0)
    per_block = nbytes // num_blocks if num_blocks else 0
    return KVCacheConfig(num_blocks, block_size, per_block, groups)


def _group(group: Any, *, is_only: bool) -> KVCacheGroup | None:
    """Return a group in wtransfer's words; None: it is of a kind that no connector knows."""
    parts = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    # A stage of a pipeline may have no layer of a group.
    specs = [parts.get(name, group.kv_cache_spec) for name in group.layer_names]
    kinds = {_kind(spec) for spec in specs or [group.kv_cache_spec]}
    kind = kinds.pop()
    if kinds or kind is None:
        return None
    # All layers are of the only group, also those that share the cache of another.
    return KVCacheGroup(() if is_only else tuple(group.layer_names), *kind)


def _kind(spec: Any) -> tuple[int | None, bool] | None:
    """Return window and whether there are states, of a kind of KV cache; None: another kind."""
    kind = type(spec).__name__
    if kind in WHOLE_PREFIX:
        return None, False
    if kind == WINDOW:
        # Tokens that vLLM retains below the window are part of what it wants loaded.
        return spec.sliding_window + spec.extra_retained_tokens, False
    # In this mode alone vLLM says which block has which state; speculation moves them about.
    is_told = kind == STATES and spec.mamba_cache_mode == "align"
    return (None, True) if is_told and not spec.num_speculative_blocks else None


def _refused(groups: Sequence[Any], *, supports_hma: bool) -> ConnectorOptionError:
    kinds = (type(group.kv_cache_spec).__name__ for group in groups)
    described = ", ".join(
        f"{kind} of {len(group.layer_names)} layers"
        for kind, group in zip(kinds, groups, strict=True)
    )
    moved = (
        f"groups of {', '.join(sorted(WHOLE_PREFIX))}, {WINDOW} and {STATES} (the latter with "
        "prefix caching in mode 'align', and without speculative decoding)"
    )
    if not supports_hma:
        moved = (
            f"one group of {' or '.join(sorted(WHOLE_PREFIX))}; OffloadingConnector and "
            f"SharedStorageConnector move {moved}"
        )
    return ConnectorOptionError(
        f"this model's KV cache has {len(groups)} groups ({described}); this connector moves "
        f"{moved}{f'; or {UNIFIED}' if supports_hma and len(groups) > 1 else ''}"
    )
