"""Ranks of one host find each other's arena.

1. Each rank listens at an abstract Unix socket of its own, whose name says user, engine and rank.
   That claims the rank: no other process can have the name until this one has ended.
2. It asks all others. Whoever has the arena hands it over by descriptor, with its layout.
3. Rank 0 makes the arena if nobody has it. The others ask again until somebody does.
4. From then on it hands the arena over itself. So a rank that is started anew finds it as long as
   any other rank lives, rank 0 or not.

Both ends check by the kernel's word that they belong to one user (`wtransfer.transport.lease`).
Nothing is left when all have ended, in whichever way.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING

import xxhash

from wtransfer.deadline import Deadline
from wtransfer.errors import (
    AddressInUseError,
    OffloadingOptionError,
    PeerLostError,
    ProtocolError,
    SegmentGoneError,
    StallError,
)
from wtransfer.specs.arena.arena import make_segment
from wtransfer.transport.address import parse_address, peer_credentials
from wtransfer.transport.lease import SegmentExporter, share

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer.specs.arena.layout import ArenaLayout
    from wtransfer.transport.lease import Shared
    from wtransfer.transport.memory import Segment

CLAIM_S = 5.0
"""How long a rank's name may still belong to the process before it, which is ending: giving back
its memory takes a while."""

_POLL_S = 0.02
_ASK_S = 1.0
_LEAST_ASK_S = 0.1
_SEGMENT_ID = 0


class Meeting:
    """One rank's place among the ranks of an engine; keeps the arena reachable until `close`.

    Args:
        engine_id: Identity of the serving instance.
        rank: Of this process.
        layout: Which the arena must have.
        deadline_s: Longest wait for the other ranks, in seconds.

    Raises:
        OffloadingOptionError: There is no engine id to meet by.
        AddressInUseError: Another process is this rank of an engine with this id.
    """

    def __init__(
        self, engine_id: str, rank: int, layout: ArenaLayout, deadline_s: float = 30.0
    ) -> None:
        if not engine_id:
            raise OffloadingOptionError(
                f"{layout.num_ranks} ranks share one arena and find it by the engine id, which is "
                "empty; set engine_id in the KV transfer config"
            )
        self._engine_id = engine_id
        self._rank = rank
        self._layout = layout
        self._deadline_s = deadline_s
        self._exporter = self._claim(Deadline(min(CLAIM_S, deadline_s)))

    def arena(self) -> Segment:
        """Return the memory of the arena, found or made, and hand it to those who ask from now on.

        Raises:
            ProtocolError: The arena has another layout, and whoever has it is still there after
                `CLAIM_S`; the first field that differs is named.
            AuthenticationError: Another user's process has the name of one of the ranks.
            StallError: No rank has it, and this one is not to make it.
            StagingMemoryError: There is not enough memory.
        """
        segment = self._find_or_make()
        self._exporter.export(_SEGMENT_ID, segment, self._layout.facts())
        return segment

    def close(self) -> None:
        """Leave; a second call does nothing. The arena stays with those who have it."""
        self._exporter.close()

    def _claim(self, deadline: Deadline) -> SegmentExporter:
        address = self._address_of(self._rank)
        while True:
            try:
                return SegmentExporter(address, secret=self._engine_id)
            except AddressInUseError as error:
                if deadline.expired:
                    raise AddressInUseError(
                        f"rank {self._rank} of engine {self._engine_id!r} is there already, as "
                        f"process {_holder_of(address)}; does another instance use this engine id?"
                    ) from error
            time.sleep(_POLL_S)

    def _find_or_make(self) -> Segment:
        deadline = Deadline(self._deadline_s)
        # Those who have another arena may be of the engine before this one, and be ending.
        patience = Deadline(min(CLAIM_S, self._deadline_s))
        while True:
            found = self._found(deadline)
            if isinstance(found, ProtocolError):
                if patience.expired:
                    raise found
            elif found is not None:
                return found
            elif self._rank == 0:
                return make_segment(self._layout)
            else:
                self._check_time(deadline)
            time.sleep(_POLL_S)

    def _found(self, deadline: Deadline) -> Segment | ProtocolError | None:
        """Return the arena that others have; if they only have another one, in what it differs."""
        unlike = None
        for shared in self._offers(deadline):
            difference = self._difference(shared)
            if difference is None:
                return shared.segment
            unlike = unlike or difference
        return unlike

    def _offers(self, deadline: Deadline) -> Iterator[Shared]:
        """Yield what other ranks have, first of all nothing if none of them has it."""
        for rank in range(self._layout.num_ranks):
            # Never zero: a rank that is not asked in the last turn would seem to have no arena.
            timeout_s = min(_ASK_S, max(deadline.remaining(), _LEAST_ASK_S))
            # Not there yet, there but without an arena, or stopped: another rank may have it.
            with contextlib.suppress(PeerLostError, SegmentGoneError, StallError):
                if rank != self._rank:
                    yield share(self._address_of(rank), self._engine_id, _SEGMENT_ID, timeout_s)

    def _difference(self, shared: Shared) -> ProtocolError | None:
        for name, wanted in self._layout.facts().items():
            got = shared.facts.get(name)
            if got != wanted:
                return ProtocolError(
                    f"rank {self._rank} of engine {self._engine_id!r} wants an arena with {name} "
                    f"{wanted}, the other ranks have one with {got}; start all ranks with the same "
                    "model, parallelism and cpu_bytes_to_use"
                )
        return None

    def _check_time(self, deadline: Deadline) -> None:
        if deadline.expired:
            raise StallError(
                f"rank {self._rank} of {self._layout.num_ranks} of engine {self._engine_id!r} "
                f"found no arena within {deadline.seconds:g} s: rank 0, which makes it, has not "
                "got that far, or runs on another host or as another user",
                seconds=deadline.seconds,
            )

    def _address_of(self, rank: int) -> str:
        # Whatever an engine id consists of; that it really is this one, the exporter checks.
        name = xxhash.xxh3_64_hexdigest(self._engine_id.encode())
        return f"unix:@wtransfer-arena-{os.geteuid()}-{name}-{rank}"


def _holder_of(address: str) -> str:
    """Return the process that listens somewhere, as far as it can be known."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_ASK_S)
        try:
            connection.connect(parse_address(address).target)
            return str(peer_credentials(connection)[0])
        except OSError:
            return "(unknown)"
