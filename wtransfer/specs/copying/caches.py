"""What a host says of its KV cache, checked against what it said when the spec was made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wtransfer.blocks import BlockGeometry
from wtransfer.errors import OffloadingOptionError
from wtransfer.specs.copying.device_pages import DevicePages
from wtransfer.specs.copying.pages import HostPages, page_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.config import OffloadingConfig
    from wtransfer.specs.copying.pages import GroupPages, Page
    from wtransfer.specs.interface import CanonicalKVCaches


def pages_of(kv_caches: CanonicalKVCaches) -> list[GroupPages]:
    """Return the pages of each group.

    Args:
        kv_caches: Ours, or vLLM's.

    Raises:
        OffloadingOptionError: A tensor cannot be copied by block, or a group has no pages.
    """
    return [
        _pages_of(_rows(kv_caches, refs), n) for n, refs in enumerate(kv_caches.group_data_refs)
    ]


def _rows(kv_caches: CanonicalKVCaches, refs: Sequence[Any]) -> list[Page]:
    return [page_of(kv_caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes) for ref in refs]


def _pages_of(pages: Sequence[Page], group: int) -> GroupPages:
    if not pages:
        raise OffloadingOptionError(f"group {group} of the KV cache has no pages")
    # What numpy can get at needs no streams.
    return HostPages(pages) if pages[0].rows.device.type == "cpu" else DevicePages(pages)


def geometries_of(
    config: OffloadingConfig, kv_caches: CanonicalKVCaches, part_nbytes: int
) -> list[BlockGeometry]:
    """Return what each group's chunks are, as their headers say it.

    Args:
        config: What the host said before.
        kv_caches: What it says now.
        part_nbytes: Bytes of a slot, of one rank.

    Raises:
        OffloadingOptionError: The two do not belong together.
    """
    refs_of = kv_caches.group_data_refs
    if len(refs_of) != len(config.groups) or not refs_of:
        raise OffloadingOptionError(
            f"the KV cache has {len(refs_of)} groups of layers, the config {len(config.groups)}"
        )
    geometries = []
    for number, (group, refs) in enumerate(zip(config.groups, refs_of, strict=True)):
        blocks_per_chunk = config.cache.blocks_per_chunk
        pages = tuple(
            (getattr(ref, "form", "") or config.model.dtype, ref.page_size_bytes) for ref in refs
        )
        geometry = BlockGeometry(
            group.tokens_per_block * blocks_per_chunk,
            pages * blocks_per_chunk,
            config.parallel.world_size,
            config.model.name,
        )
        if geometry.nbytes > part_nbytes:
            raise OffloadingOptionError(
                f"group {number} of the KV cache has {geometry.nbytes:,} bytes in a chunk of "
                f"{blocks_per_chunk} blocks, a slot has {part_nbytes:,}: the config's "
                f"worker_kv_bytes_per_block={config.worker_kv_bytes_per_block} is too small"
            )
        geometries.append(geometry)
    return geometries
