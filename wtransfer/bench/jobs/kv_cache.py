"""A KV cache whose bytes can be told: from the round, the block's place in it, and the layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from wtransfer.bench.offload import NUM_LAYERS
from wtransfer.errors import DigestMismatchError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    Words = npt.NDArray[np.uint64]

# Odd: other numbers give other words.
_SPREADING = 0x9E37_79B9_7F4A_7C15
_WORD = (1 << 64) - 1


class KVCache:
    """Pages of all layers.

    Args:
        num_blocks: Blocks.
        block_nbytes: Bytes of a block, over all layers.
    """

    def __init__(self, num_blocks: int, block_nbytes: int) -> None:
        self.num_blocks = num_blocks
        """Blocks."""
        self.block_nbytes = block_nbytes
        """Bytes of a block."""
        page_nbytes = block_nbytes // NUM_LAYERS
        # Written to, so that no page is touched for the first time while it is measured.
        self.layers = {
            f"layer.{number}": torch.full((num_blocks, page_nbytes), 0xEE, dtype=torch.uint8)
            for number in range(NUM_LAYERS)
        }
        """The cache of each layer, by name."""
        self._words = [layer.numpy().view(np.uint64) for layer in self.layers.values()]
        # Else a page whose words have changed places would pass for what it was.
        size = page_nbytes // self._words[0].itemsize
        self._base = np.random.default_rng(0).integers(1 << 64, size=size, dtype=np.uint64)

    def compute(self, number: int, block_ids: Sequence[int]) -> None:
        """Fill blocks as a round does; no page of any round is like another."""
        for mark, page in self._pages(number, block_ids):
            np.bitwise_xor(self._base, mark, out=page)

    def check(self, number: int, block_ids: Sequence[int]) -> None:
        """Compare every byte with what a round has computed.

        Raises:
            DigestMismatchError: One differs.
        """
        for at, (mark, page) in enumerate(self._pages(number, block_ids)):
            if not np.array_equal(page, np.bitwise_xor(self._base, mark)):
                block, layer = divmod(at, NUM_LAYERS)
                raise DigestMismatchError(
                    f"round {number} of the bench brought other bytes than were computed: block "
                    f"{block} of {len(block_ids)}, layer {layer}"
                )

    def _pages(self, number: int, block_ids: Sequence[int]) -> Iterator[tuple[np.uint64, Words]]:
        first = number * len(block_ids) * NUM_LAYERS
        for place, block in enumerate(block_ids):
            for layer, words in enumerate(self._words):
                mark = 1 + first + place * NUM_LAYERS + layer
                yield np.uint64(mark * _SPREADING & _WORD), words[block]
