"""Spec ``CPUOffloadingSpec``: KV cache in host memory, in an arena that the ranks of a host share.

1. S (`CPUOffloadingManager`) gives blocks slots, and evicts them by a policy.
2. W (`wtransfer.specs.arena_link.ArenaLink`) copies a rank's part of each block, with a header and
   a checksum.
3. A load is compared with header and checksum before a byte of it reaches the cache.

Linux, one host, one user. Nothing has a name in the file system, so nothing can be left behind.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec

from wtransfer.kv.cache_view import geometries_of, pages_of
from wtransfer.specs.arena import SharedRegion
from wtransfer.specs.arena_link import ArenaLink, arena_layout
from wtransfer.specs.arena_manager import CPUOffloadingManager
from wtransfer.specs.interface import OffloadingSpec
from wtransfer.specs.jobs import Jobs
from wtransfer.specs.worker import JobWorker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer.config import OffloadingConfig
    from wtransfer.kv.canonical import CanonicalKVCaches


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
        self._worker: JobWorker | None = None

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

    def get_worker(self, kv_caches: CanonicalKVCaches) -> JobWorker:
        """Attach this rank's region of the arena, and return the worker.

        Raises:
            OffloadingOptionError: The cache is not what the config says of it.
            WTransferError: The arena cannot be attached: see `SharedRegion.attach`.

        Cost: 0.5 s per GiB of this rank, once: all memory is taken before the return.
        """
        if self._worker is not None:
            return self._worker
        config, options, rank = self.config, self.options, self.config.parallel.rank
        geometries = geometries_of(config, kv_caches, self.layout.part_nbytes)
        groups = list(zip(pages_of(kv_caches), geometries, strict=True))
        name, num_threads = f"rank {rank} of engine {config.engine_id!r}", options.num_copy_threads
        with contextlib.ExitStack() as on_error:
            region = SharedRegion.attach(config.engine_id, rank, self.layout, options.deadline_s)
            on_error.callback(region.detach)
            jobs = Jobs(name, self.layout.num_slots, num_threads, options.deadline_s)
            on_error.callback(jobs.shutdown)
            arena = ArenaLink(
                region,
                groups,
                config.cache.blocks_per_chunk,
                jobs=jobs,
                num_threads=num_threads,
                verified=options.verify_checksums,
            )
            self._worker = JobWorker(name, [arena], jobs)
            on_error.pop_all()
        return self._worker
