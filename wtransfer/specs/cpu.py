"""Spec ``CPUOffloadingSpec``: KV cache in host memory, in an arena that the ranks of a host share.

1. S (`CPUOffloadingManager`) gives blocks slots, and takes them back by a policy.
2. W (`CPUOffloadingWorker`) copies a rank's part of each block, with a header and a checksum.
3. A load is compared with header and checksum before a byte of it reaches the cache.

Linux, one host, one user. Nothing has a name in the file system, so nothing can be left behind.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, ClassVar

from wtransfer.errors import OffloadingOptionError
from wtransfer.specs.arena.headers import HeaderForm
from wtransfer.specs.arena.layout import ArenaLayout
from wtransfer.specs.arena.seat import Seat
from wtransfer.specs.copying.caches import geometries_of, pages_of
from wtransfer.specs.copying.copier import Copier
from wtransfer.specs.cpu_options import CPUOffloadingOptions
from wtransfer.specs.cpu_worker import CPUOffloadingWorker
from wtransfer.specs.interface import OffloadingSpec
from wtransfer.specs.manager import CPUOffloadingManager

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer.config import OffloadingConfig
    from wtransfer.specs.interface import CanonicalKVCaches


class CPUOffloadingSpec(OffloadingSpec):
    """Keeps blocks in host memory.

    Args:
        config: Options in ``extra_config``: see `CPUOffloadingOptions`.

    Raises:
        OffloadingOptionError: An option is missing or cannot be used, or is too small for a block.
    """

    example_options: ClassVar[Mapping[str, Any]] = {"cpu_bytes_to_use": 8 << 30}

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.options = CPUOffloadingOptions.of(config.extra_config)
        """What the user said."""
        self.layout = _layout(config, self.options.cpu_bytes_to_use)
        """How the arena is laid out."""
        self._manager: CPUOffloadingManager | None = None
        self._worker: CPUOffloadingWorker | None = None

    def get_manager(self) -> CPUOffloadingManager:
        """Return the scheduler's side; it takes no memory for blocks.

        Raises:
            OffloadingOptionError: There is no such eviction policy.
        """
        if self._manager is None:
            self._manager = CPUOffloadingManager(
                self.layout.num_slots,
                self.options.eviction_policy,
                enable_events=self.config.enable_kv_cache_events,
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> CPUOffloadingWorker:
        """Take this rank's memory, meet the other ranks, and return the worker.

        Raises:
            OffloadingOptionError: The cache is not what the config says of it.
            WTransferError: The arena cannot be had: see `Seat`.

        Cost: 0.5 s per GiB of this rank, once: all memory is taken before it returns.
        """
        if self._worker is None:
            self._worker = self._make_worker(kv_caches)
        return self._worker

    def _make_worker(self, kv_caches: CanonicalKVCaches) -> CPUOffloadingWorker:
        config, options, rank = self.config, self.options, self.config.parallel.rank
        groups = pages_of(kv_caches)
        geometries = geometries_of(config, kv_caches, self.layout.part_nbytes)
        with contextlib.ExitStack() as on_error:
            seat = Seat(config.engine_id, rank, self.layout, options.deadline_s)
            on_error.callback(seat.close)
            copiers = [
                Copier(
                    seat.part,
                    pages,
                    HeaderForm(geometry.digest, rank),
                    config.cache.blocks_per_chunk,
                    options.verify_checksums,
                )
                for pages, geometry in zip(groups, geometries, strict=True)
            ]
            worker = CPUOffloadingWorker(
                seat, copiers, options.num_copy_threads, options.deadline_s
            )
            on_error.pop_all()
        return worker


def _layout(config: OffloadingConfig, nbytes: int) -> ArenaLayout:
    rank, num_ranks = config.parallel.rank, config.parallel.world_size
    if not 0 <= rank < num_ranks:
        raise OffloadingOptionError(f"rank {rank} of {num_ranks}: ranks begin with 0")
    part_nbytes = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
    if part_nbytes <= 0:
        raise OffloadingOptionError(
            f"worker_kv_bytes_per_block={config.worker_kv_bytes_per_block}, blocks_per_chunk="
            f"{config.cache.blocks_per_chunk}: the spec divides cpu_bytes_to_use into blocks, and "
            "does not know how large one is. Set KVCacheConfig(bytes_per_block=...) in the serving "
            "config's cache_config, or OffloadingConfig(worker_kv_bytes_per_block=...): the bytes "
            "of one block in the KV caches of one rank, all layers together"
        )
    layout = ArenaLayout.within(nbytes, part_nbytes, num_ranks)
    if not layout.num_slots:
        least = ArenaLayout(1, part_nbytes, num_ranks).used_nbytes
        raise OffloadingOptionError(
            f"cpu_bytes_to_use={nbytes:,} is too little for one block, which takes {least:,} bytes "
            f"on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
        )
    return layout
