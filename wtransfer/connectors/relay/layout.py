"""How a shelf is laid out, and what stands in each of its slots.

A slot is one piece, so that it can be sent as it is::

    | header | generation | up to a line | pages, one for each layer |

The header is a block's (`wtransfer.blocks.BlockHeader`). It is written last and taken back first:
without one there is nothing in the slot. The generation differs each time a slot is filled, so that
who finds both as before knows that nothing has changed in between.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

from wtransfer.blocks import HEADER_NBYTES, BlockHeader

if TYPE_CHECKING:
    from wtransfer.blocks import BlockGeometry, Mismatch

GENERATION = slice(HEADER_NBYTES, HEADER_NBYTES + 8)
"""Where the generation is: a number, little-endian."""
HEAD = slice(0, GENERATION.stop)
"""What is before the pages."""
_PAYLOAD_START = 192  # a line of the processor's cache begins there
_PAGE_NBYTES = 4096


@dataclass(frozen=True)
class SlotLayout:
    """Where things are in a slot; equal where the geometry is."""

    geometry: BlockGeometry
    """Of the blocks."""

    @cached_property
    def digest(self) -> bytes:
        """Of the geometry."""
        return self.geometry.digest

    @cached_property
    def payload(self) -> slice:
        """Where the pages are, all together."""
        return slice(_PAYLOAD_START, self.nbytes)

    @cached_property
    def pages(self) -> list[slice]:
        """Where each page is."""
        sizes = [nbytes for _, nbytes in self.geometry.pages]
        ends = list(accumulate(sizes, initial=_PAYLOAD_START))
        return [slice(start, end) for start, end in pairwise(ends)]

    @property
    def nbytes(self) -> int:
        """Bytes of a slot, without what lies behind the last page."""
        return _PAYLOAD_START + self.geometry.nbytes

    @cached_property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return -(-self.nbytes // _PAGE_NBYTES) * _PAGE_NBYTES

    def header(self, name: bytes, checksum: bytes, rank: int) -> bytes:
        """Return the header of a block.

        Args:
            name: Its name.
            checksum: Of all its pages.
            rank: Whose part of it this is.
        """
        return BlockHeader(name, self.digest, self.geometry.nbytes, checksum, rank).pack()

    def look(self, head: bytes, name: bytes, rank: int) -> BlockHeader | Mismatch:
        """Return what stands in a slot, or why it is not the block that is wanted.

        Args:
            head: A copy of what is before the pages.
            name: What should be there.
            rank: Whose part of it.
        """
        header = BlockHeader.unpack(head[:HEADER_NBYTES])
        if not isinstance(header, BlockHeader):
            return header
        mismatch = header.mismatch(name, self.digest, self.geometry.nbytes, rank)
        return header if mismatch is None else mismatch
