"""Copy blocks between a worker's KV cache and slots, and digest them on the way.

What belongs to one block is scattered over the cache: a page for each layer. Layers are copied in
*parts*: as many consecutive layers as make a call worth its costs, since numpy and xxhash release
the interpreter lock only within a call. A part has just been copied when it is digested, so the
digest finds it in the processor's cache.
"""

from __future__ import annotations

import logging
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import xxhash

from wtransfer.blocks import BlockGeometry
from wtransfer.connectors.caches import page_form
from wtransfer.connectors.p2p.buffer import HEAD, SlotLayout
from wtransfer.errors import ConnectorOptionError
from wtransfer.transport.pages import byte_rows, runs_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    import numpy.typing as npt
    import torch

    from wtransfer.connectors.p2p.buffer import StagingBuffer
    from wtransfer.connectors.p2p.protocol import Save
    from wtransfer.connectors.settings import Instance
    from wtransfer.transport.pages import Run
    from wtransfer.transport.tensors import ByteArray

logger = logging.getLogger(__name__)

LOAD_PART_NBYTES = 2 * 1024 * 1024
"""Bytes of a part of a loaded block, at least."""
SAVE_PART_NBYTES = 512 * 1024
"""The same of a saved block. Smaller, as a part is copied when its last layer is computed: what is
left of it then is waited for at the end of the step."""
TASK_NBYTES = 4 * 1024 * 1024
"""Bytes of a load that are worth another thread. At least one block."""


class _Part(NamedTuple):
    layers: range
    where: slice
    """Where the pages are in a block's payload."""
    runs: list[Run]


class CacheView:
    """A worker's KV caches as blocks of bytes.

    Args:
        kv_caches: The caches, by layer; dim 0 counts blocks.
        instance: The instance they belong to.

    Raises:
        ConnectorOptionError: A cache is not laid out by block, or is on a device.
        ManifestError: A dtype that does not travel.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], instance: Instance) -> None:
        if not kv_caches:
            raise ConnectorOptionError("the model has no KV cache; a connector has nothing to move")
        rows = [_block_rows(name, cache) for name, cache in kv_caches.items()]
        self.layers = {name: number for number, name in enumerate(kv_caches)}
        """Number of each layer."""
        self._load_parts = _parts(rows, LOAD_PART_NBYTES)
        self.save_parts = _parts(rows, SAVE_PART_NBYTES)
        forms = [page_form(name, cache) for name, cache in kv_caches.items()]
        pages = tuple(zip(forms, [each.shape[1] for each in rows], strict=True))
        self.layout = SlotLayout(
            BlockGeometry(
                instance.block_size, pages, instance.num_ranks, f"{instance.model} {instance.dtype}"
            )
        )
        """How a block of it lies in a slot."""

    def read(self, block: int, part: _Part, payload: ByteArray) -> ByteArray:
        """Copy a part of a block from the cache to a payload; return where it is there."""
        there = payload[part.where]
        for run in part.runs:
            np.copyto(there[run.where].reshape(run.shape), run.pages[block])
        return there

    def write(self, block: int, payload: ByteArray) -> bytes:
        """Copy a payload to a block of the cache; return the payload's digest.

        The payload may be another process's memory. If its digest is right, and head and version of
        its slot are the same before and after this call, the cache has the right bytes.
        """
        digest = xxhash.xxh3_128()
        for part in self._load_parts:
            here = payload[part.where]
            for run in part.runs:
                np.copyto(run.pages[block], here[run.where].reshape(run.shape))
            digest.update(here.data)
        return digest.digest()

    def close(self) -> None:
        """Let go of the caches."""
        self._load_parts, self.save_parts = [], []


def _parts(rows: list[npt.NDArray[np.uint8]], least: int) -> list[_Part]:
    parts = []
    start = first = nbytes = 0
    for end, row in enumerate(rows, 1):
        nbytes += row.shape[1]
        if nbytes >= least or end == len(rows):
            runs = list(runs_of(rows[first:end], min(map(len, rows))))
            parts.append(_Part(range(first, end), slice(start, start + nbytes), runs))
            first, start, nbytes = end, start + nbytes, 0
    return parts


def _block_rows(name: str, cache: torch.Tensor) -> npt.NDArray[np.uint8]:
    """Return a layer's cache as bytes, one row for each block."""
    if cache.device.type != "cpu":
        raise ConnectorOptionError(
            f"the KV cache of layer {name!r} is on {cache.device}; this connector moves caches in "
            "host memory"
        )
    page = cache[0] if cache.shape[0] else cache.new_empty(cache.shape[1:])
    nbytes = page.numel() * page.element_size()
    # Dense in any order of its dimensions.
    order = sorted(range(page.dim()), key=page.stride, reverse=True)
    if not nbytes or not page.permute(order).is_contiguous():
        raise ConnectorOptionError(
            f"the KV cache of layer {name!r}, of shape {tuple(cache.shape)} and strides "
            f"{cache.stride()}, cannot be copied by block: expected that the first dimension "
            "counts blocks, and that what belongs to a block lies together"
        )
    return byte_rows(cache, nbytes).numpy()


# -- from slots to the cache


class Loaded(NamedTuple):
    """Outcome of copying a sequence of blocks into the cache."""

    num_blocks: int
    """Blocks, from the first on, that are in the cache and are the wanted ones."""
    reason: str | None
    """Why the next one is not; None: all are, or the load was aborted."""


class BlockLoader:
    """Copies blocks from slots into the cache. Any thread may call it, for different blocks.

    Args:
        cache: The cache.
        rank: Rank whose part of each block it holds.
        num_threads: Threads of `load_parallel`.
    """

    def __init__(self, cache: CacheView, rank: int, num_threads: int) -> None:
        self.layout = cache.layout
        self.rank = rank
        self._cache = cache
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, "wtransfer-load-copy")

    def load(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        slots: Iterable[ByteArray],
        is_wanted: Callable[[], bool],
    ) -> Loaded:
        """Copy blocks in order, up to the first that fails. `slots` is always exhausted.

        Args:
            keys: Of the blocks.
            block_ids: Where they belong.
            slots: The slot of each; valid until the next one is taken.
            is_wanted: Whether to go on; called before each block.
        """
        number, reason, ended = 0, None, False
        # Slots first, so that `zip` takes the last of them, too.
        for slot, key, block in zip(slots, keys, block_ids, strict=False):
            ended = ended or not is_wanted()
            if not ended:
                reason = self._load(key, block, slot)
                ended = reason is not None
                number += not ended
        return Loaded(number, reason)

    def load_parallel(
        self,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        slots: Sequence[ByteArray],
        is_wanted: Callable[[], bool],
    ) -> Loaded:
        """As `load`, on several threads if there is enough to copy; all slots stay valid."""
        least = -(-TASK_NBYTES // self.layout.geometry.nbytes)
        size = max(least, -(-len(slots) // self._num_threads))
        if size >= len(slots):
            return self.load(keys, block_ids, slots, is_wanted)
        parts = [slice(start, start + size) for start in range(0, len(slots), size)]
        tasks = [
            self._pool.submit(self.load, keys[part], block_ids[part], slots[part], is_wanted)
            for part in parts
        ]
        # All of them, also if one raises: nothing may write to the cache after this returns.
        wait(tasks)
        number = 0
        for task in tasks:
            loaded = task.result()
            number += loaded.num_blocks
            if loaded.num_blocks < size:
                return Loaded(number, loaded.reason)
        return Loaded(number, None)

    def close(self) -> None:
        """End the threads. A second call does nothing."""
        self._pool.shutdown()

    def _load(self, key: bytes, block: int, slot: ByteArray) -> str | None:
        """Copy a block into the cache; return why it must not be used, or None."""
        # A copy, as P may evict the slot at any moment. Then its head is another one afterwards,
        # and the copied pages may be of two blocks.
        head = slot[HEAD].tobytes()
        header = self.layout.check_head(head, key, self.rank)
        if isinstance(header, str):
            return header
        digest = self._cache.write(block, slot[self.layout.payload])
        if slot[HEAD].tobytes() != head:
            return "reused"
        return None if digest == header.checksum else "checksum"


# -- from the cache to slots


class _SavedBlock:
    def __init__(self, key: bytes, block: int, payload: ByteArray) -> None:
        self.key, self.block, self.payload = key, block, payload
        self.digest = xxhash.xxh3_128()


class _Step:
    def __init__(self, saves: Sequence[Save]) -> None:
        self.saves = saves
        self.blocks: list[_SavedBlock] = []
        self.layers: set[int] = set()
        self.num_parts = 0
        self.copies: list[Future[None]] = []


class BlockSaver:
    """Copies what a step computes to the staging buffer. The model's thread calls it.

    Args:
        cache: The cache.
        buffer: The staging buffer.
        admits: Whether this process still has the weights that a save was planned for.
        num_threads: Threads that copy.
    """

    def __init__(
        self,
        cache: CacheView,
        buffer: StagingBuffer,
        admits: Callable[[Save], bool],
        num_threads: int,
    ) -> None:
        self._cache = cache
        self._buffer = buffer
        self._admits = admits
        self._step: _Step | None = None
        # Each block belongs to one thread, which copies and digests its parts in order.
        self._threads = [ThreadPoolExecutor(1, "wtransfer-save") for _ in range(num_threads)]

    def save_layer(self, name: str, saves: Sequence[Save]) -> None:
        """Begin to copy a layer that a step has computed.

        Args:
            name: The layer.
            saves: All saves of the step, the same for every layer.
        """
        if self._step is None:
            self._step = self._begin(saves)
        step, parts = self._step, self._cache.save_parts
        if name in self._cache.layers and step.blocks:
            step.layers.add(self._cache.layers[name])
        while step.num_parts < len(parts) and step.layers.issuperset(parts[step.num_parts].layers):
            for number, thread in enumerate(self._threads[: len(step.blocks)]):
                blocks = step.blocks[number :: len(self._threads)]
                step.copies.append(thread.submit(self._copy, parts[step.num_parts], blocks))
            step.num_parts += 1

    def finish(self) -> None:
        """Wait for the copies of this step, and commit its blocks."""
        step, self._step = self._step, None
        if step is None:
            return
        is_whole = self._wait(step) and all(map(self._admits, step.saves))
        for block in step.blocks:
            if is_whole:
                self._buffer.commit(block.key, block.digest.digest())
            else:
                self._buffer.abort(block.key)
        for save in step.saves:
            self._buffer.lease(save.request_id, save.keys)

    def abort(self) -> None:
        """End a step that did not count; a second call does nothing."""
        step, self._step = self._step, None
        if step is not None:
            self._wait(step)
            for block in step.blocks:
                self._buffer.abort(block.key)

    def close(self) -> None:
        """End the threads. A second call does nothing."""
        for thread in self._threads:
            thread.shutdown()

    def _begin(self, saves: Sequence[Save]) -> _Step:
        step = _Step([save for save in saves if self._admits(save)])
        for save in step.saves:
            # First, so that blocks that are staged already are not evicted for the others.
            self._buffer.lease(save.request_id, save.keys)
        for save in step.saves:
            for key, block in zip(save.keys, save.block_ids, strict=True):
                slot = self._buffer.reserve(key)
                if slot is not None:
                    payload = self._buffer.slot(slot)[self._cache.layout.payload]
                    step.blocks.append(_SavedBlock(key, block, payload))
        return step

    def _wait(self, step: _Step) -> bool:
        """Wait until nothing is copied any more; return whether all layers were."""
        is_whole = step.num_parts == len(self._cache.save_parts)
        for copy in step.copies:
            error = copy.exception()
            if error is not None:
                logger.error("a layer could not be copied to the staging buffer", exc_info=error)
                is_whole = False
        return is_whole

    def _copy(self, part: _Part, blocks: Sequence[_SavedBlock]) -> None:
        for block in blocks:
            block.digest.update(self._cache.read(block.block, part, block.payload).data)
