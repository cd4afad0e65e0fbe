"""A worker's KV cache as bytes: which layouts are accepted, and how blocks are read and written.

The cache of a layer is a tensor whose first dimension counts blocks; its part of one block is a
*page*. A block consists of the pages of all layers of a group, in order. Any page is accepted
whose innermost elements lie together: pages of any dtype and order of dimensions, also with gaps,
or with keys and values apart. A block that is copied has no gaps: its bytes follow in the order in
which they lie in the cache, which `page_form` states.

Pages at even distances are one numpy array, so that one call moves all of them: in most caches the
pages of a block are a layer apart, and all layers have one size. numpy releases the interpreter
lock while it copies, and uses one thread. A cache on a device is copied on streams of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from wtransfer.errors import CacheLayoutError, OffloadingOptionError
from wtransfer.kv.header import BlockGeometry
from wtransfer.transport.tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import numpy.typing as npt

    from wtransfer.config import OffloadingConfig
    from wtransfer.kv.canonical import CanonicalKVCaches

    Numbers = npt.NDArray[np.int64]
    """Numbers of blocks, slots or places in a slot."""
    Places = npt.NDArray[np.uint8]
    """Memory that holds blocks, shape ``(num_slots, blocks per slot, block_nbytes)``."""
    Rows = npt.NDArray[np.uint8]
    """Shape ``(num_blocks, bytes of a piece of a page)``; rows may have gaps between them."""

logger = logging.getLogger(__name__)

_BLOCKS_AND_PAGE = 2
# Below this size a call for each block costs more than a second copy, of many blocks at once.
_LARGE_NBYTES = 16 * 1024
_DEVICE_STEP_NBYTES = 8 * 1024 * 1024


# -- which layouts are accepted


def page_form(name: str, cache: torch.Tensor) -> str:
    """Return a text that is equal where bytes of a page have the same meaning.

    The text contains the order of the strides, not their sizes: pages are sent without gaps.

    Args:
        name: Name of the layer.
        cache: Cache of the layer; dim 0 counts blocks.

    Raises:
        ManifestError: The dtype is not in the table of dtypes.
    """
    shape = ",".join(map(str, cache.shape[1:]))
    order = ",".join(map(str, _memory_order(cache)))
    return f"{name!r}={dtype_name(cache.dtype)}[{shape}]/{order}"


def byte_rows(cache: torch.Tensor, nbytes: int, offset: int = 0) -> torch.Tensor:
    """Return bytes of every block of a layer's cache, uint8, one row for each block.

    Args:
        cache: Cache of the layer, on any device.
        nbytes: Bytes of a row, which lie together.
        offset: Elements of a page before the row.
    """
    size = cache.element_size()
    return torch.empty(0, dtype=torch.uint8, device=cache.device).set_(
        cache.untyped_storage(),
        (cache.storage_offset() + offset) * size,
        (cache.shape[0], nbytes),
        (cache.stride(0) * size, 1),
    )


def page_rows(
    cache: torch.Tensor, nbytes: int | None = None, what: str = "a KV cache"
) -> list[torch.Tensor]:
    """Return the pages of a layer as rows of bytes: one tensor for each dense piece of a page.

    Args:
        cache: Cache of the layer, any dtype; dim 0 counts blocks.
        nbytes: Bytes of a page that are used; None: all. A part of a page must lie together.
        what: Name of the cache, for the error.

    Returns:
        uint8 tensors of shape ``(num_blocks, bytes of the piece)``, in the order of memory.

    Raises:
        CacheLayoutError: The cache cannot be copied by block.
    """
    # Pieces are dense: the innermost dimensions, as far as there is no gap between their elements.
    outer = [dim for dim in _memory_order(cache) if cache.shape[dim] != 1]
    num_elements = 1
    while outer and cache.stride(outer[-1]) == num_elements:
        num_elements *= cache.shape[outer.pop()]
    page_nbytes = cache[:1].numel() * cache.element_size()
    piece_nbytes = num_elements * cache.element_size()
    if cache.shape[0] == 0:
        page_nbytes = cache.new_empty((1, *cache.shape[1:])).nbytes
    used = page_nbytes if nbytes is None else nbytes
    if (
        cache.dim() < _BLOCKS_AND_PAGE
        or not 0 < used <= page_nbytes
        or (outer and (num_elements == 1 or used != page_nbytes))
        or _overlaps(cache)
    ):
        raise CacheLayoutError(
            f"{what} of shape {tuple(cache.shape)}, strides {cache.stride()} and dtype "
            f"{cache.dtype} cannot be copied by block: expected that the first dimension counts "
            f"blocks, that each has {used:,} bytes, and that its innermost elements lie together"
        )
    places = itertools.product(*(range(cache.shape[dim]) for dim in outer))
    strides = [cache.stride(dim) for dim in outer]
    return [
        byte_rows(cache, min(used, piece_nbytes), sum(map(int.__mul__, place, strides)))
        for place in places
    ]


def _memory_order(cache: torch.Tensor) -> list[int]:
    """Return the dimensions of a page, those that lie furthest apart first."""
    # Stable: dimensions of equal stride keep their order.
    return sorted(range(1, cache.dim()), key=cache.stride, reverse=True)


def _overlaps(cache: torch.Tensor) -> bool:
    """Return whether elements may lie in the same place: a copy would be another cache."""
    span = 1
    for stride, size in sorted(zip(cache.stride(), cache.shape, strict=True)):
        if size > 1:
            if stride < span:
                return True
            span += (size - 1) * stride
    return False


# -- blocks of a group


class GroupPages(Protocol):
    """The cache of one group of layers."""

    block_nbytes: int
    """Bytes of a block's pages together."""
    num_blocks: int
    """Number of blocks."""
    device: torch.device
    """Device of the cache."""

    def mark(self) -> object:
        """Mark the work given to the model so far; called on the model's thread, must not wait.

        A copy that is given the mark comes after that work.
        """

    def gather(
        self, mark: object, blocks: Numbers, places: Places, slots: Numbers, at: Numbers
    ) -> None:
        """Copy blocks of the cache to their places; complete on return.

        Args:
            mark: Mark of when the job was submitted.
            blocks: Numbers of the blocks.
            places: Memory that holds the blocks.
            slots: Slot of each block.
            at: Place of each block in its slot.
        """

    def scatter(
        self, mark: object, blocks: Numbers, places: Places, slots: Numbers, at: Numbers
    ) -> None:
        """Copy blocks back into the cache; arguments as for `gather`."""


class CacheView:
    """The caches of all layers of a worker, as one group.

    Args:
        kv_caches: The caches, by layer.

    Raises:
        CacheLayoutError: A cache cannot be copied by block, or there is none.
        ManifestError: A dtype is not in the table of dtypes.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        layers = {
            name: page_rows(cache, what=f"the KV cache of layer {name!r}")
            for name, cache in kv_caches.items()
        }
        self.blocks = _group_pages(
            [rows for layer in layers.values() for rows in layer], "the KV cache"
        )
        """The blocks."""
        self.pages = tuple(
            (page_form(name, kv_caches[name]), sum(rows.shape[1] for rows in layer))
            for name, layer in layers.items()
        )
        """Form and bytes of each layer's page, as `BlockGeometry` takes them."""


def pages_of(kv_caches: CanonicalKVCaches) -> list[GroupPages]:
    """Return the pages of each group.

    Args:
        kv_caches: Caches as our class, or as vLLM's.

    Raises:
        CacheLayoutError: A tensor cannot be copied by block, or a group has no pages.
    """
    return [
        _group_pages(
            [
                rows
                for ref in refs
                for rows in page_rows(kv_caches.tensors[ref.tensor_idx].tensor, ref.page_size_bytes)
            ],
            f"group {number} of the KV cache",
        )
        for number, refs in enumerate(kv_caches.group_data_refs)
    ]


def geometries_of(
    config: OffloadingConfig, kv_caches: CanonicalKVCaches, part_nbytes: int
) -> list[BlockGeometry]:
    """Return the geometry of each group's chunks, as their headers state it.

    Args:
        config: Configuration that the spec was made with.
        kv_caches: The cache.
        part_nbytes: Bytes of a slot, of one rank.

    Raises:
        OffloadingOptionError: The cache is not that of the configuration.
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
            # vLLM's refs have no form.
            (getattr(ref, "form", "") or config.model.dtype, ref.page_size_bytes)
            for ref in refs
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


def _group_pages(layers: Sequence[torch.Tensor], what: str) -> GroupPages:
    if not layers:
        raise CacheLayoutError(f"{what} has no layers: there is nothing to copy")
    numbers = {len(rows) for rows in layers}
    if len(numbers) > 1:
        raise CacheLayoutError(
            f"{what} has layers with different numbers of blocks, {sorted(numbers)}: expected that "
            "each block has a page in every layer"
        )
    # Host memory needs no streams.
    return HostPages(layers) if layers[0].device.type == "cpu" else DevicePages(layers)


# -- host memory


class Run:
    """Pages at even distances, one after the other in a block.

    Args:
        layers: Rows of each layer, alike and evenly spaced.
        start: First byte of the pages in a block.
    """

    def __init__(self, layers: Sequence[Rows], start: int) -> None:
        # The view below does not keep the memory, and its layers need not be one allocation.
        self._owners = list(layers)
        first = layers[0]
        distance = _address(layers[1]) - _address(first) if len(layers) > 1 else 0
        self.pages = np.lib.stride_tricks.as_strided(
            first, (len(first), len(layers), first.shape[1]), (first.strides[0], distance, 1)
        )
        """Shape ``(num_blocks, number of pages, bytes of a page)``."""
        self.shape = self.pages.shape[1:]
        """Shape of a block's part."""
        self.nbytes = self.shape[0] * self.shape[1]
        """Bytes of a block's part."""
        self.where = slice(start, start + self.nbytes)
        """Range of that part in a block."""


def runs_of(layers: Sequence[Rows]) -> Iterator[Run]:
    """Yield the pages of a block, in order, as few runs."""
    start = 0
    while layers:
        first, addresses = layers[0], [_address(rows) for rows in layers]
        length = 1
        while (
            length < len(layers)
            and layers[length].shape[1] == first.shape[1]
            and layers[length].strides[0] == first.strides[0]
            and addresses[length] - addresses[length - 1] == addresses[1] - addresses[0]
        ):
            length += 1
        run = Run(layers[:length], start)
        yield run
        layers, start = layers[length:], run.where.stop


def _address(rows: Rows) -> int:
    address: int = rows.__array_interface__["data"][0]
    return address


class HostPages:
    """The cache of one group, in host memory.

    Args:
        layers: Rows of each page of a block, in order; at least one.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self.num_blocks = len(layers[0])
        self.block_nbytes = sum(rows.shape[1] for rows in layers)
        self.device = layers[0].device
        self._runs = list(runs_of([rows.numpy() for rows in layers]))

    def mark(self) -> None:
        """Return no mark: the model's writes to host memory are done when its call returns."""

    def gather(
        self,
        mark: object,  # noqa: ARG002  # the protocol's
        blocks: Numbers,
        places: Places,
        slots: Numbers,
        at: Numbers,
    ) -> None:
        """Copy blocks of the cache to their places."""
        rows = _rows(blocks, slots, at)
        for run in self._runs:
            if run.nbytes >= _LARGE_NBYTES:
                for block, slot, place in rows:
                    _copy(places[slot, place, run.where].reshape(run.shape), run.pages[block])
            else:
                # `pages` is a copy, small enough to stay in the processor's cache.
                pages = run.pages[blocks].reshape(len(blocks), -1)
                places[slots, at, run.where] = pages

    def scatter(
        self,
        mark: object,  # noqa: ARG002  # the protocol's
        blocks: Numbers,
        places: Places,
        slots: Numbers,
        at: Numbers,
    ) -> None:
        """Copy blocks back into the cache."""
        rows = _rows(blocks, slots, at)
        for run in self._runs:
            if run.nbytes >= _LARGE_NBYTES:
                for block, slot, place in rows:
                    _copy(run.pages[block], places[slot, place, run.where].reshape(run.shape))
            else:
                run.pages[blocks] = places[slots, at, run.where].reshape(-1, *run.shape)


def _copy(to: Rows, pages: Rows) -> None:
    """Copy the pages of a block.

    Between layers of several allocations lies memory of others. To or from there numpy would copy
    by way of a temporary array, which may lie there as well, and so on until the stack ends.
    """
    if not np.may_share_memory(to, pages):
        np.copyto(to, pages)
        return
    for each, page in zip(to, pages, strict=True):
        np.copyto(each, page)


def _rows(*columns: Numbers) -> list[tuple[int, ...]]:
    return list(zip(*(column.tolist() for column in columns), strict=True))


# -- device memory


class DevicePages:
    """The cache of one group, on a device.

    The class uses torch's device-independent interface only, and has not been run on a GPU yet. The
    tests run it on torch's ``cpu`` device, whose streams and events do nothing: they do not show
    that the order of the streams is right, nor how fast the copies are.

    That order: a copy waits for the work that the model had been given when its job was submitted
    (`mark`), and the copying thread waits for the copy before it reads the bytes or returns.

    Args:
        layers: Rows of each page of a block, in order; at least one, all on one device.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self.num_blocks = len(layers[0])
        self.block_nbytes = sum(rows.shape[1] for rows in layers)
        self.device = layers[0].device
        self._layers = list(layers)
        self._module: Any = torch.get_device_module(self.device)

    def mark(self) -> object:
        """Mark the work given to the model so far."""
        event = self._module.Event()
        event.record(self._module.current_stream())
        return event

    def gather(
        self, mark: object, blocks: Numbers, places: Places, slots: Numbers, at: Numbers
    ) -> None:
        """Copy blocks of the cache to their places."""
        for part in self._parts(len(blocks)):
            with self._after(mark):
                chosen = torch.from_numpy(blocks[part]).to(self.device)
                staged = torch.cat([rows.index_select(0, chosen) for rows in self._layers], dim=1)
                targets = _targets(places, slots[part], at[part])
                for row, target in zip(staged, targets, strict=True):
                    target.copy_(row, non_blocking=True)

    def scatter(
        self, mark: object, blocks: Numbers, places: Places, slots: Numbers, at: Numbers
    ) -> None:
        """Copy blocks back into the cache."""
        for part in self._parts(len(blocks)):
            with self._after(mark):
                chosen = torch.from_numpy(blocks[part]).to(self.device)
                shape = (len(chosen), self.block_nbytes)
                staged = torch.empty(shape, dtype=torch.uint8, device=self.device)
                sources = _targets(places, slots[part], at[part])
                for row, source in zip(staged, sources, strict=True):
                    row.copy_(source, non_blocking=True)
                columns = torch.split(staged, [rows.shape[1] for rows in self._layers], dim=1)
                for rows, column in zip(self._layers, columns, strict=True):
                    rows.index_copy_(0, chosen, column)

    def _parts(self, num_blocks: int) -> list[slice]:
        step = max(1, _DEVICE_STEP_NBYTES // self.block_nbytes)
        return [slice(start, start + step) for start in range(0, num_blocks, step)]

    @contextlib.contextmanager
    def _after(self, mark: object) -> Iterator[None]:
        """Enter a stream that begins after a mark, and wait for it at the end."""
        module = self._module
        stream = module.Stream() if self.device.index is None else module.Stream(self.device)
        stream.wait_event(mark)
        done = module.Event()
        try:
            with module.stream(stream):
                try:
                    yield
                finally:
                    done.record(stream)
        finally:
            done.synchronize()


def _targets(places: Places, slots: Numbers, at: Numbers) -> list[torch.Tensor]:
    rows = zip(slots.tolist(), at.tolist(), strict=True)
    return [torch.from_numpy(places[slot, place]) for slot, place in rows]


class Pinned:
    """Host memory that a device may read and write by itself: copies are faster.

    Args:
        device: Device; nothing is done for any but CUDA's.
        address: First byte, at a page's start.
        nbytes: Size.
    """

    def __init__(self, device: torch.device, address: int, nbytes: int) -> None:
        cuda: Any = torch.cuda
        self._runtime = cuda.cudart() if device.type == "cuda" else None
        self._address = address
        if self._runtime is not None:
            code = int(self._runtime.cudaHostRegister(address, nbytes, 0))
            if code:
                logger.warning(
                    "%d bytes of the arena cannot be pinned (cudaHostRegister: %d); copies work, "
                    "but slower",
                    nbytes,
                    code,
                )
                self._runtime = None

    def close(self) -> None:
        """Unpin the memory; a second call does nothing."""
        if self._runtime is not None:
            self._runtime.cudaHostUnregister(self._address)
            self._runtime = None
