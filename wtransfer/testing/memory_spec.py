"""The smallest offloading spec: it keeps blocks in a dictionary, and copies them at once.

A fake in the sense that its worker must live in one process, and otherwise real. Tests run faults
against it that a faster spec could hide; authors may read it as an example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from wtransfer.blocks import checksum
from wtransfer.specs.interface import OffloadingSpec, OffloadingWorker, TransferResult
from wtransfer.specs.manager import CPUOffloadingManager

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from wtransfer.blocks import OffloadKey
    from wtransfer.specs.interface import CanonicalKVCaches, GPULoadStoreSpec


class Kept(NamedTuple):
    """What lies in one slot."""

    key: OffloadKey
    """Of the chunk."""
    pages: dict[tuple[int, int], torch.Tensor]
    """Place in the chunk and number of the layer -> its page."""
    checksums: dict[tuple[int, int], bytes]
    """The same -> checksum of the page."""


class Move(NamedTuple):
    """One block that is moved."""

    slot: int
    """Slot of its chunk."""
    key: OffloadKey
    """Key of its chunk."""
    place: int
    """Which block of the chunk it is."""
    group: int
    """Its group."""
    block: int
    """Its number in the cache."""


class MemoryWorker(OffloadingWorker):
    """Copies from tensors to a dictionary and back.

    Args:
        kv_caches: The cache.
        blocks_per_chunk: Blocks that are kept under one key.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int = 1) -> None:
        self.slots: dict[int, Kept] = {}
        """What is kept."""
        self._pages = [
            [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self._blocks_per_chunk = blocks_per_chunk
        self._finished: list[TransferResult] = []
        self._num_bytes = 0

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: Any) -> bool:
        """Copy blocks into the dictionary."""
        chunks: dict[int, Kept] = {}
        nbytes = 0
        for move in self.moves(src_spec, dst_spec):
            kept = chunks.setdefault(move.slot, Kept(move.key, {}, {}))
            for layer, tensor in enumerate(self._pages[move.group]):
                page = tensor[move.block].clone()
                kept.pages[move.place, layer] = page
                kept.checksums[move.place, layer] = checksum(page.numpy())
                nbytes += page.nbytes
        self.slots.update(chunks)
        self._end(job_id, nbytes, success=True)
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy blocks into the cache, unless one of them is not the one that is asked for."""
        moves = list(self.moves(dst_spec, src_spec))
        success = all(self.fits(move) for move in moves)
        nbytes = 0
        for move in moves if success else ():
            for layer, tensor in enumerate(self._pages[move.group]):
                tensor[move.block] = self.slots[move.slot].pages[move.place, layer]
                nbytes += tensor[move.block].nbytes
        self._end(job_id, nbytes, success=success)
        return True

    def get_finished(self) -> list[TransferResult]:
        """Return what ended since the last call."""
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return: jobs have ended when they have been begun."""

    def get_stats(self) -> dict[str, float]:
        """Return how many bytes were moved."""
        return {"bytes_total": self._num_bytes}

    def shutdown(self) -> None:
        """Forget everything."""
        self.slots.clear()

    def moves(self, gpu: GPULoadStoreSpec, where: Any) -> Iterator[Move]:
        """Yield which block belongs to which place of which chunk."""
        chunks = iter(zip(where.slots, where.keys, strict=True))
        blocks = iter(gpu.block_ids)
        for group, (size, first) in enumerate(zip(gpu.group_sizes, gpu.block_indices, strict=True)):
            slot, key = 0, where.keys[0]
            for number in range(size):
                place = (first + number) % self._blocks_per_chunk
                if number == 0 or place == 0:
                    slot, key = next(chunks)
                yield Move(slot, key, place, group, next(blocks))

    def fits(self, move: Move) -> bool:
        """Whether a slot holds the block that is asked for, as it was stored."""
        kept = self.slots.get(move.slot)
        if kept is None or kept.key != move.key:
            return False
        layers = [(move.place, layer) for layer in range(len(self._pages[move.group]))]
        return all(
            at in kept.pages and checksum(kept.pages[at].numpy()) == kept.checksums[at]
            for at in layers
        )

    def _end(self, job_id: int, nbytes: int, *, success: bool) -> None:
        self._num_bytes += nbytes
        self._finished.append(TransferResult(job_id, success, nbytes))


class MemorySpec(OffloadingSpec):
    """Keeps as many blocks as fit into ``memory_bytes_to_use``."""

    manager_cls: type[CPUOffloadingManager] = CPUOffloadingManager
    """The scheduler's side."""
    worker_cls: type[MemoryWorker] = MemoryWorker
    """The worker's side."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        chunk_nbytes = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk
        self._num_slots = int(config.extra_config["memory_bytes_to_use"]) // chunk_nbytes
        self._manager: CPUOffloadingManager | None = None
        self._worker: MemoryWorker | None = None

    def get_manager(self) -> CPUOffloadingManager:
        """Return the scheduler's side."""
        if self._manager is None:
            self._manager = self.manager_cls(
                self._num_slots, enable_events=self.config.enable_kv_cache_events
            )
        return self._manager

    def get_worker(self, kv_caches: CanonicalKVCaches) -> MemoryWorker:
        """Return the worker's side."""
        if self._worker is None:
            self._worker = self.worker_cls(kv_caches, self.blocks_per_chunk)
        return self._worker
