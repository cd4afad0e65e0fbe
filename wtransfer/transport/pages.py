"""A KV cache in host memory as bytes: a row for each block of a layer, and runs of such rows.

What belongs to one block is scattered: a page for each layer. Pages that lie at even distances are
one array, so that one call into numpy moves all of them: in most caches a block's pages are a layer
apart, and all layers have one size. numpy lets go of the interpreter lock while it copies, and uses
one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    Rows = npt.NDArray[np.uint8]
    """Shape ``(num_blocks, bytes of a page)``; rows may have gaps between them."""


def byte_rows(cache: torch.Tensor, nbytes: int) -> torch.Tensor:
    """Return the first bytes of every block of a layer's cache, uint8, one row for each.

    Args:
        cache: Shape ``(num_blocks, ...)``, any dtype, on any device; what belongs to a block lies
            together.
        nbytes: Bytes of a row.
    """
    size = cache.element_size()
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
        cache.untyped_storage(),
        cache.storage_offset() * size,
        (cache.shape[0], nbytes),
        (cache.stride(0) * size, 1),
    )


class Run:
    """Pages at even distances, one behind the other in a block.

    Args:
        layers: Rows of each layer, alike and evenly spaced.
        num_blocks: How many blocks they all have.
        start: Where the first of the pages begins in a block's bytes.
    """

    def __init__(self, layers: Sequence[Rows], num_blocks: int, start: int) -> None:
        # The view below knows nothing of who owns the memory: it must not go before this does.
        self._owners = list(layers)
        pages = _view(layers, num_blocks)
        self.pages = pages
        """Shape ``(num_blocks, number of pages, bytes of a page)``."""
        self.shape = pages.shape[1:]
        """Shape of a block's."""
        self.nbytes = pages.shape[1] * pages.shape[2]
        """Bytes of a block's."""
        self.where = slice(start, start + self.nbytes)
        """Where they are in a block."""


def runs_of(layers: Sequence[Rows], num_blocks: int) -> Iterator[Run]:
    """Yield the pages of a block, in order, as few runs.

    Args:
        layers: Rows of each layer.
        num_blocks: How many blocks they all have.
    """
    first, start = 0, 0
    while first < len(layers):
        length = _length(layers[first:])
        run = Run(layers[first : first + length], num_blocks, start)
        yield run
        first, start = first + length, start + run.nbytes


def _address(rows: Rows) -> int:
    address: int = rows.__array_interface__["data"][0]
    return address


def _length(layers: Sequence[Rows]) -> int:
    """Return how many layers from the first one on are alike and evenly spaced."""
    first = layers[0]
    alike = [
        rows.shape[1] == first.shape[1] and rows.strides[0] == first.strides[0] for rows in layers
    ]
    addresses = list(map(_address, layers))
    length = 1
    while (
        length < len(layers)
        and alike[length]
        and addresses[length] - addresses[length - 1] == addresses[1] - addresses[0]
    ):
        length += 1
    return length


def _view(layers: Sequence[Rows], num_blocks: int) -> npt.NDArray[np.uint8]:
    """Return evenly spaced layers as one array."""
    first = layers[0]
    distance = _address(layers[1]) - _address(first) if len(layers) > 1 else 0
    return np.lib.stride_tricks.as_strided(
        first[:num_blocks],
        (num_blocks, len(layers), first.shape[1]),
        (first.strides[0], distance, 1),
    )
