"""The arena: host memory in slots that the ranks of one instance share, a region for each rank.

The arena is one anonymous shared segment (`wtransfer.transport.memory`) that all ranks of a host
map. Each rank has a region of it, populates that region before use, and is the only one that writes
there::

    | headers: one for each slot, then up to a page | slot 0 | slot 1 | ...

A rank's part of slot ``i`` and of block ``i`` are the same thing, whichever region it lies in. The
memory has no name in any file system, belongs to this user alone, and is gone with its last
process, however that ends. A header is written last and cleared first, so that a kill at any moment
leaves a block that is either whole or refused.

How ranks find the arena (`SharedRegion.attach`):

1. Each rank listens at an abstract Unix socket whose name contains user, engine and rank. The name
   claims the rank: no other process can have it until this one has ended.
2. The rank asks all other ranks. A rank that has the arena sends its descriptor, with its layout.
3. Rank 0 makes the arena if no other rank has it. The others ask again until one does.
4. From then on the rank exports the arena itself. So a rank that is restarted finds its blocks
   again as long as any other rank lives, rank 0 or not.

Peer credentials are checked at both ends, which belong to one user (`wtransfer.transport.lease`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from wtransfer.deadline import Deadline
from wtransfer.errors import (
    AddressInUseError,
    OffloadingOptionError,
    PeerLostError,
    ProtocolError,
    SegmentGoneError,
    StagingMemoryError,
    StallError,
)
from wtransfer.kv.header import HEADER_NBYTES
from wtransfer.kv.slots import Look
from wtransfer.specs.interface import BlockIDsLoadStoreSpec
from wtransfer.transport.address import parse_address, peer_credentials
from wtransfer.transport.lease import SegmentExporter, share
from wtransfer.transport.memory import Segment

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from typing_extensions import Self

    from wtransfer.kv.slots import Headers, Numbers

    Parts = npt.NDArray[np.uint8]
    """One rank's parts of all slots, shape ``(num_slots, part_nbytes)``."""

# -- layout -----------------------------------------------------------------------------------

_LINE_NBYTES = 64
_PAGE_NBYTES = 4096
# From here on whole pages cost at most a sixteenth more.
_PAGED_NBYTES = 16 * _PAGE_NBYTES
# Regions consist of huge pages of their own.
_REGION_NBYTES = 2 * 1024 * 1024


def stride_of(nbytes: int) -> int:
    """Return the distance of slots that hold `nbytes`: whole cache lines, or whole pages."""
    return _round_up(nbytes, _LINE_NBYTES if nbytes < _PAGED_NBYTES else _PAGE_NBYTES)


def _round_up(nbytes: int, unit: int) -> int:
    return -(-nbytes // unit) * unit


@dataclass(frozen=True)
class ArenaLayout:
    """Sizes of an arena; ranks that share one must agree on all of them."""

    num_slots: int
    part_nbytes: int
    """Bytes of one rank's part of a slot."""
    num_ranks: int = 1

    @classmethod
    def within(cls, nbytes: int, part_nbytes: int, num_ranks: int = 1) -> Self:
        """Return the layout with the most slots, maybe none, that takes at most `nbytes`.

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
        """Bytes of memory that are populated, of all ranks."""
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
        """Return all fields as plain data, for the handshake: causes before consequences."""
        return {
            "num_ranks": self.num_ranks,
            "part_nbytes": self.part_nbytes,
            "num_slots": self.num_slots,
        }

    def __str__(self) -> str:
        ranks = f" of {self.num_ranks} ranks" if self.num_ranks > 1 else ""
        return f"{self.num_slots:,} slots{ranks}, {self.part_nbytes:,} bytes each"


class ArenaLoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the arena, and the key of the block in each.

    The keys travel with the numbers so that a worker can compare them with the slot's header: a
    number alone would be believed.

    Args:
        slots: Their numbers.
        keys: The fenced keys, in the same order.
    """

    def __init__(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        super().__init__(slots)
        self.keys = list(keys)
        """Key of the block in each slot."""
        if len(self.keys) != len(self.block_ids):
            raise ValueError(f"{len(self.keys)} keys for {len(self.block_ids)} slots")

    @property
    def slots(self) -> list[int]:
        """Slot numbers; the same as `block_ids`."""
        return self.block_ids

    @staticmethod
    def medium() -> str:
        """Return ``"CPU"``."""
        return "CPU"


# -- a rank's region ----------------------------------------------------------------------------


class SharedRegion:
    """One rank's region of an arena, and the rules by which it is written.

    Any thread may use it. Slot numbers must be those of the layout.

    Args:
        segment: Memory of the whole arena; this region is populated.
        layout: Layout of the arena.
        rank: Rank that the region belongs to.
        exporter: Keeps the arena reachable for other ranks until `detach`.
    """

    def __init__(
        self,
        segment: Segment,
        layout: ArenaLayout,
        rank: int,
        exporter: SegmentExporter | None = None,
    ) -> None:
        self.segment = segment
        """Memory of the whole arena."""
        self.layout = layout
        """Layout of the arena."""
        self.rank = rank
        """Rank that the region belongs to."""
        self._exporter = exporter
        start = rank * layout.region_nbytes
        region = segment.buffer[start : start + layout.region_nbytes]
        slots = region[layout.slots_offset :][: layout.num_slots * layout.stride]
        self.slots: Parts = slots.reshape(layout.num_slots, layout.stride)[:, : layout.part_nbytes]
        """This rank's parts of all slots, shape ``(num_slots, part_nbytes)``."""
        self._headers: Headers = region[: layout.num_slots * HEADER_NBYTES].reshape(
            layout.num_slots, HEADER_NBYTES
        )
        # How often each slot was opened for writing, by this process: another number than before
        # means another writer. The count guards what headers cannot: two stores into one slot.
        self._openings = np.zeros(layout.num_slots, np.int64)
        self._lock = threading.Lock()

    @classmethod
    def attach(
        cls, engine_id: str, rank: int, layout: ArenaLayout, deadline_s: float = 30.0
    ) -> Self:
        """Find or make the arena, export it to the other ranks, and populate this rank's region.

        A rank that is alone makes an arena for itself, and exports nothing.

        Args:
            engine_id: Identity of the serving instance.
            rank: Rank of this process.
            layout: Layout that the arena must have.
            deadline_s: Longest wait for the other ranks, in seconds.

        Raises:
            OffloadingOptionError: There are several ranks and no engine id to find them by.
            AddressInUseError: Another process is this rank of an engine with this id.
            ProtocolError: The ranks do not agree on the layout: the other rank is still there after
                `CLAIM_S`; the first field that differs is named.
            AuthenticationError: Another user's process has the name of one of the ranks.
            StallError: No other rank has the arena, and this one is not to make it.
            StagingMemoryError: There is not enough memory; with the numbers.

        Cost: 0.5 s per GiB of this rank, once.
        """
        exporter = None
        with contextlib.ExitStack() as on_error:
            if layout.num_ranks > 1:
                exporter = _claim_rank(engine_id, rank, layout, deadline_s)
                on_error.callback(exporter.close)
            try:
                if exporter is None:
                    segment = Segment(layout.nbytes, populated=False)
                else:
                    segment = _find_or_make(engine_id, rank, layout, deadline_s)
                    # Before the region is populated, which takes a while: other ranks wait for the
                    # arena.
                    exporter.export(_SEGMENT_ID, segment, layout.facts())
                used = layout.used_nbytes // layout.num_ranks
                segment.populate(rank * layout.region_nbytes, used)
            except StagingMemoryError as error:
                raise StagingMemoryError(
                    f"there is not enough memory for the arena of rank {rank} of engine "
                    f"{engine_id!r}: {layout}, {layout.used_nbytes:,} bytes in all; lower "
                    f"cpu_bytes_to_use ({error.message})"
                ) from error
            on_error.pop_all()
        return cls(segment, layout, rank, exporter)

    def detach(self) -> None:
        """Release the memory, which stays with the other ranks; a second call does nothing.

        The memory is unmapped with the last copy that uses it. There are no slots any more from
        here on: indexing one is an IndexError.
        """
        if self._exporter is not None:
            self._exporter.close()
        with self._lock:
            self.slots, self._headers = self.slots[:0].copy(), self._headers[:0].copy()
        self.segment.close()

    @property
    def address(self) -> int:
        """Address of this rank's region; it has `ArenaLayout.region_nbytes` bytes."""
        return int(self._headers.ctypes.data)

    def open(self, slots: Numbers) -> npt.NDArray[np.int64]:
        """Clear the headers of slots: their blocks are refused until `close`.

        Args:
            slots: Slot numbers, none twice.

        Returns:
            Number of times that each slot has been opened, for `close`.
        """
        with self._lock:
            self._openings[slots] += 1
            self._headers[slots] = 0
            return self._openings[slots]

    def close(self, slots: Numbers, opened: npt.NDArray[np.int64], headers: Headers) -> bool:
        """Write the headers of slots, the last step of a store.

        Returns:
            True if the headers were written. If another store has opened one of the slots since, no
            slot gets a header: the bytes may be of either.
        """
        with self._lock:
            if not np.array_equal(self._openings[slots], opened):
                return False
            self._headers[slots] = headers
            return True

    def look(self, slots: Numbers) -> Look:
        """Return the present state of slots."""
        with self._lock:
            return Look(self._headers[slots], self._openings[slots])

    def quarantine(self, slot: int, seen: Headers) -> None:
        """Clear the header of a damaged block, unless it is another one by now.

        Args:
            slot: Its slot.
            seen: The header that it was judged by, shape ``(HEADER_NBYTES,)``.
        """
        with self._lock:
            if np.array_equal(self._headers[slot], seen):
                self._headers[slot] = 0


# -- how ranks find the arena -------------------------------------------------------------------

CLAIM_S = 5.0
"""Time for which a rank's name may still belong to the process before it, which is ending, in
seconds: giving back its memory takes a while."""

_POLL_S = 0.02
_ASK_S = 1.0
_LEAST_ASK_S = 0.1
_SEGMENT_ID = 0


def _address_of(engine_id: str, rank: int) -> str:
    # A digest, as an engine id may contain anything; the exporter proves that it is this one.
    name = xxhash.xxh3_64_hexdigest(engine_id.encode())
    return f"unix:@wtransfer-arena-{os.geteuid()}-{name}-{rank}"


def _claim_rank(
    engine_id: str, rank: int, layout: ArenaLayout, deadline_s: float
) -> SegmentExporter:
    """Listen at the rank's address, which no other process can do as long as this one lives."""
    if not engine_id:
        raise OffloadingOptionError(
            f"{layout.num_ranks} ranks share one arena and find it by the engine id, which is "
            "empty; set engine_id in the KV transfer config"
        )
    address = _address_of(engine_id, rank)
    deadline = Deadline(min(CLAIM_S, deadline_s))
    while True:
        try:
            return SegmentExporter(address, secret=engine_id)
        except AddressInUseError as error:
            if deadline.expired:
                holder = "(unknown)"
                with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as probe:
                    probe.settimeout(_ASK_S)
                    probe.connect(parse_address(address).target)
                    holder = str(peer_credentials(probe)[0])
                if error.made_at is not None:
                    holder += f" (this one, made at {error.made_at})"
                raise AddressInUseError(
                    f"rank {rank} of engine {engine_id!r} is there already, as process {holder}; "
                    "does another instance use this engine id?",
                    made_at=error.made_at,
                ) from error
        time.sleep(_POLL_S)


def _find_or_make(engine_id: str, rank: int, layout: ArenaLayout, deadline_s: float) -> Segment:
    """Return the arena of the other ranks; rank 0 makes one where there is none."""
    deadline = Deadline(deadline_s)
    # Ranks with another arena may belong to the engine before this one, and be ending.
    patience = Deadline(min(CLAIM_S, deadline_s))
    while True:
        mismatch = None
        for other in range(layout.num_ranks):
            if other == rank:
                continue
            # Never zero: a rank that is not asked in the last turn would seem to have no arena.
            timeout_s = min(_ASK_S, max(deadline.remaining(), _LEAST_ASK_S))
            try:
                found = share(_address_of(engine_id, other), engine_id, _SEGMENT_ID, timeout_s)
            except (PeerLostError, SegmentGoneError, StallError):
                # Not there yet, there but without an arena, or stopped: another rank may have it.
                continue
            got = {name: found.facts.get(name) for name in layout.facts()}
            if got == layout.facts():
                return found.segment
            mismatch = mismatch or got
            found.segment.close()
        if mismatch is not None:
            if patience.expired:
                wanted = layout.facts()
                name = next(name for name in wanted if wanted[name] != mismatch[name])
                raise ProtocolError(
                    f"rank {rank} of engine {engine_id!r} wants an arena with {name} "
                    f"{wanted[name]}, the other ranks have one with {mismatch[name]}; start all "
                    "ranks with the same model, parallelism and cpu_bytes_to_use"
                )
        elif rank == 0:
            return Segment(layout.nbytes, populated=False)
        elif deadline.expired:
            raise StallError(
                f"rank {rank} of {layout.num_ranks} of engine {engine_id!r} found no arena within "
                f"{deadline.seconds:g} s: rank 0, which makes it, has not got that far, or runs on "
                "another host, in another network namespace (a container) or as another user",
                seconds=deadline.seconds,
            )
        time.sleep(_POLL_S)
