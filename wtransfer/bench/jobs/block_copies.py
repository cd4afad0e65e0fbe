"""The yardstick of blocks: plain copies, block by block, on one thread."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from wtransfer.transport.tensors import own_memory

if TYPE_CHECKING:
    import numpy.typing as npt


class BlockCopies:
    """Copies between two places in memory, in another order each time.

    Args:
        num_blocks: Blocks of one copy.
        block_nbytes: Bytes of each.
    """

    def __init__(self, num_blocks: int, block_nbytes: int) -> None:
        # Written to here, so that no page is touched for the first time while it is measured.
        self._source, self._target = (
            own_memory(num_blocks * block_nbytes).reshape(num_blocks, block_nbytes)
            for _ in range(2)
        )
        self._source[:], self._target[:] = 1, 2
        self._random = np.random.default_rng(0)

    def seconds(self) -> float:
        """Return the seconds of one copy of all blocks."""
        num_blocks = len(self._source)
        to, of = (self._random.permutation(num_blocks).tolist() for _ in range(2))
        began = time.perf_counter()
        copy_blocks(self._target, to, self._source, of)
        return time.perf_counter() - began


def copy_blocks(
    target: npt.NDArray[np.uint8], to: list[int], source: npt.NDArray[np.uint8], of: list[int]
) -> None:
    """Copy block by block, each in one piece, on this thread.

    Args:
        target: Shape ``(num_blocks, block_nbytes)``.
        to: Where to.
        source: As `target`.
        of: Where from, as many.
    """
    for one, other in zip(to, of, strict=True):
        np.copyto(target[one], source[other])
