"""Copy chunks of blocks between a cache and slots, and verify them.

Into slots: the pages are gathered, the bytes in the slot are digested, and a header is made of
that. Out of slots: the header must be that of the block that was asked for, and the bytes must have
the digest that it states, before one of them reaches the cache; and the slot must not have been
opened until the copy was done. Otherwise the chunk is refused, for a reason that is counted, and
quarantined if it is damaged.

Many blocks are processed at once, in steps that fit into a processor's cache, so that bytes are
digested where they were just copied, or are about to be.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from wtransfer.kv.header import CHECKSUM_NBYTES, Mismatch, checksum
from wtransfer.kv.slots import checksums, differ, payload_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from wtransfer.kv.cache_view import GroupPages, Places
    from wtransfer.kv.slots import HeaderForm, Headers, Look, Numbers, Slots

Reason = Mismatch | Literal["reused", "malformed", "slow", "shutdown", "error"]
"""Why a job failed. *reused*: the slot was given to another block meanwhile. *malformed*: its two
sides do not belong together. *slow*: the deadline passed. *shutdown*: the worker was shut down.
*error*: an exception, which the log has."""

STEP_NBYTES = 512 * 1024
"""Bytes that are copied and then digested, or the other way round: a processor's cache holds them.
At least one chunk."""
TASK_NBYTES = 128 * 1024 * 1024
"""Bytes that one thread copies before it takes the next task, and for which headers are read or
written at once. At least one chunk. The fixed cost of a task is half a millisecond, under the
interpreter lock."""
SHARE_NBYTES = 8 * 1024 * 1024
"""Bytes that are worth a thread of their own: no job is divided into smaller tasks."""
TASK_CHUNKS = 1024
"""Chunks of one task at most: the smallest take longer for their headers than for their bytes."""

_UNVERIFIED = bytes(CHECKSUM_NBYTES)
# Damage: the slot's bytes are of no use to any request. Not so *key*, which is another block,
# whole, and *length*, which may be the end of a chunk that was wanted as a whole.
_DAMAGED = frozenset({"torn", "format", "geometry", "rank", "checksum"})


class RefusedError(Exception):
    """Chunks could not be stored or loaded; never leaves the worker.

    Args:
        reason: Reason of the refusal.
        row: The first chunk that is refused. Those before it are in the cache.
    """

    def __init__(self, reason: Reason, row: int = 0) -> None:
        super().__init__(reason)
        self.reason = reason
        self.row = row


@dataclass(frozen=True)
class Chunks:
    """Chunks of one group: each fills a slot with one block of the cache, or with several."""

    group: int
    """Number of the group."""
    slots: Numbers
    """Slots of the chunks, shape ``(n,)``."""
    keys: Sequence[bytes]
    """Keys of the chunks."""
    blocks: Numbers
    """Blocks of the cache, shape ``(n, blocks_per_chunk)``; -1: not a part of this job."""

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, part: slice) -> Chunks:
        return Chunks(self.group, self.slots[part], self.keys[part], self.blocks[part])

    def where(self, wanted: npt.NDArray[np.bool_]) -> Chunks:
        """Return the wanted chunks; `wanted` has shape ``(n,)``."""
        keys = list(itertools.compress(self.keys, wanted))
        return Chunks(self.group, self.slots[wanted], keys, self.blocks[wanted])

    def at(self, slots: Numbers) -> Chunks:
        """Return the chunks in other slots, shape ``(n,)``."""
        return Chunks(self.group, slots, self.keys, self.blocks)

    def split(self, size: int) -> Iterator[Chunks]:
        """Yield the chunks in portions of at most `size`."""
        return (self[start : start + size] for start in range(0, len(self), size))

    @property
    def num_blocks(self) -> int:
        """Blocks that are a part of the job."""
        return int(np.count_nonzero(self.blocks >= 0))

    @property
    def first(self) -> Numbers:
        """The first place of each chunk that is a part of the job, shape ``(n,)``."""
        place: Numbers = (self.blocks >= 0).argmax(axis=1)
        return place


@dataclass(frozen=True)
class Copier:
    """Copies chunks of one group. Threads may copy at the same time, for different slots."""

    part: Slots
    """Memory that holds the chunks."""
    pages: GroupPages
    """Cache of the group."""
    form: HeaderForm
    """Form of the chunks' headers."""
    blocks_per_chunk: int = 1
    """Blocks in a slot."""
    verified: bool = True
    """True if payloads are digested; headers are compared in any case."""

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a whole chunk."""
        return self.blocks_per_chunk * self.pages.block_nbytes

    def tasks(self, chunks: Chunks, num_threads: int) -> Iterator[Chunks]:
        """Yield chunks in portions for one thread.

        Args:
            chunks: The chunks of a job.
            num_threads: Number of threads.
        """
        least, most = (nbytes // self.chunk_nbytes for nbytes in (SHARE_NBYTES, TASK_NBYTES))
        even = max(1, least, -(-len(chunks) // num_threads))
        # As many tasks for one thread as for another, and all of one size.
        each = -(-even // max(1, min(most, TASK_CHUNKS)))
        return chunks.split(-(-even // each))

    def gather(self, chunks: Chunks, mark: object) -> Headers:
        """Copy chunks into their slots; return the headers that close these.

        Args:
            chunks: Chunks; any may begin late, but must end with its last block.
            mark: Model work that the copy waits for (`GroupPages.mark`).
        """
        sizes = self.chunk_nbytes - chunks.first * self.pages.block_nbytes
        digests = []
        for rows, places in self._steps(chunks):
            self.pages.gather(mark, *places)
            digests += self._digests(chunks, sizes, rows)
        return self.form.pack(chunks.keys, sizes, digests)

    def load(self, chunks: Chunks, mark: object) -> None:
        """Copy chunks out of their slots, if these hold the expected blocks.

        Args:
            chunks: Parts of chunks, or whole ones.
            mark: Model work that the copy waits for (`GroupPages.mark`).

        Raises:
            RefusedError: A chunk is another one, or damaged, and was not written, or its slot was
                opened meanwhile.
        """
        look = self.part.look(chunks.slots)
        sizes = self._sizes(chunks, look)
        end: int = len(chunks)
        reason: Reason | None = None
        for row in differ(look.headers, self.form.expect(chunks.keys, sizes))[:1].tolist():
            found = self.form.mismatch(look.headers[row], chunks.keys[row], int(sizes[row]))
            end, reason = row, found or "torn"
        stated = checksums(look.headers) if self.verified else [_UNVERIFIED] * len(chunks)
        for rows, places in self._steps(chunks[:end]):
            digests = self._digests(chunks, sizes, rows)
            if digests != stated[rows]:
                differs = [one != other for one, other in zip(digests, stated[rows], strict=True)]
                end, reason = rows.start + differs.index(True), "checksum"
                for _, good in self._steps(chunks[rows.start : end]):
                    self.pages.scatter(mark, *good)
                break
            self.pages.scatter(mark, *places)
        now = self.part.look(chunks.slots)
        changed = (now.headers != look.headers).any(axis=1) | (now.openings != look.openings)
        for row in np.flatnonzero(changed[: end + (reason == "checksum")])[:1].tolist():
            end, reason = row, "reused"
        if reason is not None:
            if reason in _DAMAGED:
                self.part.quarantine(int(chunks.slots[end]), look.headers[end])
            raise RefusedError(reason, end)

    def _sizes(self, chunks: Chunks, look: Look) -> Numbers:
        """Return the payload bytes that headers should state: those from the first block stored.

        A chunk that was stored from its third block on serves a job that wants no earlier one.
        """
        whole, block = self.chunk_nbytes, self.pages.block_nbytes
        stated = payload_nbytes(look.headers)
        needed = whole - chunks.first * block
        good = (stated % block == 0) & (stated >= needed) & (stated <= whole)
        return np.where(good, stated, whole)

    def _steps(
        self, chunks: Chunks
    ) -> Iterator[tuple[slice, tuple[Numbers, Places, Numbers, Numbers]]]:
        """Yield portions that fit into a processor's cache.

        A portion comes with its blocks and their places, as `GroupPages` takes them.
        """
        rows, at = np.nonzero(chunks.blocks >= 0)
        blocks, slots = chunks.blocks[rows, at], chunks.slots[rows]
        size = max(1, STEP_NBYTES // self.chunk_nbytes)
        starts = range(0, len(chunks), size)
        ends = np.searchsorted(rows, [start + size for start in starts]).tolist()
        begin = 0
        for start, end in zip(starts, ends, strict=True):
            part = slice(begin, end)
            places = blocks[part], self._slots_of_blocks, slots[part], at[part]
            yield slice(start, min(start + size, len(chunks))), places
            begin = end

    @functools.cached_property
    def _slots_of_blocks(self) -> Places:
        """Payloads of the slots as blocks."""
        slots = self.part.slots
        return np.lib.stride_tricks.as_strided(
            slots,
            (len(slots), self.blocks_per_chunk, self.pages.block_nbytes),
            (slots.strides[0], self.pages.block_nbytes, 1),
        )

    def _digests(self, chunks: Chunks, sizes: Numbers, rows: slice) -> list[bytes]:
        """Return the checksums of the bytes in the slots of some chunks, up to their ends."""
        slots = chunks.slots[rows].tolist()
        if not self.verified:
            return [_UNVERIFIED] * len(slots)
        parts, end = self.part.slots, self.chunk_nbytes
        both = zip(slots, sizes[rows].tolist(), strict=True)
        return [checksum(parts[slot, end - nbytes : end]) for slot, nbytes in both]
