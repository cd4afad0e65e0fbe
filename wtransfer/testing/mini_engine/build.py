"""A reference host from its settings: plain data, so that they can travel to worker processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from wtransfer.config import (
    KVCacheConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    ServingConfig,
)
from wtransfer.connectors.factory import KVConnectorFactory
from wtransfer.connectors.interface import KVConnectorRole
from wtransfer.connectors.naming import BlockNaming
from wtransfer.testing.mini_engine.cache import PagedCache
from wtransfer.testing.mini_engine.loop import LocalWorkers, ServingLoop
from wtransfer.testing.mini_engine.model import PagedTransformer
from wtransfer.testing.mini_engine.pool import BlockPool
from wtransfer.testing.mini_engine.scheduler import Scheduler
from wtransfer.testing.mini_engine.scheduler_link import SchedulerLink
from wtransfer.testing.mini_engine.shape import CacheShape, Limits, ServedShape
from wtransfer.testing.mini_engine.shards import Shards
from wtransfer.testing.mini_engine.worker import ServingWorker
from wtransfer.testing.mini_engine.worker_link import WorkerLink
from wtransfer.weight_sync.worker.session import WorkerSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.connectors.interface import KVConnectorBase_V1
    from wtransfer.testing.mini_engine.loop import Workers
    from wtransfer.transport.communicator import Communicator

_DTYPE = "float32"


class Publishing(msgspec.Struct, frozen=True):
    """Where new weights come from."""

    address: str
    """Of the publisher."""
    token: str
    """Its secret."""


class HostSettings(msgspec.Struct, frozen=True):
    """All that makes a host."""

    model: ServedShape = ServedShape()
    """Sizes of the model."""
    cache: CacheShape = CacheShape()
    """Sizes of the cache of each rank."""
    limits: Limits = Limits()
    """How much is served at once."""
    seed: int = 0
    """Of the first weights."""
    connector: str | None = None
    """Name of the connector; None: there is none."""
    options: dict[str, Any] = {}
    """Its options: ``kv_connector_extra_config``."""
    role: str = "kv_both"
    """``kv_producer``, ``kv_consumer`` or ``kv_both``."""
    module_path: str | None = None
    """Module of a connector that is registered nowhere."""
    on_load_failure: str = "recompute"
    """``recompute`` or ``fail``."""
    engine_id: str = "reference"
    """Identity of this host."""
    num_ranks: int = 1
    """Ranks among which the heads are divided."""
    publishing: Publishing | None = None
    """Where new weights come from; None: there are none."""

    def serving_config(self, rank: int = 0) -> ServingConfig:
        """Return what a connector is told of this host, for the scheduler or for a rank."""
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
            model_config=ModelConfig(self.model_name, _DTYPE),
        )

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        """Shape of each rank's cache."""
        return KVCacheConfig(self.cache.num_blocks, self.cache.block_size, self._nbytes_per_block())

    def make_side(self, role: KVConnectorRole, rank: int = 0) -> KVConnectorBase_V1 | None:
        """Return one side of the connector; None if there is none."""
        if self.connector is None:
            return None
        config = self.serving_config(rank)
        return KVConnectorFactory.create_connector(config, role, self.kv_cache_config)

    @property
    def model_name(self) -> str:
        """Name of the model: its sizes, as its weights have a name of their own."""
        return msgspec.json.encode(self.model).decode()

    def _nbytes_per_block(self) -> int:
        return PagedCache(
            self.model, CacheShape(self.cache.block_size, 1), self._heads_per_rank
        ).nbytes_per_block

    @property
    def _heads_per_rank(self) -> int:
        return self.model.num_kv_heads // self.num_ranks


def make_scheduler(
    settings: HostSettings, hash_function: Callable[[bytes], bytes] | None = None
) -> Scheduler:
    """Return a scheduler that knows of no weights yet.

    Args:
        settings: Of the host.
        hash_function: What its own cache names blocks by; None: the usual one.
    """
    options = {"hash_function": hash_function} if hash_function else {}
    naming = BlockNaming(settings.cache.block_size, settings.model_name.encode(), **options)
    connector = settings.make_side(KVConnectorRole.SCHEDULER)
    return Scheduler(
        BlockPool(settings.cache.num_blocks),
        naming,
        settings.limits,
        SchedulerLink(connector, settings.num_ranks) if connector else None,
        settings.on_load_failure,
    )


def make_worker(settings: HostSettings, group: Communicator | None = None) -> ServingWorker:
    """Return the worker of one rank.

    Args:
        settings: Of the host.
        group: The ranks; None: there is one.
    """
    shards = Shards(settings.model, group)
    model = PagedTransformer(settings.model, settings.seed)
    cache = PagedCache(settings.model, settings.cache, len(shards.heads))
    connector = settings.make_side(KVConnectorRole.WORKER, shards.rank)
    return ServingWorker(
        model,
        cache,
        shards,
        link=WorkerLink(connector, cache) if connector else None,
        session=_session(settings, model, shards),
    )


def make_local_host(
    settings: HostSettings, hash_function: Callable[[bytes], bytes] | None = None
) -> ServingLoop:
    """Return a host of one rank, all in this process.

    Args:
        settings: Of the host.
        hash_function: What blocks are named by; None: the usual one.
    """
    return make_host(settings, LocalWorkers(make_worker(settings)), hash_function)


def make_host(
    settings: HostSettings,
    workers: Workers,
    hash_function: Callable[[bytes], bytes] | None = None,
) -> ServingLoop:
    """Return a host whose scheduler is in this process.

    Args:
        settings: Of the host.
        workers: Its ranks.
        hash_function: What blocks are named by; None: the usual one.
    """
    return ServingLoop(make_scheduler(settings, hash_function), workers)


def _session(
    settings: HostSettings, model: PagedTransformer, shards: Shards
) -> WorkerSession | None:
    if settings.publishing is None:
        return None
    return WorkerSession(
        model,
        join=settings.publishing.address,
        token=settings.publishing.token,
        instance=settings.engine_id,
        rank=shards.rank,
        num_ranks=shards.size,
        name=f"{settings.engine_id}/{shards.rank}",
    )
