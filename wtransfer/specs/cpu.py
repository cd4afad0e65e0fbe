"""Spec ``CPUOffloadingSpec``: KV cache in host memory, in an arena that the ranks of a host share.

1. S (`CPUOffloadingManager`) gives blocks slots, and evicts them by a policy.
2. W (`CPUOffloadingWorker`) copies a rank's part of each block, with a header and a checksum.
3. A load is compared with header and checksum before a byte of it reaches the cache.

Linux, one host, one user. Nothing has a name in the file system, so nothing can be left behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from wtransfer.errors import OffloadingOptionError
from wtransfer.kv.cache_view import Pinned, geometries_of, pages_of
from wtransfer.kv.copier import Copier, RefusedError
from wtransfer.kv.slots import HeaderForm
from wtransfer.specs.interface import OffloadingSpec
from wtransfer.specs.jobs import Jobs, JobWorker
from wtransfer.specs.manager import CPUOffloadingManager
from wtransfer.specs.shared_region import ArenaLayout, SharedRegion

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from wtransfer.config import OffloadingConfig
    from wtransfer.kv.canonical import CanonicalKVCaches
    from wtransfer.kv.copier import Chunks

logger = logging.getLogger(__name__)


class CPUOffloadingOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a user, in ``kv_connector_extra_config``."""

    cpu_bytes_to_use: Annotated[int, msgspec.Meta(gt=0, le=1 << 60)]
    """Host memory for all ranks of the instance together, headers included."""
    eviction_policy: str = "lru"
    """``lru``, ``arc`` or ``module:Class``."""
    verify_checksums: bool = True
    """True if bytes are digested when stored, and compared when loaded."""
    num_copy_threads: Annotated[int, msgspec.Meta(gt=0, le=64)] = 2
    """Threads of each rank, for each direction."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 30.0
    """Longest wait for other ranks, or for a copy that makes no progress, in seconds."""


def arena_layout(config: OffloadingConfig, nbytes: int) -> ArenaLayout:
    """Return the layout of an arena of at most `nbytes`, with all its ranks.

    Raises:
        OffloadingOptionError: `nbytes` is too little for a block, or the config does not give the
            size of a block.
    """
    rank, num_ranks = config.parallel.rank, config.parallel.world_size
    if not 0 <= rank < num_ranks:
        raise OffloadingOptionError(f"rank {rank} of {num_ranks}: ranks begin with 0")
    part_nbytes = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
    if part_nbytes <= 0:
        raise OffloadingOptionError(
            f"worker_kv_bytes_per_block={config.worker_kv_bytes_per_block}, blocks_per_chunk="
            f"{config.cache.blocks_per_chunk}: the spec divides cpu_bytes_to_use into blocks, "
            "and does not know how large one is. Set KVCacheConfig(bytes_per_block=...) in the "
            "serving config's cache_config, or OffloadingConfig(worker_kv_bytes_per_block="
            "...): the bytes of one block in the KV caches of one rank, all layers together"
        )
    layout = ArenaLayout.within(nbytes, part_nbytes, num_ranks)
    if not layout.num_slots:
        least = ArenaLayout(1, part_nbytes, num_ranks).used_nbytes
        raise OffloadingOptionError(
            f"cpu_bytes_to_use={nbytes:,} is too little for one block, which takes {least:,} "
            f"bytes on {num_ranks} rank{'s' if num_ranks > 1 else ''}"
        )
    return layout


class CPUOffloadingSpec(OffloadingSpec):
    """Keeps blocks in host memory.

    Args:
        config: Options in ``extra_config``: see `CPUOffloadingOptions`.

    Raises:
        OffloadingOptionError: An option is missing, unknown or cannot be used, or there is too
            little memory for a block.
    """

    example_options: ClassVar[Mapping[str, Any]] = {"cpu_bytes_to_use": 8 << 30}
    options_cls: ClassVar[type[CPUOffloadingOptions]] = CPUOffloadingOptions
    """The options; a subclass of the spec may have more."""
    options: CPUOffloadingOptions
    """The user's options."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.layout = arena_layout(config, self.options.cpu_bytes_to_use)
        """Layout of the arena."""
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
        """Attach this rank's region of the arena, and return the worker.

        Raises:
            OffloadingOptionError: The cache is not what the config says of it.
            WTransferError: The arena cannot be attached: see `SharedRegion.attach`.

        Cost: 0.5 s per GiB of this rank, once: all memory is taken before the return.
        """
        if self._worker is not None:
            return self._worker
        config, options, rank = self.config, self.options, self.config.parallel.rank
        groups = pages_of(kv_caches)
        geometries = geometries_of(config, kv_caches, self.layout.part_nbytes)
        with contextlib.ExitStack() as on_error:
            region = SharedRegion.attach(config.engine_id, rank, self.layout, options.deadline_s)
            on_error.callback(region.detach)
            copiers = [
                Copier(
                    region,
                    pages,
                    HeaderForm(geometry.digest, rank),
                    config.cache.blocks_per_chunk,
                    options.verify_checksums,
                )
                for pages, geometry in zip(groups, geometries, strict=True)
            ]
            name = f"rank {rank} of engine {config.engine_id!r}"
            self._worker = CPUOffloadingWorker(name, region, copiers, options)
            on_error.pop_all()
        return self._worker


def pin_region(region: SharedRegion, copiers: Sequence[Copier]) -> list[Pinned]:
    """Register a region with the devices that copy from and to it."""
    devices = {copier.pages.device for copier in copiers}
    return [Pinned(device, region.address, region.layout.region_nbytes) for device in devices]


class CPUOffloadingWorker(JobWorker):
    """Copies between one rank's cache and the arena. Made by `CPUOffloadingSpec.get_worker`.

    Args:
        name: The rank's name, for errors.
        region: The rank's region of the arena; the worker's from here on.
        copiers: For each group of the cache.
        options: Threads and deadline.
    """

    def __init__(
        self,
        name: str,
        region: SharedRegion,
        copiers: Sequence[Copier],
        options: CPUOffloadingOptions,
    ) -> None:
        self.part = region
        """This rank's region of the arena; has no slots after `shutdown`."""
        self._num_threads = options.num_copy_threads
        jobs = Jobs(name, region.layout.num_slots, options.num_copy_threads, options.deadline_s)
        super().__init__(name, copiers, jobs)
        self._pinned = pin_region(region, copiers)

    def shutdown(self) -> None:
        """End within a second; jobs that have not ended fail. A second call does nothing.

        Where a copy hangs, this rank keeps its name and its memory until the process ends: no other
        process may write where that copy still might.
        """
        if os.getpid() != self._pid or not self._copiers:
            return
        # The copiers hold views of the arena, and of the cache.
        self._copiers = ()
        if not self._jobs.shutdown():
            logger.warning("%s: a copy hangs; its region of the arena stays its own", self._name)
            return
        for pinned in self._pinned:
            pinned.close()
        self.part.detach()

    def _tasks(self, copier: Copier, chunks: Chunks) -> Iterable[Chunks]:
        return copier.tasks(chunks, self._num_threads)

    def _store(self, job_id: int, copier: Copier, chunks: Chunks, mark: object) -> int:  # noqa: ARG002
        """Copy chunks into their slots.

        A store that ends early leaves the slots without headers, and their blocks are refused.

        Raises:
            RefusedError: Another store has opened one of the slots.
        """
        opened = self.part.open(chunks.slots)
        if not self.part.close(chunks.slots, opened, copier.gather(chunks, mark)):
            raise RefusedError("reused")
        return chunks.num_blocks * copier.pages.block_nbytes

    def _load(self, job_id: int, copier: Copier, chunks: Chunks, mark: object) -> int:  # noqa: ARG002
        copier.load(chunks, mark)
        return chunks.num_blocks * copier.pages.block_nbytes
