"""The paged KV cache of a rank, and the pool of its blocks with the prefix cache."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it

from wtransfer.testing.mini_engine.contract import KVCacheBlock

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.kv.keys import OffloadKey
    from wtransfer.testing.mini_engine.config import CacheShape, ModelShape


class PagedCache:
    """Keys and values of one rank, by block.

    Args:
        model: Shape of the model.
        shape: Number and size of the blocks.
        num_kv_heads: Heads that this rank computes.
    """

    def __init__(self, model: ModelShape, shape: CacheShape, num_kv_heads: int) -> None:
        self.block_size = shape.block_size
        # Zeros: values behind the last token are multiplied by zero, and must be finite for that.
        places = [model.place_of(number) for number in range(model.num_layers)]
        rows = [num_kv_heads, shape.block_size]
        if shape.is_transposed:
            rows.reverse()
        pages = [
            torch.zeros(shape.num_blocks, 2, *rows, model.head_width)
            for _ in range(max(places) + 1)
        ]
        if shape.is_transposed:
            pages = [page.transpose(2, 3) for page in pages]
        # As in vLLM, layers of different groups share their memory: a block is one group's.
        self.layers = [pages[place] for place in places]
        """For each layer ``(block, key or value, head, position, head width)``."""
        self._names = model.layer_names

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return the layers by name, as connectors register them."""
        return dict(zip(self._names, self.layers, strict=True))

    def write(
        self, layer: int, table: torch.Tensor, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write the keys and values of consecutive positions.

        Args:
            layer: Number of the layer.
            table: Blocks of the sequence, in order: int64.
            start: First position.
            keys: ``(head, position, head width)``.
            values: ``(head, position, head width)``.
        """
        positions = torch.arange(start, start + keys.shape[1])
        blocks, offsets = table[positions // self.block_size], positions % self.block_size
        pages = self.layers[layer]
        pages[blocks, 0, :, offsets] = keys.transpose(0, 1)
        pages[blocks, 1, :, offsets] = values.transpose(0, 1)

    def read(self, layer: int, table: torch.Tensor, known: int, length: int) -> torch.Tensor:
        """Return keys and values of the first positions of a sequence.

        Args:
            layer: Number of the layer.
            table: Blocks of the sequence.
            known: Positions that have been written.
            length: Positions that are returned; those behind `known` are zeros.

        Returns:
            ``(key or value, head, position, head width)``, contiguous.
        """
        num_blocks = -(-known // self.block_size)
        pages = self.layers[layer][table[:num_blocks]]
        joined = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :known]
        return F.pad(joined, (0, 0, 0, length - known)).contiguous()


class BlockPool:
    """Reference counts of the blocks, and the prefix cache: block by key.

    A free block keeps its contents and its key until it is allocated again: least recently used
    blocks first.

    Args:
        num_blocks: Blocks of the cache.
        num_reserved: First ones of them that are never given out.
    """

    def __init__(self, num_blocks: int, num_reserved: int = 0) -> None:
        self.num_blocks = num_blocks - num_reserved
        """Size of the pool."""
        self.blocks = [KVCacheBlock(number) for number in range(num_blocks)]
        """Blocks of the cache by number, as connectors hold them."""
        self._num_pins = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_reserved, num_blocks))
        self._blocks: dict[OffloadKey, int] = {}
        self._keys: dict[int, OffloadKey] = {}

    @property
    def num_free(self) -> int:
        """Blocks that are not pinned."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Return pinned blocks to be written; None, with no effect, if fewer are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._num_pins[block] = 1
            key = self._keys.pop(block, None)
            if key is not None:
                del self._blocks[key]
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Pin blocks once more, under vLLM's name."""
        self.pin([each.block_id for each in blocks])

    def free_blocks(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Unpin blocks, under vLLM's name."""
        self.release([each.block_id for each in blocks])

    def pin(self, blocks: Sequence[int]) -> None:
        """Pin blocks once more."""
        for block in blocks:
            self._num_pins[block] += 1
            self._free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Unpin blocks. The tail of a sequence is evicted first: a head is of use without it."""
        for block in reversed(blocks):
            self._num_pins[block] -= 1
            assert self._num_pins[block] >= 0, f"block {block} was released twice"
            if not self._num_pins[block]:
                self._free[block] = None

    def lookup(self, key: OffloadKey) -> int | None:
        """Return the block of a key, without pinning it; None: it is not cached."""
        return self._blocks.get(key)

    def insert(self, block: int, key: OffloadKey) -> None:
        """Record the key of a block, unless another block has it already."""
        if self._blocks.setdefault(key, block) == block:
            self._keys[block] = key

    def reset(self) -> None:
        """Empty the prefix cache."""
        self._blocks.clear()
        self._keys.clear()
