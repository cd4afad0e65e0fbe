"""Spec ``TieringOffloadingSpec``: KV cache in a tier, and in an arena of host memory over it.

``tier``, or ``spec_name``, names the tier; ``cpu_bytes_to_use`` makes the arena. Without one,
blocks are copied between cache and tier. With one:

1. S (`wtransfer.specs.tier_manager`) looks a block up in the arena, then in the tier.
2. A load takes what the arena has. Any other block is *promoted*, if the arena has room for all of
   them: the load gets it from the tier, verifies it and writes it to the cache, and to a slot.
   Other requests that want it wait for that.
3. A store goes to the arena. From there a block is put into the tier soon afterwards, or with
   ``write_back`` when it is evicted. A tier that is too slow for that misses blocks: those that are
   evicted before they were put, and with ``write_back`` those for which no buffer comes free within
   `STALL_S`. Blocks that find no room in the arena go to the tier alone.

W has a link to either (`wtransfer.specs.arena_link`, `wtransfer.specs.tier_link`), and so would a
third level.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer.errors import OffloadingOptionError
from wtransfer.kv.cache_view import geometries_of, pages_of
from wtransfer.specs.arena import SharedRegion
from wtransfer.specs.arena_link import ArenaLink, arena_layout
from wtransfer.specs.arena_manager import CPUOffloadingManager
from wtransfer.specs.interface import OffloadingSpec
from wtransfer.specs.jobs import Jobs
from wtransfer.specs.tier import TierOptions, close_tier, open_tier
from wtransfer.specs.tier_link import STALL_S, TierLink
from wtransfer.specs.tier_manager import TierManager
from wtransfer.specs.worker import JobWorker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer.config import OffloadingConfig
    from wtransfer.kv.canonical import CanonicalKVCaches
    from wtransfer.specs.arena import ArenaLayout
    from wtransfer.specs.interface import Tier
    from wtransfer.specs.worker import Link


@functools.cache
def tier_spec(tier_cls: type[Tier]) -> type[TieringOffloadingSpec]:
    """Return the offloading spec that keeps blocks in a tier of this class."""
    attributes = {"tier_cls": tier_cls, "example_options": tier_cls.example_options}
    bases = (TieringOffloadingSpec,)
    return type(tier_cls.__name__, bases, {**attributes, "__module__": tier_cls.__module__})


class TieringOffloadingSpec(OffloadingSpec):
    """Keeps blocks in a tier; `tier_spec` makes the subclass for each.

    Args:
        config: Options in ``extra_config``: `TierOptions`, and the tier's.

    Raises:
        OffloadingOptionError: An option of `TierOptions` cannot be used, or no tier is named.
    """

    tier_cls: ClassVar[type[Tier]]
    """The tier."""
    example_options: ClassVar[Mapping[str, Any]] = {
        "tier": "file",
        "shared_storage_path": "/mnt/kv",
        "cpu_bytes_to_use": 8 << 30,
    }
    options_cls = (TierOptions,)  # and the tier's

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        if not hasattr(self, "tier_cls"):
            raise OffloadingOptionError(
                "TieringOffloadingSpec needs the option tier, the name of a tier: 'file', or one "
                "that a package brings"
            )
        self.options, self.tier_options = TierOptions.of(config.extra_config)
        self.layout: ArenaLayout | None = None
        """Layout of the arena; None: the tier alone."""
        if self.options.cpu_bytes_to_use:
            self.layout = arena_layout(config, self.options.cpu_bytes_to_use)
        self._manager: TierManager | None = None
        self._worker: JobWorker | None = None

    def get_manager(self) -> TierManager:
        """Open the tier for the scheduler's side.

        Raises:
            OffloadingOptionError: There is no such eviction policy.
        """
        if self._manager is None:
            config, options, arena = self.config, self.options, None
            if self.layout is not None:
                arena = CPUOffloadingManager(
                    self.layout.num_slots,
                    options.eviction_policy,
                    enable_events=config.enable_kv_cache_events,
                )
            tier = open_tier(self.tier_cls, self.tier_options)
            self._manager = TierManager(tier, config, options, arena)
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> JobWorker:
        """Open the tier for one rank, and attach its region of the arena.

        Raises:
            OffloadingOptionError: The cache is not what the config says of it, or there is not
                enough memory for ``buffer_bytes``.
            WTransferError: The arena cannot be attached: see `SharedRegion.attach`.
        """
        if self._worker is not None:
            return self._worker
        config, options, layout = self.config, self.options, self.layout
        rank, blocks_per_chunk = config.parallel.rank, config.cache.blocks_per_chunk
        pages = pages_of(kv_caches)
        most = max(each.block_nbytes for each in pages) * blocks_per_chunk
        if layout is not None:
            most = layout.part_nbytes
        groups = list(zip(pages, geometries_of(config, kv_caches, most), strict=True))
        name, num_threads = f"rank {rank} of engine {config.engine_id!r}", options.num_io_threads
        with contextlib.ExitStack() as on_error:
            tier = open_tier(self.tier_cls, self.tier_options)
            on_error.callback(close_tier, tier)
            jobs = Jobs(
                name,
                0 if layout is None else layout.num_slots,
                num_threads,
                2 * options.deadline_s,
                give_up_s=options.deadline_s,
                # A load of blocks of the arena waits for no thread that hangs in the tier.
                pools=("fetch",) if layout is None else ("load", "fetch"),
            )
            on_error.callback(jobs.shutdown)
            below = TierLink(tier, groups, rank, blocks_per_chunk, jobs=jobs, options=options)
            on_error.callback(below.join)
            links: list[Link] = [below]
            if layout is not None:
                region = SharedRegion.attach(config.engine_id, rank, layout)
                on_error.callback(region.detach)
                arena = ArenaLink(
                    region,
                    groups,
                    blocks_per_chunk,
                    jobs=jobs,
                    num_threads=num_threads,
                    below=below,
                    write_back=options.write_back,
                )
                links.insert(0, arena)
            self._worker = JobWorker(name, links, jobs, release_s=STALL_S)
            on_error.pop_all()
        return self._worker
