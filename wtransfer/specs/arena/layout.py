"""How an arena is laid out: one region for each rank, in it the headers and then the slots.

The regions of the ranks do not touch: each consists of huge pages of its own, which its rank takes
from the kernel and writes to alone. Within a region::

    | headers: one for each slot, then up to a page | slot 0 | slot 1 | ...

A rank's part of slot ``i`` and of block ``i`` are the same thing, whichever region it lies in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.blocks import HEADER_NBYTES

if TYPE_CHECKING:
    from typing_extensions import Self

_LINE_NBYTES = 64
_PAGE_NBYTES = 4096
_REGION_NBYTES = 2 * 1024 * 1024
# From here on whole pages cost at most a sixteenth more.
_PAGED_NBYTES = 16 * _PAGE_NBYTES


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


def stride_of(nbytes: int) -> int:
    """Return the distance of slots that hold so many bytes: whole cache lines, or whole pages."""
    return _round_up(nbytes, _LINE_NBYTES if nbytes < _PAGED_NBYTES else _PAGE_NBYTES)


@dataclass(frozen=True)
class ArenaLayout:
    """Sizes of an arena; ranks that share one must agree on all of them."""

    num_slots: int
    """Number of slots."""
    part_nbytes: int
    """Bytes of one rank's part of a slot."""
    num_ranks: int = 1
    """Number of ranks."""

    @classmethod
    def within(cls, nbytes: int, part_nbytes: int, num_ranks: int = 1) -> Self:
        """Return the layout with the most slots that takes at most so many bytes, maybe none.

        Args:
            nbytes: For all ranks together, headers included.
            part_nbytes: Bytes of one rank's part of a slot.
            num_ranks: Number of ranks.
        """
        most = nbytes // num_ranks // (HEADER_NBYTES + stride_of(part_nbytes))
        layout = cls(most, part_nbytes, num_ranks)
        # Headers are rounded up to a page, which can cost the last slots, and only those.
        while layout.num_slots and layout.used_nbytes > nbytes:
            layout = cls(layout.num_slots - 1, part_nbytes, num_ranks)
        return layout

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return stride_of(self.part_nbytes)

    @property
    def slots_offset(self) -> int:
        """First byte of slot 0 in a region."""
        return _round_up(self.num_slots * HEADER_NBYTES, _PAGE_NBYTES)

    @property
    def used_nbytes(self) -> int:
        """Bytes of memory that are taken, of all ranks."""
        used = _round_up(self.slots_offset + self.num_slots * self.stride, _PAGE_NBYTES)
        return used * self.num_ranks

    @property
    def region_nbytes(self) -> int:
        """Distance of the regions; what lies between two of them is never touched."""
        return _round_up(self.slots_offset + self.num_slots * self.stride, _REGION_NBYTES)

    @property
    def nbytes(self) -> int:
        """Bytes of address space."""
        return self.region_nbytes * self.num_ranks

    def facts(self) -> dict[str, int | str]:
        """Return all of it as plain data, for a handshake: causes before what follows from them."""
        return {
            "num_ranks": self.num_ranks,
            "part_nbytes": self.part_nbytes,
            "num_slots": self.num_slots,
        }

    def __str__(self) -> str:
        ranks = f" of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        return f"{self.num_slots:,} slots{ranks}, {self.part_nbytes:,} bytes each"
