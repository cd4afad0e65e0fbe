"""Offloading spec `memory-spec`: KV cache in the memory of each worker."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch

from wtransfer import OffloadingConfig, OffloadingSpec, OffloadingWorker
from wtransfer.errors import StallError
from wtransfer.kv.header import checksum
from wtransfer.specs.arena_manager import CPUOffloadingManager
from wtransfer.specs.interface import CanonicalKVCaches, GPULoadStoreSpec, TransferResult

logger = logging.getLogger(__name__)

WAIT_S = 30.0
"""Longest that the model waits for a copy, in seconds."""


class Block(NamedTuple):
    """A block of a job."""

    slot: int
    """Slot of its chunk."""
    key: bytes
    """Key of its chunk."""
    place: int
    """Index in its chunk."""
    group: int
    """Its group of layers."""
    number: int
    """Number in the cache."""


class Kept(NamedTuple):
    """What was stored of a block."""

    key: bytes
    data: torch.Tensor
    checksum: bytes


class MemorySpecWorker(OffloadingWorker):
    """Copy blocks between a rank's cache and its memory, job after job on a thread."""

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int) -> None:
        # The tensors of each group of layers; dimension 0 counts blocks.
        self.pages = [
            [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self.blocks_per_chunk = blocks_per_chunk
        self.kept: dict[tuple[int, int], Kept] = {}
        self.thread = ThreadPoolExecutor(1, thread_name_prefix="memory-spec")
        self.jobs: dict[int, Future[int]] = {}
        self.copied_nbytes = 0

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        """Begin to copy blocks of the cache into slots."""
        return self.submit(job_id, self.store, src_spec, dst_spec)

    def submit_load(
        self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec, expedited: bool = False
    ) -> bool:
        """Begin to copy slots into blocks of the cache."""
        return self.submit(job_id, self.load, dst_spec, src_spec)

    def submit(self, job_id: int, copy: Callable[[Any, Any], int], cache: Any, slots: Any) -> bool:
        """Begin a job, the model computes meanwhile; return False after `shutdown`."""
        try:
            self.jobs[job_id] = self.thread.submit(copy, cache, slots)
        except RuntimeError:
            return False
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended since the last call."""
        results = []
        for job_id in [job_id for job_id, job in self.jobs.items() if job.done()]:
            job, nbytes = self.jobs.pop(job_id), None
            try:
                nbytes = job.result()
            except Exception as error:  # cancelled, too
                logger.warning("job %d failed: %s", job_id, error)
            results.append(TransferResult(job_id, nbytes is not None, transfer_size=nbytes or 0))
        return results

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended; the model waits meanwhile, so not for ever."""
        jobs = [self.jobs[job_id] for job_id in job_ids & self.jobs.keys()]
        if wait(jobs, timeout=WAIT_S).not_done:
            raise StallError(f"memory-spec is busy for {WAIT_S:g} s with a job", seconds=WAIT_S)

    def get_stats(self) -> Mapping[str, float]:
        """Return the number of bytes copied, both ways."""
        return {"copied_bytes_total": self.copied_nbytes}

    def shutdown(self) -> None:
        """End the job that runs, cancel the others, and keep nothing."""
        self.thread.shutdown(cancel_futures=True)
        self.kept.clear()

    # -- on the thread

    def store(self, cache: GPULoadStoreSpec, slots: Any) -> int:
        """Copy blocks of the cache into slots; return how many bytes."""
        nbytes = 0
        for block in self.blocks(cache, slots):
            pages = [tensor[block.number].flatten() for tensor in self.pages[block.group]]
            data = torch.cat([page.view(torch.uint8) for page in pages]).cpu()
            kept = Kept(block.key, data, checksum(data.numpy()))
            self.kept[block.slot, block.place] = kept
            nbytes += data.nbytes
        self.copied_nbytes += nbytes
        return nbytes

    def load(self, cache: GPULoadStoreSpec, slots: Any) -> int:
        """Copy slots into blocks of the cache; return how many bytes."""
        blocks = list(self.blocks(cache, slots))
        # All are compared before one byte is written: a failed load leaves the cache as it was.
        for block in blocks:
            if not self.fits(block):
                raise ValueError(f"slot {block.slot} does not hold the block {block.key.hex()}")
        nbytes = 0
        for block in blocks:
            data = self.kept[block.slot, block.place].data
            nbytes += data.nbytes
            for tensor in self.pages[block.group]:
                page = tensor[block.number]
                page.copy_(data[: page.nbytes].view(page.dtype).view(page.shape))
                data = data[page.nbytes :]
        self.copied_nbytes += nbytes
        return nbytes

    def fits(self, block: Block) -> bool:
        """Return whether a slot holds a block with the bytes that were stored."""
        kept = self.kept.get((block.slot, block.place))
        if kept is None or kept.key != block.key:
            return False
        return checksum(kept.data.numpy()) == kept.checksum

    def blocks(self, cache: GPULoadStoreSpec, slots: Any) -> Iterator[Block]:
        """Yield the blocks of a job: each chunk of a group has one slot and one key."""
        chunks = iter(zip(slots.slots, slots.keys, strict=True))
        numbers = iter(cache.block_ids)
        for group, (size, first) in enumerate(
            zip(cache.group_sizes, cache.block_indices, strict=True)
        ):
            slot, key = -1, b""
            for index in range(first, first + size):
                place = index % self.blocks_per_chunk
                if index == first or place == 0:
                    slot, key = next(chunks)
                yield Block(slot, key, place, group, next(numbers))


@dataclass(kw_only=True)
class Options:
    """Options in ``kv_connector_extra_config``; all others are refused."""

    memory_bytes_to_use: int
    """Memory of all ranks together."""


class MemorySpec(OffloadingSpec):
    """Keep KV cache in the memory of each worker.

    The scheduler's process makes a spec, too: `get_worker` takes memory, and not the constructor.
    """

    options_cls = Options
    example_options: ClassVar[Mapping[str, Any]] = {"memory_bytes_to_use": 8 << 30}

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        chunk_nbytes = config.worker_kv_bytes_per_block * self.blocks_per_chunk
        all_nbytes = max(1, chunk_nbytes) * config.parallel.world_size
        self.num_slots = self.options.memory_bytes_to_use // all_nbytes
        self.manager: CPUOffloadingManager | None = None
        self.worker: MemorySpecWorker | None = None

    def get_manager(self) -> CPUOffloadingManager:
        """Return the scheduler's side."""
        if self.manager is None:
            events = self.config.enable_kv_cache_events
            self.manager = CPUOffloadingManager(self.num_slots, enable_events=events)
        return self.manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> MemorySpecWorker:
        """Return the side of one rank."""
        if self.worker is None:
            self.worker = MemorySpecWorker(kv_caches, self.blocks_per_chunk)
        return self.worker
