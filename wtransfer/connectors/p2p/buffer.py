"""The staging buffer: host memory in slots, which hold blocks by key until D fetches them.

A committed block can be leased by any number of holders. A block without a lease may be evicted,
least recently used first. A leased one stays until its last holder releases it or the lease
expires; a reader may then find another block in its slot, and rejects it.

A slot is one range of bytes, so that it can be sent as it is::

    | block header | slot version | padding to a cache line | pages, one for each layer |

The header (`wtransfer.kv.header.BlockHeader`) is written last and cleared first: a slot without a
header is empty. The version differs whenever a slot is filled or cleared, so a reader that finds
header and version unchanged after its copy knows that the pages did not change in between.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING

import numpy as np

from wtransfer.errors import ConnectorOptionError
from wtransfer.kv.header import HEADER_NBYTES
from wtransfer.kv.slots import Look
from wtransfer.transport.memory import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Mapping

    from wtransfer.kv.header import BlockGeometry
    from wtransfer.kv.slots import Headers, Numbers
    from wtransfer.transport.tensors import ByteArray

_PAYLOAD_START = 192  # a cache line begins there
_PAGE_NBYTES = 4096


class SlotMemory:
    """Slots in one piece of memory: this process's, mapped from another process, or received.

    Args:
        memory: The memory; as many slots as it has room for.
        payload_nbytes: Bytes of a block.
    """

    def __init__(self, memory: ByteArray, payload_nbytes: int) -> None:
        stride = self.stride(payload_nbytes)
        whole = memory[: memory.size // stride * stride].reshape(-1, stride)
        self.used = whole[:, : _PAYLOAD_START + payload_nbytes]
        """Each slot as it is sent, shape ``(num_slots, nbytes)``."""
        self.slots = self.used[:, _PAYLOAD_START:]
        """Payloads, shape ``(num_slots, payload_nbytes)``."""
        self.headers: Headers = whole[:, :HEADER_NBYTES]
        """Shape ``(num_slots, HEADER_NBYTES)``."""
        self.versions: Numbers = whole.view(np.int64)[:, HEADER_NBYTES // 8]
        """Numbers that differ whenever a slot is filled or cleared, shape ``(num_slots,)``."""

    @staticmethod
    def stride(payload_nbytes: int) -> int:
        """Return the bytes from one slot to the next."""
        return -(-(_PAYLOAD_START + payload_nbytes) // _PAGE_NBYTES) * _PAGE_NBYTES

    def look(self, slots: Numbers) -> Look:
        """Return the present state of slots."""
        return Look(self.headers[slots], self.versions[slots])

    def quarantine(self, slot: int, seen: Headers) -> None:
        """Do nothing: the memory is another process's, or is received into again."""


class StagingBuffer:
    """The staging buffer of one rank. Any thread may use it; no call blocks.

    Args:
        geometry: Layout of a block.
        nbytes: Memory to take, at most.
        clock: Monotonic time in seconds.

    Raises:
        ConnectorOptionError: Not one block fits.
        StagingMemoryError: There is not that much memory.

    Cost: 0.5 s per GiB, once.
    """

    def __init__(
        self, geometry: BlockGeometry, nbytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        stride = SlotMemory.stride(geometry.nbytes)
        self.num_slots = nbytes // stride
        if not self.num_slots:
            raise ConnectorOptionError(
                f"staging_bytes={nbytes:,} has no room for one block of {stride:,} bytes"
            )
        self.segment = Segment(self.num_slots * stride)
        """Memory of the buffer."""
        self.memory = SlotMemory(self.segment.buffer, geometry.nbytes)
        """Slots of the buffer."""
        self.geometry = geometry
        """Layout of a block."""
        self._clock = clock
        self._lock = threading.Lock()
        # Not leased and not filling: first those without a block, then least recently used first.
        self._unleased = OrderedDict.fromkeys(range(self.num_slots))
        self._committed: dict[bytes, int] = {}
        self._keys: dict[int, bytes] = {}
        self._leases: dict[Hashable, set[int]] = {}
        self._expires_at: dict[Hashable, float] = {}
        self._num_leases: Counter[int] = Counter()
        self._counts: Counter[str] = Counter()
        self._versions = itertools.count(1)

    # -- filling

    def reserve(self, keys: Iterable[bytes]) -> dict[bytes, int]:
        """Return slots to fill with the blocks that are not here, as far as there is room."""
        slots = {}
        with self._lock:
            self._expire()
            for key in keys:
                if key in self._committed:
                    continue
                if not self._unleased:
                    self._counts["saves_without_room_total"] += 1
                    continue
                slots[key], _ = self._unleased.popitem(last=False)
                if slots[key] in self._keys:
                    self._clear(slots[key])
                    self._counts["blocks_evicted_total"] += 1
        return slots

    def commit(self, slots: Mapping[bytes, int], headers: Headers) -> None:
        """Let readers find blocks whose pages are in their slots."""
        with self._lock:
            for (key, slot), header in zip(slots.items(), headers, strict=True):
                self.memory.versions[slot] = next(self._versions)
                self.memory.headers[slot] = header
                self._keys[slot] = key
                self._committed[key] = slot
                self._unleased[slot] = None
                self._counts["blocks_saved_total"] += 1
                self._counts["bytes_saved_total"] += self.geometry.nbytes

    def abort(self, slots: Mapping[bytes, int]) -> None:
        """Free slots that will not be filled."""
        with self._lock:
            for slot in slots.values():
                self._put_first(slot)

    def invalidate(self, keys: Iterable[bytes]) -> None:
        """Remove blocks at once, also for readers; leased slots are reused after their release."""
        with self._lock:
            for key in keys:
                slot = self._committed.get(key)
                if slot is not None:
                    self._counts["blocks_invalidated_total"] += 1
                    self._clear(slot)
                    if slot in self._unleased:
                        self._put_first(slot)

    def _clear(self, slot: int) -> None:
        # Before a page of the next block is written: a reader must not take it for this one's.
        self.memory.headers[slot] = 0
        self.memory.versions[slot] = next(self._versions)
        del self._committed[self._keys.pop(slot)]

    def _put_first(self, slot: int) -> None:
        self._unleased[slot] = None
        self._unleased.move_to_end(slot, last=False)

    # -- leases

    def lease(
        self, holder: Hashable, keys: Iterable[bytes], lasting_s: float | None = None
    ) -> list[int]:
        """Lease blocks, in addition to those that a holder has leased before.

        Args:
            holder: Identity of the holder.
            keys: Keys of the blocks; none: only the end of an existing lease changes.
            lasting_s: Seconds until the whole lease expires; None: it does not expire.

        Returns:
            Their slots, up to the first block that is not committed. A new lease needs a slot.
        """
        with self._lock:
            known = itertools.takewhile(self._committed.__contains__, keys)
            slots = [self._committed[key] for key in known]
            if slots or holder in self._leases:
                self._expires_at.pop(holder, None)
                if lasting_s is not None:
                    self._expires_at[holder] = self._clock() + lasting_s
                lease = self._leases.setdefault(holder, set())
                for slot in set(slots) - lease:
                    lease.add(slot)
                    self._num_leases[slot] += 1
                    self._unleased.pop(slot, None)
            return slots

    def release(self, holder: Hashable) -> bool:
        """End a lease; return whether it existed."""
        with self._lock:
            return self._release(holder)

    def _release(self, holder: Hashable) -> bool:
        slots = self._leases.pop(holder, None)
        self._expires_at.pop(holder, None)
        for slot in slots or ():
            self._num_leases[slot] -= 1
            if not self._num_leases[slot]:
                del self._num_leases[slot]
                if slot in self._keys:
                    self._unleased[slot] = None
                else:
                    self._put_first(slot)
        return slots is not None

    def num_unleased(self) -> int:
        """Return the number of slots that can be filled: neither leased nor filling.

        Leases made by lookups meanwhile may take some of them.
        """
        with self._lock:
            self._expire()
            return len(self._unleased)

    def _expire(self) -> None:
        now = self._clock()
        for holder in [each for each, at in self._expires_at.items() if at <= now]:
            self._release(holder)
            self._counts["leases_expired_total"] += 1

    # -- the whole

    def get_stats(self) -> dict[str, int]:
        """Return counters (``_total``) and present numbers."""
        with self._lock:
            self._expire()
            return {
                **self._counts,
                "leases": len(self._leases),
                "slots": self.num_slots,
                "slots_leased": len(self._num_leases),
                "slots_kept": len(self._committed),
            }

    def close(self) -> None:
        """Give up the memory; the kernel frees it when the last reader has unmapped it."""
        with self._lock:
            # A view would keep the mapping.
            self.memory = SlotMemory(np.empty(0, np.uint8), self.geometry.nbytes)
            self._committed.clear()
            self._unleased.clear()
        self.segment.close()
