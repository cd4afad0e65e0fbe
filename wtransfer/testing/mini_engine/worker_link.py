"""A worker's end of what connects this host with a connector."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wtransfer.testing.mini_engine.messages import Said
from wtransfer.testing.mini_engine.plain import from_plain, to_plain

if TYPE_CHECKING:
    import torch

    from wtransfer.connectors.interface import KVConnectorBase_V1
    from wtransfer.testing.mini_engine.cache import PagedCache
    from wtransfer.testing.mini_engine.messages import StepPlan


@dataclass
class AttentionLayer:
    """A layer of the model that has a cache."""

    kv_cache: torch.Tensor
    """Its whole cache; dim 0 counts blocks."""


@dataclass
class ForwardContext:
    """What a connector hears of a forward pass, under vLLM's names."""

    attn_metadata: Any
    """The spans that are computed."""
    no_compile_layers: dict[str, AttentionLayer] = field(default_factory=dict)
    """Layers by name."""


class WorkerLink:
    """Calls the connector's worker side, in vLLM's order.

    Args:
        connector: The side.
        cache: Of this rank.
    """

    def __init__(self, connector: KVConnectorBase_V1, cache: PagedCache) -> None:
        self.connector = connector
        """The side."""
        self._caches = cache.by_name()
        self._names = list(self._caches)
        self._layers = {name: AttentionLayer(each) for name, each in self._caches.items()}
        self._context = ForwardContext([], self._layers)
        self._bad_blocks: set[int] = set()
        connector.register_kv_caches(self._caches)

    def handshake(self) -> Any:
        """Return what the side says before the first step, as plain data."""
        metadata = self.connector.get_handshake_metadata()
        return None if metadata is None else to_plain(metadata)

    def begin(self, plan: StepPlan) -> None:
        """Begin a step."""
        metadata = from_plain(plan.metadata)
        self._context = ForwardContext(plan.spans, self._layers)
        self.connector.handle_preemptions(metadata)
        self.connector.bind_connector_metadata(metadata)

    def load(self) -> None:
        """Begin the step's loads."""
        self.connector.start_load_kv(self._context)

    def has_failed(self) -> bool:
        """Return whether a load is known to have failed."""
        self._bad_blocks |= self.connector.get_block_ids_with_load_errors()
        return bool(self._bad_blocks)

    def wait_for_loads(self) -> None:
        """Wait for the loads of all layers, where no forward pass does."""
        for name in self._names:
            self.connector.wait_for_layer_load(name)

    def before_layer(self, number: int) -> None:
        """Wait for a layer's loads."""
        self.connector.wait_for_layer_load(self._names[number])

    def after_layer(self, number: int) -> None:
        """Hand a layer on."""
        name = self._names[number]
        self.connector.save_kv_layer(name, self._caches[name], self._context.attn_metadata)

    def save(self) -> None:
        """Let the step count."""
        self.connector.wait_for_save()

    def end(self, finished_req_ids: set[str]) -> Said:
        """End the step; return what the side says."""
        sent, received = self.connector.get_finished(finished_req_ids)
        self.has_failed()
        bad_blocks, self._bad_blocks = self._bad_blocks, set()
        metadata = self.connector.build_connector_worker_meta()
        self.connector.clear_connector_metadata()
        return Said(
            sent or set(),
            received or set(),
            bad_blocks,
            None if metadata is None else to_plain(metadata),
        )

    def close(self) -> None:
        """Let go of the side."""
        self.connector.shutdown()
