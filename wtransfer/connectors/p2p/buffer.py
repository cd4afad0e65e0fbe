"""The staging buffer: host memory in slots, in which blocks stand by key until D fetches them.

A slot is *free*, *filling* or *committed*. Committed ones can be leased by any number of holders.
One without a lease may be evicted, least recently used first. A leased slot stays until its last
holder releases it or the lease expires; a reader may then find another block there, and rejects it.

A slot is one range of bytes, so that it can be sent as it is::

    | block header | slot version | padding to a cache line | pages, one for each layer |

The header (`wtransfer.blocks.BlockHeader`) is written last and cleared first: a slot without a
header is empty. The version differs whenever a slot is filled or cleared, so a reader that finds
header and version unchanged after its copy knows that the pages did not change in between.
"""

from __future__ import annotations

import itertools
import struct
import threading
import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from wtransfer.blocks import HEADER_NBYTES, BlockGeometry, BlockHeader
from wtransfer.connectors.p2p.protocol import MISSING
from wtransfer.errors import ConnectorOptionError
from wtransfer.transport.memory import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from wtransfer.blocks import Mismatch
    from wtransfer.transport.tensors import ByteArray

SLOT_VERSION = slice(HEADER_NBYTES, HEADER_NBYTES + 8)
"""Where a slot's version is: a number, little-endian."""
HEAD = slice(0, SLOT_VERSION.stop)
"""Header and version."""
_PAYLOAD_START = 192  # a cache line begins there
_PAGE_NBYTES = 4096


@dataclass(frozen=True)
class SlotLayout:
    """Where things are in a slot; equal on both sides if the geometry is."""

    geometry: BlockGeometry

    @cached_property
    def digest(self) -> bytes:
        """Digest of the geometry."""
        return self.geometry.digest

    @cached_property
    def payload(self) -> slice:
        """Where the pages are."""
        return slice(_PAYLOAD_START, self.nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of a slot in use."""
        return _PAYLOAD_START + self.geometry.nbytes

    @property
    def stride(self) -> int:
        """Bytes from one slot to the next."""
        return -(-self.nbytes // _PAGE_NBYTES) * _PAGE_NBYTES

    def header(self, key: bytes, checksum: bytes, rank: int) -> bytes:
        """Return the packed header of a block; `checksum` is that of all its pages."""
        return BlockHeader(key, self.digest, self.geometry.nbytes, checksum, rank).pack()

    def check_head(self, head: bytes, key: bytes, rank: int) -> BlockHeader | Mismatch:
        """Return the header in a copy of a slot's head, or why this is not the wanted block."""
        header = BlockHeader.unpack(head[:HEADER_NBYTES])
        if not isinstance(header, BlockHeader):
            return header
        return header.mismatch(key, self.digest, self.geometry.nbytes, rank) or header


@dataclass
class _Lease:
    slots: set[int] = field(default_factory=set)
    expires_at: float | None = None


class StagingBuffer:
    """The staging buffer of one rank. Any thread may use it; no call blocks.

    Args:
        layout: Of a slot.
        nbytes: Memory to take, at most.
        rank: Rank whose part of each block it holds.
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
        self.num_slots: int = nbytes // layout.stride
        if not self.num_slots:
            raise ConnectorOptionError(
                f"shelf_bytes={nbytes:,} has no room for one block of {layout.stride:,} bytes"
            )
        self.layout = layout
        self.segment = Segment(self.num_slots * layout.stride)
        """Its memory."""
        self._memory = self.segment.buffer.reshape(self.num_slots, layout.stride)
        self._rank = rank
        self._clock = clock
        self._lock = threading.Lock()
        self._free = list(range(self.num_slots - 1, -1, -1))
        self._filling: dict[bytes, int] = {}
        self._committed: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        # Committed and not leased, least recently used first.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._num_leases: Counter[int] = Counter()
        self._leases: dict[Hashable, _Lease] = {}
        self._counts: Counter[str] = Counter()
        self._versions = itertools.count(1)

    def slot(self, number: int) -> ByteArray:
        """Return the memory of a slot."""
        memory: ByteArray = self._memory[number]
        return memory

    # -- filling

    def reserve(self, key: bytes) -> int | None:
        """Return a slot to fill with a block; None: the block is here, or there is no room."""
        with self._lock:
            if key in self._committed or key in self._filling:
                return None
            if not self._free and not self._evictable:
                self._expire()
            if not self._free:
                if not self._evictable:
                    self._counts["saves_without_room_total"] += 1
                    return None
                slot, _ = self._evictable.popitem(last=False)
                self._clear(slot)
                self._free.append(slot)
                self._counts["blocks_evicted_total"] += 1
            self._filling[key] = slot = self._free.pop()
            return slot

    def commit(self, key: bytes, checksum: bytes) -> None:
        """Let readers find a block whose pages are in its slot; `checksum` is that of all pages."""
        header = self.layout.header(key, checksum, self._rank)
        with self._lock:
            slot = self._filling.pop(key)
            self._set_version(slot)
            self._memory[slot, :HEADER_NBYTES].data[:] = header
            self._keys[slot] = key
            self._committed[key] = slot
            self._evictable[slot] = None
            self._counts["blocks_saved_total"] += 1
            self._counts["bytes_saved_total"] += self.layout.geometry.nbytes

    def abort(self, key: bytes) -> None:
        """Free a slot that will not be filled."""
        with self._lock:
            self._free.append(self._filling.pop(key))

    def invalidate(self, keys: Iterable[bytes]) -> None:
        """Remove blocks at once, also for readers; leased slots are reused after their release."""
        with self._lock:
            for key in keys:
                slot = self._committed.get(key)
                if slot is not None:
                    self._counts["blocks_invalidated_total"] += 1
                    self._clear(slot)
                    if slot in self._evictable:
                        del self._evictable[slot]
                        self._free.append(slot)

    def _clear(self, slot: int) -> None:
        # Before a page of the next block is written: a reader must not take it for this one's.
        self._memory[slot, :HEADER_NBYTES] = 0
        self._set_version(slot)
        del self._committed[self._keys.pop(slot)]

    def _set_version(self, slot: int) -> None:
        self._memory[slot, SLOT_VERSION].data[:] = struct.pack("<Q", next(self._versions))

    # -- leases

    def lease(
        self, holder: Hashable, keys: Iterable[bytes], lasting_s: float | None = None
    ) -> list[int]:
        """Lease blocks, in addition to those that a holder has leased before.

        Args:
            holder: Identity of the holder.
            keys: Of the blocks.
            lasting_s: Seconds until the whole lease expires; None: it does not expire.

        Returns:
            Their slots; `MISSING` for a block that is not committed.
        """
        with self._lock:
            slots = [self._committed.get(key, MISSING) for key in keys]
            lease = self._leases.setdefault(holder, _Lease())
            lease.expires_at = None if lasting_s is None else self._clock() + lasting_s
            for slot in set(slots) - lease.slots - {MISSING}:
                lease.slots.add(slot)
                self._num_leases[slot] += 1
                self._evictable.pop(slot, None)
            return slots

    def expire_in(self, holder: Hashable, seconds: float) -> bool:
        """Let a lease expire after some seconds; return whether it exists."""
        with self._lock:
            lease = self._leases.get(holder)
            if lease is not None:
                lease.expires_at = self._clock() + seconds
            return lease is not None

    def release(self, holder: Hashable) -> bool:
        """End a lease; return whether it existed."""
        with self._lock:
            return self._release(holder)

    def _release(self, holder: Hashable) -> bool:
        lease = self._leases.pop(holder, None)
        if lease is None:
            return False
        for slot in lease.slots:
            self._num_leases[slot] -= 1
            if not self._num_leases[slot]:
                del self._num_leases[slot]
                if slot in self._keys:
                    self._evictable[slot] = None
                else:
                    self._free.append(slot)
        return True

    def _expire(self) -> None:
        now = self._clock()
        for holder, lease in list(self._leases.items()):
            if lease.expires_at is not None and lease.expires_at <= now:
                self._release(holder)
                self._counts["leases_expired_total"] += 1

    # -- the whole

    def get_stats(self) -> dict[str, int]:
        """Return counters (``_total``) and what there is now."""
        with self._lock:
            self._expire()
            return {
                **self._counts,
                "leases": len(self._leases),
                "slots": self.num_slots,
                "slots_leased": len(self._num_leases),
                "slots_kept": len(self._committed),
                "slots_filling": len(self._filling),
            }

    def close(self) -> None:
        """Give up the memory; the kernel frees it when the last reader has unmapped it."""
        with self._lock:
            self._memory = self._memory[:0].copy()  # a view would keep the mapping
            self._committed.clear()
            self._evictable.clear()
            self._free.clear()
        self.segment.close()
