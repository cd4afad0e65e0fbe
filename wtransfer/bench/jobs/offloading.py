"""Blocks into an arena and back, in turn with plain copies of the same bytes."""

from __future__ import annotations

import os
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from wtransfer.bench.jobs import tell
from wtransfer.bench.jobs.block_copies import copy_blocks
from wtransfer.bench.offload import NUM_LAYERS
from wtransfer.blocks import fence_key, make_offload_key
from wtransfer.config import OffloadingConfig
from wtransfer.errors import DigestMismatchError
from wtransfer.specs.cpu import CPUOffloadingSpec
from wtransfer.specs.interface import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
)
from wtransfer.specs.shared_region import ArenaLoadStoreSpec, stride_of
from wtransfer.transport.niceness import NICENESS
from wtransfer.transport.tensors import own_memory

if TYPE_CHECKING:
    from collections.abc import Callable

_WARM_UP_ROUNDS = 1
_PER_SLOT_NBYTES = 256
_SPARE_NBYTES = 1 << 20


def measure(block_nbytes: int, nbytes: int, num_rounds: int, **_: Any) -> None:
    """Tell the seconds of every round, of each way to copy.

    Blocks and slots are in random order: what a cache and an arena look like after a while.

    Args:
        block_nbytes: Bytes of a block.
        nbytes: Bytes of all blocks.
        num_rounds: Rounds that count.
    """
    # Threads that store step back, and would be held against copies that do not.
    os.nice(NICENESS)
    # Torch's threads spin for milliseconds after they have filled a tensor: on processors on which
    # copies are timed by then.
    torch.set_num_threads(1)
    bench = _Bench(block_nbytes, nbytes // block_nbytes)
    for number in range(_WARM_UP_ROUNDS + num_rounds):
        if number == _WARM_UP_ROUNDS:
            bench.seconds.clear()
        bench.round(number)
    tell(**bench.seconds)


class _Bench:
    def __init__(self, block_nbytes: int, num_blocks: int) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        page_nbytes = block_nbytes // NUM_LAYERS
        self._layers = [
            torch.zeros(num_blocks, page_nbytes, dtype=torch.uint8) for _ in range(NUM_LAYERS)
        ]
        self._arenas = {
            verified: _Arena(self._layers, block_nbytes, verified) for verified in (True, False)
        }
        self._blocks = own_memory(num_blocks * block_nbytes).reshape(num_blocks, block_nbytes)
        self._blocks[:] = 0
        self._random = np.random.default_rng(0)

    def round(self, number: int) -> None:
        """Do everything once, with other bytes and in another order than before."""
        for at, layer in enumerate(self._layers):
            layer.fill_(number + at)
        num_blocks = len(self._blocks)
        blocks, slots = (self._random.permutation(num_blocks).tolist() for _ in range(2))
        parts = self._arenas[True].parts
        self._time("memcpy_in", lambda: copy_blocks(parts, slots, self._blocks, blocks))
        self._time("memcpy_out", lambda: copy_blocks(self._blocks, blocks, parts, slots))
        for verified, arena in self._arenas.items():
            name = "" if verified else "_unverified"
            self._time(f"put{name}", lambda arena=arena: arena.put(blocks, slots))  # type: ignore[misc]
            for layer in self._layers:
                layer.zero_()
            self._time(f"get{name}", lambda arena=arena: arena.get(blocks, slots))  # type: ignore[misc]
            if not all(_is_filled(each, number + at) for at, each in enumerate(self._layers)):
                raise DigestMismatchError(f"round {number} of the bench brought other bytes")

    def _time(self, name: str, call: Callable[[], None]) -> None:
        began = time.perf_counter()
        call()
        self.seconds[name].append(time.perf_counter() - began)


class _Arena:
    """One rank of `CPUOffloadingSpec`, and a host that does one job at a time."""

    def __init__(self, layers: list[torch.Tensor], block_nbytes: int, verified: bool) -> None:
        page_nbytes = layers[0].shape[1]
        self._keys = [
            fence_key(make_offload_key(number.to_bytes(16, "big")), "weights")
            for number in range(layers[0].shape[0])
        ]
        slots_nbytes = len(self._keys) * (stride_of(block_nbytes) + _PER_SLOT_NBYTES)
        spec = CPUOffloadingSpec(
            OffloadingConfig(
                {"cpu_bytes_to_use": slots_nbytes + _SPARE_NBYTES, "verify_checksums": verified},
                worker_kv_bytes_per_block=block_nbytes,
            )
        )
        self._worker = spec.get_worker(
            CanonicalKVCaches(
                [CanonicalKVCacheTensor(layer, page_nbytes) for layer in layers],
                [[CanonicalKVCacheRef(at, page_nbytes) for at in range(len(layers))]],
            )
        )
        self.parts = self._worker.part.slots
        """Memory of the slots."""

    def put(self, blocks: list[int], slots: list[int]) -> None:
        """Store blocks into slots."""
        self._worker.submit_store(0, GPULoadStoreSpec(blocks), self._slots(slots))
        self._finish()

    def get(self, blocks: list[int], slots: list[int]) -> None:
        """Load blocks from slots."""
        self._worker.submit_load(0, self._slots(slots), GPULoadStoreSpec(blocks))
        self._finish()

    def _slots(self, slots: list[int]) -> ArenaLoadStoreSpec:
        return ArenaLoadStoreSpec(slots, self._keys)

    def _finish(self) -> None:
        self._worker.wait({0})
        if not all(result.success for result in self._worker.get_finished()):
            raise DigestMismatchError(f"the bench's arena failed: {dict(self._worker.get_stats())}")


def _is_filled(layer: torch.Tensor, value: int) -> bool:
    """Look at every byte, fast: threads are slow to start after a long time without any."""
    return [int(each) for each in layer.aminmax()] == [value, value]
