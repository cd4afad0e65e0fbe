"""A worker's KV cache as pages: one for each layer and block, as bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import xxhash

from wtransfer.blocks import BlockGeometry
from wtransfer.connectors.caches import page_form
from wtransfer.errors import ConnectorOptionError
from wtransfer.transport.pages import byte_rows, runs_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy.typing as npt
    import torch

    from wtransfer.connectors.settings import Instance
    from wtransfer.transport.pages import Run
    from wtransfer.transport.tensors import ByteArray

PART_NBYTES = 2 * 1024 * 1024
"""Bytes that are copied and then digested, at least: so many are worth letting go of the
interpreter lock. A run of layers is one part, however large."""


class CachePages:
    """The pages of all layers.

    Args:
        kv_caches: The caches, by layer; dim 0 counts blocks.
        instance: Whose they are.

    Raises:
        ConnectorOptionError: A cache is not laid out by block, or is on a device.
        ManifestError: A dtype that does not travel.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], instance: Instance) -> None:
        if not kv_caches:
            raise ConnectorOptionError("the model has no KV cache; a connector has nothing to move")
        self.index = {name: number for number, name in enumerate(kv_caches)}
        """Number of each layer."""
        self._rows = [_rows(name, cache) for name, cache in kv_caches.items()]
        self.num_blocks = min(len(rows) for rows in self._rows)
        """Blocks of the cache."""
        self._parts = list(_parts(runs_of(self._rows, self.num_blocks)))
        forms = [page_form(name, cache) for name, cache in kv_caches.items()]
        sizes = [rows.shape[1] for rows in self._rows]
        pages = tuple(zip(forms, sizes, strict=True))
        self.geometry = BlockGeometry(
            instance.block_size, pages, instance.num_ranks, f"{instance.model} {instance.dtype}"
        )
        """How its blocks are laid out."""

    def page(self, layer: int, block: int) -> ByteArray:
        """Return one page; writing to it writes to the cache."""
        page: ByteArray = self._rows[layer][block]
        return page

    def write(self, block: int, payload: ByteArray) -> bytes:
        """Write a block's bytes to the cache; return their digest.

        They are digested where they come from, after they were copied. Whoever finds that they are
        right, and have not changed since before this call, knows that what was written is right.
        """
        digest = xxhash.xxh3_128()
        for runs in self._parts:
            for run in runs:
                np.copyto(run.pages[block], payload[run.where].reshape(run.shape))
            digest.update(payload[runs[0].where.start : runs[-1].where.stop].data)
        return digest.digest()

    def close(self) -> None:
        """Let go of the cache."""
        self._rows, self._parts = [], []


def _parts(runs: Iterator[Run]) -> Iterator[list[Run]]:
    """Yield runs that follow each other, about as many as a processor's cache holds."""
    part: list[Run] = []
    for run in runs:
        part.append(run)
        if sum(each.nbytes for each in part) >= PART_NBYTES:
            yield part
            part = []
    if part:
        yield part


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
    return byte_rows(cache, nbytes).numpy()


def _is_dense(page: torch.Tensor) -> bool:
    """Whether the elements lie side by side, in whatever order of dimensions."""
    order = sorted(range(page.dim()), key=page.stride, reverse=True)
    return page.permute(order).is_contiguous()
