"""How a shelf is laid out, and what stands in each of its slots.

A slot is one piece, so that it can be sent as it is::

    | header | checksum of each page | up to a line | pages, one for each layer |

The header is a block's (`wtransfer.blocks.BlockHeader`) and its checksum covers the checksums of
the pages; so the pages can be written, and compared, one by one, and what differs anywhere is
found. It is written last and taken back first: without one there is nothing in the slot.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from wtransfer.blocks import CHECKSUM_NBYTES, HEADER_NBYTES, BlockHeader, checksum

if TYPE_CHECKING:
    from wtransfer.blocks import BlockGeometry, Mismatch

_LINE_NBYTES = 64
_PAGE_NBYTES = 4096


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


@dataclass(frozen=True)
class SlotLayout:
    """Where things are in a slot; equal where the geometry is."""

    geometry: BlockGeometry
    """Of the blocks."""

    @property
    def num_pages(self) -> int:
        """Pages of a block."""
        return len(self.geometry.pages)

    @cached_property
    def digest(self) -> bytes:
        """Of the geometry."""
        return self.geometry.digest

    @cached_property
    def table(self) -> slice:
        """Where the checksums of the pages are."""
        return slice(HEADER_NBYTES, HEADER_NBYTES + CHECKSUM_NBYTES * self.num_pages)

    @cached_property
    def pages(self) -> list[slice]:
        """Where each page is."""
        sizes = [nbytes for _, nbytes in self.geometry.pages]
        ends = list(accumulate(sizes, initial=_round_up(self.table.stop, _LINE_NBYTES)))
        return [slice(start, end) for start, end in pairwise(ends)]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of a slot, without what lies behind the last page."""
        start = _round_up(self.table.stop, _LINE_NBYTES)
        return start + self.geometry.nbytes

    @cached_property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return _round_up(self.nbytes, _PAGE_NBYTES)

    def header(self, name: bytes, table: bytes, rank: int) -> bytes:
        """Return the header of a block.

        Args:
            name: Its name.
            table: The checksums of its pages.
            rank: Whose part of it this is.
        """
        nbytes, total = self.geometry.nbytes, checksum(table)
        return BlockHeader(name, self.digest, nbytes, total, rank).pack()

    def look(self, head: bytes, name: bytes, rank: int) -> list[bytes] | Mismatch:
        """Return the checksums that the pages of a block must have, or why this is not the block.

        Args:
            head: A copy of the first ``table.stop`` bytes of a slot.
            name: What should be there.
            rank: Whose part of it.
        """
        header = BlockHeader.unpack(head[:HEADER_NBYTES])
        if not isinstance(header, BlockHeader):
            return header
        mismatch = header.mismatch(name, self.digest, self.geometry.nbytes, rank)
        if mismatch is not None:
            return mismatch
        table = head[HEADER_NBYTES:]
        if checksum(table) != header.checksum:
            return "checksum"
        return [table[at : at + CHECKSUM_NBYTES] for at in range(0, len(table), CHECKSUM_NBYTES)]
