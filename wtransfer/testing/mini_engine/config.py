"""Configuration of a mini engine: plain data, so that it can be sent to the processes of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import msgspec

from wtransfer.config import (
    KVCacheConfig,
    KVCacheGroup,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    ServingConfig,
)
from wtransfer.connectors.factory import KVConnectorFactory
from wtransfer.errors import ConnectorOptionError

if TYPE_CHECKING:
    from wtransfer.connectors.interface import KVConnectorBase_V1, KVConnectorRole

DTYPE = "float32"
"""Name of the dtype of weights, keys and values."""
_DTYPE_NBYTES = 4


class ModelShape(msgspec.Struct, frozen=True):
    """Sizes of the transformer."""

    num_layers: int = 2
    width: int = 64
    """Size of the residual stream."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key and value heads; each serves the same number of query heads."""
    vocabulary: int = 256
    """Number of different tokens."""
    windows: tuple[int | None, ...] = (None,)
    """Tokens that a token attends to, itself included, of the layers in turn; None: all before it.
    Layers of the first, the second and so on are a KV cache group each."""

    @property
    def head_width(self) -> int:
        """Size of one head."""
        return self.width // self.num_heads

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads

    @property
    def layer_names(self) -> list[str]:
        """Names of the layers, as connectors know them."""
        return [f"layers.{number}" for number in range(self.num_layers)]

    def group_of(self, layer: int) -> int:
        """Return the number of a layer's KV cache group."""
        return layer % len(self.windows)

    def place_of(self, layer: int) -> int:
        """Return the place of a layer in its KV cache group."""
        return layer // len(self.windows)


class CacheShape(msgspec.Struct, frozen=True):
    """Sizes of a paged KV cache."""

    block_size: int = 16
    """Tokens per block."""
    num_blocks: int = 256
    is_transposed: bool = False
    """True: in memory the heads of a position come one after the other; the shape is the same."""


class Limits(msgspec.Struct, frozen=True):
    """Limits of one step."""

    max_num_seqs: int = 8
    """Most requests that run side by side."""
    max_num_batched_tokens: int = 2048
    """Most tokens that one step computes; longer prompts are computed in chunks."""


class EngineConfig(msgspec.Struct, frozen=True):
    """Configuration of one serving instance."""

    model: ModelShape = ModelShape()
    cache: CacheShape = CacheShape()
    """Sizes of the cache of each rank."""
    limits: Limits = Limits()
    seed: int = 0
    """Seed of the first weights."""
    connector: str | None = None
    """Name of the connector; None: the engine runs without one."""
    options: dict[str, Any] = {}
    """Options of the connector: ``kv_connector_extra_config``."""
    role: str = "kv_both"
    """``kv_producer``, ``kv_consumer`` or ``kv_both``."""
    module_path: str | None = None
    """Module of a connector that is not registered."""
    on_load_failure: Literal["recompute", "fail"] = "recompute"
    """Action on a request whose blocks could not be loaded."""
    engine_id: str = "mini"
    """Identity of this instance."""
    num_ranks: int = 1
    """Tensor-parallel ranks: the heads are divided among them."""
    join: str | None = None
    """Address of the publisher of new weights; None: the weights never change."""
    token: str | None = None
    """Token of the publisher."""

    @property
    def model_name(self) -> str:
        """Name of the model: its sizes. The weights are identified by their fingerprint."""
        return msgspec.json.encode(self.model).decode()

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """Shape of each rank's cache."""
        values_per_token = 2 * (self.model.num_kv_heads // self.num_ranks) * self.model.head_width
        # The layers in one place of all groups share their memory: a block is of one group.
        num_places = self.model.place_of(self.model.num_layers - 1) + 1
        nbytes_per_block = self.cache.block_size * num_places * values_per_token * _DTYPE_NBYTES
        windows, names = self.model.windows, self.model.layer_names
        groups = tuple(
            KVCacheGroup(tuple(names[number :: len(windows)]) if len(windows) > 1 else (), window)
            for number, window in enumerate(windows)
        )
        shape = self.cache
        return KVCacheConfig(shape.num_blocks, shape.block_size, nbytes_per_block, groups)

    @property
    def is_hybrid(self) -> bool:
        """True if the cache has several groups, or a window."""
        return self.model.windows != ModelShape().windows

    @property
    def connector_supports_hma(self) -> bool:
        """True if the connector says that it moves several groups, and windows."""
        config = self.serving_config().kv_transfer_config
        found: Any = KVConnectorFactory.get_connector_class(config)
        return bool(found.supports_hma)

    def serving_config(self, rank: int = 0) -> ServingConfig:
        """Return the configuration that the connector of the scheduler, or of a rank, is given."""
        return ServingConfig(
            parallel_config=ParallelConfig(
                rank=rank, world_size=self.num_ranks, tensor_parallel_size=self.num_ranks
            ),
            kv_transfer_config=KVTransferConfig(
                kv_connector=self.connector,
                engine_id=self.engine_id,
                kv_role=self.role,
                kv_connector_module_path=self.module_path,
                kv_connector_extra_config=dict(self.options),
                kv_load_failure_policy=self.on_load_failure,
            ),
            cache_config=self.kv_cache_config,
            model_config=ModelConfig(self.model_name, DTYPE),
        )

    def make_connector(self, role: KVConnectorRole, rank: int = 0) -> KVConnectorBase_V1 | None:
        """Return one side of the connector; None if the engine runs without one.

        Raises:
            ConnectorOptionError: The cache has several groups, or a window, and the connector does
                not say that it supports them.
        """
        if self.connector is None:
            return None
        config = self.serving_config(rank)
        if self.is_hybrid and not self.connector_supports_hma:
            raise ConnectorOptionError(
                f"this model's KV cache has {len(self.model.windows)} groups, with the windows "
                f"{list(self.model.windows)}; {self.connector} moves one group without a window: "
                "choose a connector that says supports_hma, as OffloadingConnector does"
            )
        return KVConnectorFactory.create_connector(config, role, self.kv_cache_config)
