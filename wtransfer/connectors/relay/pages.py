"""A worker's KV cache as pages: one for each layer and block, as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import xxhash

from wtransfer.blocks import BlockGeometry
from wtransfer.errors import ConnectorOptionError
from wtransfer.transport.tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt

    from wtransfer.connectors.settings import Instance
    from wtransfer.transport.tensors import ByteArray

PART_NBYTES = 256 * 1024
"""Bytes that are copied and then digested: they are in the processor's cache in between."""


class CachePages:
    """The pages of all layers.

    Args:
        kv_caches: The caches, by layer; dim 0 counts blocks.
        instance: Whose they are.

    Raises:
        ConnectorOptionError: A cache is not laid out by block, or is on a device.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], instance: Instance) -> None:
        if not kv_caches:
            raise ConnectorOptionError("the model has no KV cache; a connector has nothing to move")
        self.index = {name: number for number, name in enumerate(kv_caches)}
        """Number of each layer."""
        # The arrays know nothing of torch's memory: it must not go before they do.
        self._owners = list(kv_caches.values())
        self._rows = [_rows(name, cache) for name, cache in kv_caches.items()]
        self.num_blocks = min(len(rows) for rows in self._rows)
        """Blocks of the cache."""
        pages = tuple(
            (_form(cache), rows.shape[1])
            for cache, rows in zip(self._owners, self._rows, strict=True)
        )
        self.geometry = BlockGeometry(
            instance.block_size, pages, instance.num_ranks, f"{instance.model} {instance.dtype}"
        )
        """How its blocks are laid out."""

    def page(self, layer: int, block: int) -> ByteArray:
        """Return one page; writing to it writes to the cache."""
        page: ByteArray = self._rows[layer][block]
        return page

    def of(self, block: int) -> list[ByteArray]:
        """Return all pages of a block, by layer."""
        return [rows[block] for rows in self._rows]

    def close(self) -> None:
        """Let go of the cache."""
        self._rows, self._owners = [], []


def copy_digest(target: ByteArray, source: ByteArray) -> bytes:
    """Copy bytes and return their digest: that of what was written, whatever else is written there.

    Cost: about 1 us, and per byte a quarter more than a copy.
    """
    if target.size <= PART_NBYTES:
        target[:] = source  # half the overhead of `copyto`, which counts for small pages
        return xxhash.xxh3_128_digest(target)  # type: ignore[arg-type]  # any buffer does
    digest = xxhash.xxh3_128()
    for start in range(0, target.size, PART_NBYTES):
        part = target[start : start + PART_NBYTES]
        part[:] = source[start : start + PART_NBYTES]
        digest.update(part.data)
    return digest.digest()


def _rows(name: str, cache: torch.Tensor) -> npt.NDArray[np.uint8]:
    if cache.device.type != "cpu":
        raise ConnectorOptionError(
            f"the KV cache of layer {name!r} is on {cache.device}; this connector moves caches in "
            "host memory"
        )
    page = cache[0] if cache.shape[0] else cache.new_empty(cache.shape[1:])
    nbytes = page.numel() * page.element_size()
    if not nbytes or not _is_dense(page):
        raise ConnectorOptionError(
            f"the KV cache of layer {name!r}, of shape {tuple(cache.shape)} and strides "
            f"{cache.stride()}, cannot be copied by block: expected that the first dimension "
            "counts blocks, and that what belongs to a block lies together"
        )
    size = cache.element_size()
    rows = torch.empty(0, dtype=torch.uint8).set_(
        cache.untyped_storage(),
        cache.storage_offset() * size,
        (cache.shape[0], nbytes),
        (cache.stride(0) * size, 1),
    )
    return rows.numpy()


def _is_dense(page: torch.Tensor) -> bool:
    """Whether the elements lie side by side, in whatever order of dimensions."""
    order = sorted(range(page.dim()), key=page.stride, reverse=True)
    return page.permute(order).is_contiguous()


def _form(cache: torch.Tensor) -> str:
    """Return how a page is laid out: the bytes mean the same only where all of it is the same."""
    shape = ",".join(map(str, cache.shape[1:]))
    strides = ",".join(map(str, cache.stride()[1:]))
    return f"{dtype_name(cache.dtype)}[{shape}]/{strides}"
