"""A worker's KV cache as rows of bytes: a block is one row, its layers one after the other."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch

from wtransfer.connectors.caches import page_form
from wtransfer.errors import ConnectorOptionError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class CachePages:
    """The caches of all layers.

    Args:
        kv_caches: By layer; dim 0 counts blocks, elements of the last dim lie together.

    Raises:
        ConnectorOptionError: They cannot be copied by block.
        ManifestError: A dtype that does not travel.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        if not kv_caches:
            raise ConnectorOptionError("the KV cache has no layers: there is nothing to keep")
        self._caches = [_as_bytes(name, cache) for name, cache in kv_caches.items()]
        numbers = {cache.shape[0] for cache in self._caches}
        if len(numbers) > 1:
            raise ConnectorOptionError(
                f"layers of the KV cache have different numbers of blocks: {sorted(numbers)}; this "
                "connector moves one group of layers"
            )
        self.num_blocks: int = numbers.pop()
        """Number of blocks."""
        sizes = [cache[:1].numel() for cache in self._caches]
        forms = [page_form(name, cache) for name, cache in kv_caches.items()]
        self.pages = tuple(zip(forms, sizes, strict=True))
        """What each layer's part of a block is, and its bytes."""
        ends = itertools.accumulate(sizes)
        self._parts = [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        self.block_nbytes = sum(sizes)
        """Bytes of a block."""
        self._rows = torch.empty((0, self.block_nbytes), dtype=torch.uint8, device="cpu")

    def rows(self, number: int) -> torch.Tensor:
        """Return host memory for blocks, uint8, shape ``(number, block_nbytes)``.

        It is the same memory each time: new memory costs as much as the copy.
        """
        if len(self._rows) < number:
            shape = (number, self.block_nbytes)
            self._rows = torch.empty(shape, dtype=torch.uint8, device="cpu")
        return self._rows[:number]

    def gather(self, block_ids: Sequence[int]) -> torch.Tensor:
        """Return blocks as `rows`.

        On a device it waits until the model has computed them.
        """
        rows = self.rows(len(block_ids))
        index = self._index(block_ids)
        for cache, places in self._places(rows):
            if cache.is_cpu:
                for place, block in zip(places, block_ids, strict=True):
                    place.copy_(cache[block])
            else:
                places.copy_(cache.index_select(0, index.to(cache.device)))
        return rows

    def scatter(self, block_ids: Sequence[int], rows: torch.Tensor) -> None:
        """Write rows, as `gather` returns them, into blocks."""
        index = self._index(block_ids)
        for cache, places in self._places(rows):
            if cache.is_cpu:
                # Ten times as fast as one call for all.
                for place, block in zip(places, block_ids, strict=True):
                    cache[block].copy_(place)
            else:
                cache.index_copy_(0, index.to(cache.device), places.to(cache.device))

    def _places(self, rows: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each layer's cache, and its parts of rows in the shape of its blocks."""
        for cache, part in zip(self._caches, self._parts, strict=True):
            yield cache, rows[:, part].view(len(rows), *cache.shape[1:])

    def _index(self, block_ids: Sequence[int]) -> torch.Tensor:
        # On a device an index that is out of range would end the process, not the load.
        if block_ids and not 0 <= min(block_ids) <= max(block_ids) < self.num_blocks:
            raise IndexError(f"blocks {block_ids} of {self.num_blocks}")
        return torch.tensor(block_ids, dtype=torch.int64, device="cpu")


def _as_bytes(name: str, cache: torch.Tensor) -> torch.Tensor:
    """Return a view of a cache whose elements are bytes: any dtype can then be moved."""
    if cache.dim() < 2 or cache.stride(-1) != 1:  # noqa: PLR2004  # blocks, and what is in them
        raise ConnectorOptionError(
            f"the KV cache of layer {name!r} has shape {tuple(cache.shape)} and strides "
            f"{cache.stride()}: expected that the first dimension counts blocks, and that elements "
            "of the last one lie together"
        )
    return cache.detach().view(torch.uint8)
