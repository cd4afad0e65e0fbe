"""What one job copies: blocks of the cache, and the slots that they belong into.

A slot holds a chunk, which is one block of the cache or several. Blocks that follow each other in
a sequence fill chunk after chunk; the first one of a group may begin in the middle of a chunk, and
the last one may end there (`GPULoadStoreSpec.block_indices`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wtransfer.specs.copying.pages import Numbers


class MalformedJobError(ValueError):
    """A job whose two sides do not belong together; stays within the worker that was given it."""


@dataclass(frozen=True)
class Chunks:
    """Chunks of one group."""

    group: int
    """Number of the group."""
    slots: Numbers
    """Their slots, shape ``(n,)``."""
    keys: Sequence[bytes]
    """Their keys."""
    blocks: Numbers
    """Blocks of the cache, shape ``(n, blocks_per_chunk)``; -1: not a part of this job."""

    def __len__(self) -> int:
        return len(self.keys)

    def split(self, size: int) -> Iterator[Chunks]:
        """Yield them, at most so many at a time."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield Chunks(self.group, self.slots[part], self.keys[part], self.blocks[part])

    @property
    def first(self) -> Numbers:
        """The first place of each chunk that is a part of the job, shape ``(n,)``."""
        place: Numbers = (self.blocks >= 0).argmax(axis=1)
        return place

    def places(self) -> tuple[Numbers, Numbers, Numbers]:
        """Return block, row of these chunks, and place in the chunk, of every block there is."""
        rows, at = np.nonzero(self.blocks >= 0)
        return self.blocks[rows, at], rows, at


@dataclass(frozen=True)
class Bounds:
    """Which numbers there are."""

    num_slots: int
    """Slots of the arena."""
    num_blocks: tuple[int, ...]
    """Blocks of each group's cache."""
    blocks_per_chunk: int = 1
    """Blocks in a slot."""


def chunks_of(cache: Any, arena: Any, bounds: Bounds) -> list[Chunks]:
    """Bring both sides of a job together.

    Args:
        cache: Blocks of the cache, as a `GPULoadStoreSpec` or vLLM's.
        arena: Slots of the arena, as an `ArenaLoadStoreSpec`.
        bounds: Which numbers there are.

    Raises:
        MalformedJobError: They do not belong together, or there are no such blocks or slots.
    """
    blocks = np.asarray(cache.block_ids, np.int64)
    slots = np.asarray(arena.slots, np.int64)
    _check_numbers(slots, bounds.num_slots, "slots")
    if len(arena.keys) != len(slots):
        raise MalformedJobError(f"{len(arena.keys)} keys for {len(slots)} slots")
    if not len(cache.group_sizes) == len(cache.block_indices) == len(bounds.num_blocks):
        raise MalformedJobError(
            f"blocks of {len(cache.group_sizes)} groups; the cache has {len(bounds.num_blocks)}"
        )
    found, block, slot = [], 0, 0
    for group, (size, index) in enumerate(zip(cache.group_sizes, cache.block_indices, strict=True)):
        if not size:
            continue
        own = blocks[block : block + size]
        _check_numbers(own, bounds.num_blocks[group], f"blocks of group {group}")
        grid = _grid(own, int(index), bounds.blocks_per_chunk)
        part = slice(slot, slot + len(grid))
        found.append(Chunks(group, slots[part], arena.keys[part], grid))
        block, slot = block + size, slot + len(grid)
    if (block, slot) != (len(blocks), len(slots)):
        raise MalformedJobError(
            f"{len(blocks)} blocks and {len(slots)} slots; {block} blocks fill {slot} slots"
        )
    return found


def _grid(blocks: Numbers, index: int, blocks_per_chunk: int) -> Numbers:
    """Return blocks in rows of a chunk each."""
    skipped = index % blocks_per_chunk
    num_chunks = -(-(skipped + len(blocks)) // blocks_per_chunk)
    grid = np.full(num_chunks * blocks_per_chunk, -1, np.int64)
    grid[skipped : skipped + len(blocks)] = blocks
    return grid.reshape(num_chunks, blocks_per_chunk)


def _check_numbers(numbers: Numbers, limit: int, what: str) -> None:
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= limit):
        raise MalformedJobError(
            f"{what} {numbers.min()} to {numbers.max()}; there are those from 0 to {limit - 1}"
        )
