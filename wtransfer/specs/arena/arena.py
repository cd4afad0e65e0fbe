"""The arena: host memory in slots, in which blocks of KV cache rest.

It is one anonymous shared segment (`wtransfer.transport.memory`) that all ranks of a host map. Each
rank owns a region of it, with a header and a part of every slot (`wtransfer.specs.arena.layout`),
takes that region from the kernel before it uses it, and is the only one that writes there. The
memory has no name in any file system, belongs to this user alone, and is gone with its last
process, however that ends. A rank that ends takes nothing from the others, and finds its blocks
again when it is started anew.

A header is written last and taken back first, so that a kill at any moment leaves a block that is
either whole or refused.
"""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wtransfer.blocks import HEADER_NBYTES
from wtransfer.errors import StagingMemoryError
from wtransfer.transport.memory import Segment, os_errors, require_memory

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from wtransfer.specs.arena.headers import Headers
    from wtransfer.specs.arena.layout import ArenaLayout

    Slots = npt.NDArray[np.int64]
    """Numbers of slots."""
    Parts = npt.NDArray[np.uint8]
    """One rank's parts of all slots, shape ``(num_slots, part_nbytes)``."""


class Look(NamedTuple):
    """What was seen of slots at one moment."""

    headers: Headers
    """Copies of their headers."""
    openings: npt.NDArray[np.int64]
    """How often each has been opened."""


class ArenaPart:
    """One rank's region of an arena, and the rules by which it is written.

    Any thread may use it. Numbers of slots must be those of the layout.

    Args:
        segment: Memory of the whole arena.
        layout: How it is laid out.
        rank: Whose region this is.
    """

    def __init__(self, segment: Segment, layout: ArenaLayout, rank: int) -> None:
        self.layout = layout
        """How the arena is laid out."""
        self.rank = rank
        """Whose region this is."""
        self.segment = segment
        """Memory of the whole arena."""
        start = rank * layout.region_nbytes
        region = segment.buffer[start : start + layout.region_nbytes]
        slots = region[layout.slots_offset :][: layout.num_slots * layout.stride]
        self.slots: Parts = slots.reshape(layout.num_slots, layout.stride)[:, : layout.part_nbytes]
        """This rank's parts of all slots, shape ``(num_slots, part_nbytes)``."""
        self._headers: Headers = region[: layout.num_slots * HEADER_NBYTES].reshape(
            layout.num_slots, HEADER_NBYTES
        )
        # How often each slot was opened for writing, by this process: who finds another number
        # than before has not been alone. It guards what headers cannot: two stores into one slot.
        self._openings = np.zeros(layout.num_slots, np.int64)
        self._lock = threading.Lock()

    @property
    def address(self) -> int:
        """Address of this rank's region; it has `ArenaLayout.region_nbytes` bytes."""
        return int(self._headers.ctypes.data)

    def open(self, slots: Slots) -> npt.NDArray[np.int64]:
        """Take the headers of slots back: what is in them is refused until `close`.

        Args:
            slots: None of them twice.

        Returns:
            What to show to `close`.
        """
        with self._lock:
            self._openings[slots] += 1
            self._headers[slots] = 0
            return self._openings[slots]

    def close(self, slots: Slots, opened: npt.NDArray[np.int64], headers: Headers) -> bool:
        """Say what is in slots now; that is the last step of a store.

        Returns:
            Whether all is well. If somebody else has opened one of the slots since, none of them
            gets a header: nobody knows whose bytes are in it.
        """
        with self._lock:
            if not np.array_equal(self._openings[slots], opened):
                return False
            self._headers[slots] = headers
            return True

    def look(self, slots: Slots) -> Look:
        """Return what the headers of slots say now."""
        with self._lock:
            return Look(self._headers[slots], self._openings[slots])

    def unchanged(self, slots: Slots, look: Look) -> bool:
        """Whether slots have been left alone since a look, whatever was written there instead."""
        now = self.look(slots)
        return np.array_equal(now.headers, look.headers) and np.array_equal(
            now.openings, look.openings
        )

    def quarantine(self, slot: int, seen: Headers) -> None:
        """Take back the header of a damaged block, unless it is another one by now.

        Args:
            slot: Its slot.
            seen: The header that it was judged by, shape ``(HEADER_NBYTES,)``.
        """
        with self._lock:
            if np.array_equal(self._headers[slot], seen):
                self._headers[slot] = 0

    def let_go(self) -> None:
        """Give up the memory; it goes with the last copy that uses it. A second call does nothing.

        There are no slots any more then, and whoever asks for one gets an IndexError.
        """
        with self._lock:
            self.slots, self._headers = self.slots[:0].copy(), self._headers[:0].copy()
        self.segment.close()

    def take_memory(self) -> None:
        """Have the kernel hand over the memory of this region; bytes that are there stay.

        Raises:
            StagingMemoryError: There is not that much.

        Cost: 0.5 s per GiB, once.
        """
        used = self.layout.used_nbytes // self.layout.num_ranks
        self.segment.populate(self.rank * self.layout.region_nbytes, used)


def make_segment(layout: ArenaLayout) -> Segment:
    """Make the memory of an arena, without taking it yet (`ArenaPart.take_memory`).

    Raises:
        StagingMemoryError: There is not that much memory.
        DescriptorLimitError: No descriptor is left.
    """
    require_memory(layout.used_nbytes, "the arena")
    with os_errors("making the arena"):
        return Segment(layout.nbytes, populated=False)


@contextlib.contextmanager
def memory_errors(layout: ArenaLayout, whose: str) -> Iterator[None]:
    """Say of a lack of memory whose it is, and what to do.

    Args:
        layout: Of the arena.
        whose: ``"rank 0 of engine 'x'"``.

    Raises:
        StagingMemoryError: As it came, with that.
    """
    try:
        yield
    except StagingMemoryError as error:
        raise StagingMemoryError(
            f"there is not enough memory for the arena of {whose}: {layout}, "
            f"{layout.used_nbytes:,} bytes in all; lower cpu_bytes_to_use ({error.message})"
        ) from error
