"""The shelf: slots of host memory in which blocks stand by name until they are fetched.

A slot is *filling*, *kept* or *free*. Kept ones can be leased by any number of holders; one that
nobody has leased is the next block's, the longest unused first. What is leased stays, until its
holder lets go or the lease runs out: then a reader may find another block there, and refuses it.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

from wtransfer.blocks import HEADER_NBYTES
from wtransfer.connectors.relay.layout import GENERATION
from wtransfer.errors import ConnectorOptionError
from wtransfer.transport.memory import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from wtransfer.connectors.relay.layout import SlotLayout
    from wtransfer.transport.tensors import ByteArray

MISSING = -1
"""Stands for a slot where there is none."""


class _Lease:
    """What one holder has leased."""

    def __init__(self) -> None:
        self.slots: set[int] = set()
        self.ends_at: float | None = None


class Shelf:
    """The shelf of one rank. Any thread may use it; no call waits.

    Args:
        layout: Of a slot.
        nbytes: Memory to take, at most.
        rank: Whose shelf it is.
        clock: Monotonic time in seconds.

    Raises:
        ConnectorOptionError: Not one block fits.
        StagingMemoryError: There is not that much memory.

    Cost: 0.5 s per GiB, once.
    """

    def __init__(
        self,
        layout: SlotLayout,
        nbytes: int,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.num_slots = nbytes // layout.stride
        """Slots."""
        if not self.num_slots:
            raise ConnectorOptionError(
                f"shelf_bytes={nbytes:,} has no room for one block of {layout.stride:,} bytes"
            )
        self.layout = layout
        """Of a slot."""
        self.segment = Segment(self.num_slots * layout.stride)
        """Its memory."""
        self._memory = self.segment.buffer.reshape(self.num_slots, layout.stride)
        self._rank = rank
        self._clock = clock
        self._lock = threading.Lock()
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._names: dict[int, bytes] = {}
        self._kept: dict[bytes, int] = {}
        self._filling: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._holders: Counter[int] = Counter()
        self._leases: dict[Hashable, _Lease] = {}
        self._counts: Counter[str] = Counter()
        self._generations = itertools.count(1)

    def slot(self, number: int) -> ByteArray:
        """Return the memory of a slot."""
        memory: ByteArray = self._memory[number]
        return memory

    # -- filling

    def open(self, name: bytes) -> int | None:
        """Return an empty slot for a block; None: it is here already, or there is no room."""
        with self._lock:
            if name in self._kept or name in self._filling:
                return None
            slot = self._empty_slot()
            if slot is None:
                self._counts["saves_without_room"] += 1
                return None
            self._filling[name] = slot
            return slot

    def keep(self, name: bytes, checksum: bytes) -> None:
        """Hear that the pages of a block are in its slot.

        Args:
            name: The block.
            checksum: Of all its pages.
        """
        header = self.layout.header(name, checksum, self._rank)
        with self._lock:
            slot = self._filling.pop(name)
            memory = self._memory[slot]
            self._renew(memory)
            memory[:HEADER_NBYTES].data[:] = header
            self._names[slot] = name
            self._kept[name] = slot
            self._idle[slot] = None
            self._counts["blocks_saved"] += 1
            self._counts["bytes_saved"] += self.layout.geometry.nbytes

    def discard(self, name: bytes) -> None:
        """Hear that a slot will not be filled."""
        with self._lock:
            self._free.append(self._filling.pop(name))

    def withdraw(self, names: Iterable[bytes]) -> None:
        """Let nobody have blocks any more: they are not what their names say."""
        with self._lock:
            for name in names:
                slot = self._kept.get(name)
                if slot is not None:
                    self._counts["blocks_withdrawn"] += 1
                    self._empty(slot)
                    if slot in self._idle:
                        del self._idle[slot]
                        self._free.append(slot)

    def _empty_slot(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._idle:
            self._expire()
        if not self._idle:
            return None
        slot, _ = self._idle.popitem(last=False)
        self._empty(slot)
        self._counts["blocks_evicted"] += 1
        return slot

    def _empty(self, slot: int) -> None:
        # Before a page of the next block is written: who reads it now finds nothing.
        self._memory[slot, :HEADER_NBYTES] = 0
        self._renew(self._memory[slot])
        del self._kept[self._names.pop(slot)]

    def _renew(self, memory: ByteArray) -> None:
        """Let a slot be another one for whoever looks at its head twice."""
        memory[GENERATION].data[:] = struct.pack("<Q", next(self._generations))

    # -- leases

    def lease(
        self, holder: Hashable, names: Iterable[bytes], lasting_s: float | None = None
    ) -> list[int]:
        """Lease blocks, together with those that a holder has already.

        Args:
            holder: Who.
            names: Of blocks.
            lasting_s: When the lease runs out, in seconds from now; None: not by itself.

        Returns:
            Their slots; `MISSING` for a block that is not here.
        """
        with self._lock:
            slots = [self._kept.get(name, MISSING) for name in names]
            self._add(holder, [slot for slot in slots if slot != MISSING], lasting_s)
            return slots

    def last(self, holder: Hashable, lasting_s: float) -> bool:
        """Let a lease run out after so many seconds; return whether there is one."""
        with self._lock:
            lease = self._leases.get(holder)
            if lease is not None:
                lease.ends_at = self._clock() + lasting_s
            return lease is not None

    def release(self, holder: Hashable) -> bool:
        """End a lease; return whether there was one."""
        with self._lock:
            return self._end(holder)

    def _add(self, holder: Hashable, slots: Sequence[int], lasting_s: float | None) -> None:
        lease = self._leases.setdefault(holder, _Lease())
        lease.ends_at = None if lasting_s is None else self._clock() + lasting_s
        for slot in slots:
            if slot not in lease.slots:
                lease.slots.add(slot)
                self._holders[slot] += 1
                self._idle.pop(slot, None)

    def _end(self, holder: Hashable) -> bool:
        lease = self._leases.pop(holder, None)
        if lease is None:
            return False
        for slot in lease.slots:
            self._holders[slot] -= 1
            if not self._holders[slot]:
                del self._holders[slot]
                if slot in self._names:
                    self._idle[slot] = None
                else:
                    self._free.append(slot)
        return True

    def _expire(self) -> None:
        now = self._clock()
        over = [
            holder
            for holder, lease in self._leases.items()
            if lease.ends_at is not None and lease.ends_at <= now
        ]
        for holder in over:
            self._end(holder)
        self._counts["leases_expired"] += len(over)

    # -- the whole

    def counts(self) -> dict[str, int]:
        """Return what has happened so far, and what there is now."""
        with self._lock:
            self._expire()
            return {
                **self._counts,
                "leases": len(self._leases),
                "slots": self.num_slots,
                "slots_leased": len(self._holders),
                "slots_kept": len(self._kept),
                "slots_filling": len(self._filling),
            }

    def close(self) -> None:
        """Give up the memory; it goes with the last one that has mapped it."""
        with self._lock:
            self._memory = self._memory[:0].copy()  # a view would keep the mapping
            self._kept.clear()
            self._idle.clear()
            self._free.clear()
        self.segment.close()
