"""The paged KV cache of one rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it

if TYPE_CHECKING:
    from wtransfer.testing.mini_engine.shape import CacheShape, ServedShape

DTYPE = torch.float32
"""Of the cache."""


class PagedCache:
    """Keys and values by block.

    Args:
        model: Whose.
        shape: Number and size of the blocks.
        num_kv_heads: Heads that this rank computes.
    """

    def __init__(self, model: ServedShape, shape: CacheShape, num_kv_heads: int) -> None:
        self.block_size = shape.block_size
        """Tokens per block."""
        # Zeros: what lies behind the last token is multiplied by zero, and must be finite for that.
        self.layers = [
            torch.zeros(
                (shape.num_blocks, 2, num_kv_heads, shape.block_size, model.head_width),
                dtype=DTYPE,
            )
            for _ in range(model.num_layers)
        ]
        """For each layer ``(block, key or value, head, position, head width)``."""

    @property
    def nbytes_per_block(self) -> int:
        """Bytes of one block, over all layers."""
        return sum(layer[0].nbytes for layer in self.layers)

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return the layers by name, as connectors get them."""
        return {f"layers.{number}": layer for number, layer in enumerate(self.layers)}

    def write(
        self, layer: int, table: torch.Tensor, start: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write the keys and values of consecutive positions.

        Args:
            layer: Of the model.
            table: The blocks of the sequence, in order: int64.
            start: First position.
            keys: ``(head, position, head width)``.
            values: Likewise.
        """
        positions = torch.arange(start, start + keys.shape[1])
        blocks, offsets = table[positions // self.block_size], positions % self.block_size
        pages = self.layers[layer]
        pages[blocks, 0, :, offsets] = keys.transpose(0, 1)
        pages[blocks, 1, :, offsets] = values.transpose(0, 1)

    def read(self, layer: int, table: torch.Tensor, known: int, length: int) -> torch.Tensor:
        """Return keys and values of the first positions of a sequence.

        Args:
            layer: Of the model.
            table: The blocks of the sequence.
            known: Positions that have been written.
            length: Positions that are returned; those that are not known are zeros.

        Returns:
            ``(key or value, head, position, head width)``, contiguous.
        """
        num_blocks = -(-known // self.block_size)
        pages = self.layers[layer][table[:num_blocks]]
        joined = pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :known]
        return F.pad(joined, (0, 0, 0, length - known)).contiguous()
