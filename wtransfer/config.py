"""Configuration in the field's names: Protocols where we are called, dataclasses where we call.

Source: the names and defaults follow vLLM's config classes, so that a serving engine's own
objects can be handed in unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class HasBackend(Protocol):
    """What the engine factory reads of a weight transfer config."""

    @property
    def backend(self) -> str:
        """Name of the engine."""


@dataclass(frozen=True)
class WeightTransferConfig:
    """Which engine moves the weights."""

    backend: str = "nccl"
    """Engine name in the group ``wtransfer.engines``."""


@dataclass(frozen=True)
class ParallelConfig:
    """Where one worker process stands in its serving instance and in the fleet."""

    rank: int = 0
    """Rank within the instance, 0-based."""
    world_size: int = 1
    """Number of ranks of the instance."""
    tensor_parallel_size: int = 1
    """Number of tensor-parallel ranks."""
    pipeline_parallel_size: int = 1
    """Number of pipeline stages."""
    data_parallel_size: int = 1
    """Number of instances that serve the same model."""
    data_parallel_rank: int = 0
    """Rank among the data-parallel instances."""
    data_parallel_index: int = 0
    """Index of this instance among all instances, also where they do not synchronise."""


@dataclass(frozen=True)
class KVTransferConfig:
    """Which connector moves KV cache, and with what options."""

    kv_connector: str | None = None
    """Connector name in the group ``wtransfer.connectors``."""
    engine_id: str | None = None
    """Identity of this serving instance."""
    kv_role: str | None = None
    """``kv_producer``, ``kv_consumer`` or ``kv_both``."""
    kv_connector_module_path: str | None = None
    """Module of a connector that is registered nowhere."""
    kv_connector_extra_config: dict[str, Any] = field(default_factory=dict)
    """Options of the connector, or of the offloading spec (``spec_name``)."""
    kv_load_failure_policy: str = "recompute"
    """``recompute`` or ``fail``."""


@dataclass(frozen=True)
class KVCacheConfig:
    """Shape of one worker's KV cache."""

    num_blocks: int = 0
    """Number of blocks."""
    block_size: int = 16
    """Tokens per block."""


@dataclass(frozen=True)
class ServingConfig:
    """The configs of one serving instance, held together."""

    weight_transfer_config: WeightTransferConfig = field(default_factory=WeightTransferConfig)
    """The weight engine."""
    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    """This process's place."""
    kv_transfer_config: KVTransferConfig | None = None
    """The connector; None where KV stays in the instance."""
