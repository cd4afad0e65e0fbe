"""A reference host from its settings: plain data, so that they can travel to worker processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from wtransfer.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from wtransfer.demo.serving.cache import PagedCache
from wtransfer.demo.serving.loop import LocalWorkers, ServingLoop
from wtransfer.demo.serving.model import PagedTransformer
from wtransfer.demo.serving.offload import Offload
from wtransfer.demo.serving.pool import BlockPool
from wtransfer.demo.serving.request import BlockNames
from wtransfer.demo.serving.scheduler import Scheduler
from wtransfer.demo.serving.shape import CacheShape, ServedShape
from wtransfer.demo.serving.shards import Shards
from wtransfer.demo.serving.worker import ServingWorker
from wtransfer.engines.session import WorkerSession
from wtransfer.specs.factory import OffloadingSpecFactory
from wtransfer.specs.fenced import FencedSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.demo.serving.loop import Workers
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
    seed: int = 0
    """Of the first weights."""
    tier: dict[str, Any] | None = None
    """Options of the offloading spec, ``spec_name`` among them; None: no tier."""
    engine_id: str = "reference"
    """Identity of this host: its ranks share a tier by it."""
    num_ranks: int = 1
    """Ranks among which the heads are divided."""
    publishing: Publishing | None = None
    """Where new weights come from; None: there are none."""

    def spec(self, rank: int = 0) -> FencedSpec | None:
        """Return the fenced spec, for the scheduler or for a rank."""
        if self.tier is None:
            return None
        return FencedSpec(OffloadingSpecFactory.create_spec(self._config(rank)), rank=rank)

    def _config(self, rank: int) -> OffloadingConfig:
        layers = tuple(f"layers.{number}" for number in range(self.model.num_layers))
        return OffloadingConfig(
            extra_config=self.tier or {},
            engine_id=self.engine_id,
            worker_kv_bytes_per_block=self._nbytes_per_block(),
            groups=(OffloadingGroupConfig(self.cache.block_size, layers),),
            model=OffloadingModelConfig(self.model_name, _DTYPE),
            cache=OffloadingCacheConfig(self.cache.block_size),
            parallel=OffloadingParallelConfig(
                rank=rank, world_size=self.num_ranks, tp_size=self.num_ranks
            ),
            enable_kv_cache_events=True,
        )

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
        hash_function: What blocks are named by; None: the usual one.
    """
    names = BlockNames(settings.cache.block_size, settings.model_name.encode(), hash_function)
    spec = settings.spec()
    return Scheduler(
        BlockPool(settings.cache.num_blocks),
        names,
        settings.cache.block_size,
        Offload(spec.get_manager(), settings.num_ranks) if spec else None,
    )


def make_worker(
    settings: HostSettings, group: Communicator | None = None, spec: FencedSpec | None = None
) -> ServingWorker:
    """Return the worker of one rank.

    Args:
        settings: Of the host.
        group: The ranks; None: there is one.
        spec: Fenced, for this rank; None: made from the settings.
    """
    shards = Shards(settings.model, group)
    model = PagedTransformer(settings.model, settings.seed)
    cache = PagedCache(settings.model, settings.cache, len(shards.heads))
    spec = spec or settings.spec(shards.rank)
    return ServingWorker(
        model,
        cache,
        shards,
        offload=spec.get_worker(cache.canonical()) if spec else None,
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
