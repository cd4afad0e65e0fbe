"""Copies chunks between a worker's cache and its part of the arena, and proves what they are.

Store, for each slot: the header is taken back, the pages are gathered, the bytes in the slot are
digested, the header is written. Whenever that ends early, there is no header, and the block is
refused.

Load: the header must be that of the block that was asked for, and the bytes must have the digest
that stands in it, before one of them reaches the cache; and the slot must have been left alone
until the copy was done. Else the block is refused, for a reason that is counted.

Everything here is done for many blocks at once, in steps that fit into a processor's cache: bytes
that were just copied, or are about to be, are digested there.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, NoReturn

import numpy as np

from wtransfer.blocks import CHECKSUM_NBYTES, Mismatch, checksum
from wtransfer.specs.shared_region import checksums, differ, payload_nbytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer.specs.copying.chunks import Chunks
    from wtransfer.specs.copying.pages import GroupPages, Numbers, Places
    from wtransfer.specs.shared_region import HeaderForm, Look, SharedRegion

Reason = Mismatch | Literal["reused", "malformed", "slow", "shutdown", "error"]
"""Why a job failed. *reused*: the slot was given to another block meanwhile. *malformed*: its two
sides do not belong together. *slow*: it was not done by its deadline. *shutdown*: the worker was
shut down. *error*: something raised; the log has it."""

STEP_NBYTES = 512 * 1024
"""Bytes that are copied and then digested, or the other way round: a processor's cache holds them.
At least one chunk."""
TASK_NBYTES = 128 * 1024 * 1024
"""Bytes that one thread copies before it looks for something else to do, and for which headers are
read or written at once. At least one chunk. What is done once for a task takes half a millisecond,
and lets the other threads wait for the interpreter lock meanwhile."""
SHARE_NBYTES = 8 * 1024 * 1024
"""Bytes that are worth a thread of their own: no job is divided into smaller tasks."""
TASK_CHUNKS = 1024
"""Chunks of one task at most: the smallest take longer for their headers than for their bytes."""

_UNVERIFIED = bytes(CHECKSUM_NBYTES)
# Damage: what is in the slot is of no use to anybody. Not so *key*, which is another block, whole,
# and *length*, which may be the end of a chunk of which all was wanted.
_DAMAGED = frozenset({"torn", "format", "geometry", "rank", "checksum"})


class RefusedError(Exception):
    """Blocks could not be stored or loaded; never leaves the worker.

    Args:
        reason: Why.
    """

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason)
        self.reason = reason
        """Why."""


class _Step(NamedTuple):
    """A portion of some chunks."""

    rows: slice
    """Which of the chunks."""
    places: tuple[Numbers, Places, Numbers, Numbers]
    """Their blocks, and where they rest, as `GroupPages` takes it."""


@dataclass(frozen=True)
class Copier:
    """Copies chunks of one group. Any thread may, for different slots at the same time."""

    part: SharedRegion
    """Where they rest."""
    pages: GroupPages
    """The cache."""
    form: HeaderForm
    """Their headers."""
    blocks_per_chunk: int = 1
    """Blocks in a slot."""
    verified: bool = True
    """Whether payloads are digested; headers are compared in any case."""

    @property
    def chunk_nbytes(self) -> int:
        """Bytes of a whole chunk."""
        return self.blocks_per_chunk * self.pages.block_nbytes

    def tasks(self, chunks: Chunks, num_threads: int) -> Iterator[Chunks]:
        """Yield chunks in portions for one thread.

        Args:
            chunks: All of a job.
            num_threads: How many threads there are.
        """
        least, most = (nbytes // self.chunk_nbytes for nbytes in (SHARE_NBYTES, TASK_NBYTES))
        even = max(1, least, -(-len(chunks) // num_threads))
        # As many tasks for one thread as for another, and all of one size.
        each = -(-even // max(1, min(most, TASK_CHUNKS)))
        return chunks.split(-(-even // each))

    def store(self, chunks: Chunks, mark: object) -> int:
        """Copy chunks into their slots.

        Args:
            chunks: Each may begin late, but must end with its last block.
            mark: What the model must have done before (`GroupPages.mark`).

        Returns:
            Bytes that were copied.

        Raises:
            RefusedError: Another store has opened one of the slots.
        """
        opened = self.part.open(chunks.slots)
        sizes = self.chunk_nbytes - chunks.first * self.pages.block_nbytes
        digests = []
        for step in self._steps(chunks):
            self.pages.gather(mark, *step.places)
            digests += self._digests(chunks, sizes, step.rows)
        headers = self.form.pack(chunks.keys, sizes, digests)
        if not self.part.close(chunks.slots, opened, headers):
            raise RefusedError("reused")
        return int(np.count_nonzero(chunks.blocks >= 0)) * self.pages.block_nbytes

    def load(self, chunks: Chunks, mark: object) -> int:
        """Copy chunks out of their slots, if they are what they should be.

        Args:
            chunks: Parts of chunks, or whole ones.
            mark: What the model must have done before (`GroupPages.mark`).

        Returns:
            Bytes that were copied.

        Raises:
            RefusedError: A chunk is another one, or damaged, and was not written; nor were those
                after it. Those before it are what they should be.
        """
        look = self.part.look(chunks.slots)
        sizes = self._sizes(chunks, look)
        for row in differ(look.headers, self.form.expect(chunks.keys, sizes)).tolist():
            reason = self.form.mismatch(look.headers[row], chunks.keys[row], int(sizes[row]))
            self._refuse(chunks, look, row, reason or "torn")
        stated = checksums(look.headers) if self.verified else [_UNVERIFIED] * len(chunks)
        for step in self._steps(chunks):
            found = self._digests(chunks, sizes, step.rows)
            if found != (wanted := stated[step.rows]):
                other = [got != right for got, right in zip(found, wanted, strict=True)]
                self._refuse_bytes(chunks, look, step.rows.start + other.index(True))
            self.pages.scatter(mark, *step.places)
        if not self.part.unchanged(chunks.slots, look):
            raise RefusedError("reused")
        return int(np.count_nonzero(chunks.blocks >= 0)) * self.pages.block_nbytes

    def _refuse_bytes(self, chunks: Chunks, look: Look, row: int) -> NoReturn:
        changed = not self.part.unchanged(chunks.slots, look)
        self._refuse(chunks, look, row, "reused" if changed else "checksum")

    def _refuse(self, chunks: Chunks, look: Look, row: int, reason: Reason) -> NoReturn:
        if reason in _DAMAGED:
            self.part.quarantine(int(chunks.slots[row]), look.headers[row])
        raise RefusedError(reason)

    def _sizes(self, chunks: Chunks, look: Look) -> Numbers:
        """Return the payload bytes that headers should state: those from the first block stored.

        A chunk that was stored from its third block on is good for whoever wants no earlier one.
        """
        whole, block = self.chunk_nbytes, self.pages.block_nbytes
        stated = payload_nbytes(look.headers)
        needed = whole - chunks.first * block
        good = (stated % block == 0) & (stated >= needed) & (stated <= whole)
        return np.where(good, stated, whole)

    def _steps(self, chunks: Chunks) -> Iterator[_Step]:
        """Yield portions that fit into a processor's cache."""
        blocks, rows, at = chunks.places()
        slots = chunks.slots[rows]
        size = max(1, STEP_NBYTES // self.chunk_nbytes)
        starts = range(0, len(chunks), size)
        ends = np.searchsorted(rows, [start + size for start in starts]).tolist()
        begin = 0
        for start, end in zip(starts, ends, strict=True):
            part = slice(begin, end)
            places = (blocks[part], self._arena_blocks, slots[part], at[part])
            yield _Step(slice(start, start + size), places)
            begin = end

    @functools.cached_property
    def _arena_blocks(self) -> Places:
        """This rank's parts of all slots as blocks."""
        parts = self.part.slots
        return np.lib.stride_tricks.as_strided(
            parts,
            (len(parts), self.blocks_per_chunk, self.pages.block_nbytes),
            (parts.strides[0], self.pages.block_nbytes, 1),
        )

    def _digests(self, chunks: Chunks, sizes: Numbers, rows: slice) -> list[bytes]:
        """Return the checksums of what is in the slots of some chunks, up to their ends."""
        slots = chunks.slots[rows].tolist()
        if not self.verified:
            return [_UNVERIFIED] * len(slots)
        parts, end = self.part.slots, self.chunk_nbytes
        both = zip(slots, sizes[rows].tolist(), strict=True)
        return [checksum(parts[slot, end - nbytes : end]) for slot, nbytes in both]
