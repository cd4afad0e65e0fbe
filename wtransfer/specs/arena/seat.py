"""A rank's seat at the arena: its part, with the memory taken, and the way there for others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.specs.arena.arena import ArenaPart, make_segment, memory_errors
from wtransfer.specs.arena.meeting import Meeting

if TYPE_CHECKING:
    from wtransfer.specs.arena.layout import ArenaLayout


class Seat:
    """One rank's seat. A rank that is alone makes an arena for itself and meets nobody.

    Args:
        engine_id: Identity of the serving instance.
        rank: Of this process.
        layout: Of the arena.
        deadline_s: Longest wait for the other ranks, in seconds.

    Raises:
        StagingMemoryError: There is not enough memory; with the numbers.
        OffloadingOptionError: There are several ranks and no engine id to meet by.
        AddressInUseError: Another process is this rank of an engine with this id.
        ProtocolError: The ranks do not agree on the arena; the field is named.
        StallError: No other rank has the arena, and this one is not to make it.

    Cost: 0.5 s per GiB of this rank, once.
    """

    def __init__(
        self, engine_id: str, rank: int, layout: ArenaLayout, deadline_s: float = 30.0
    ) -> None:
        self.name = f"rank {rank} of engine {engine_id!r}"
        """Whose seat it is, for errors."""
        self._meeting = (
            Meeting(engine_id, rank, layout, deadline_s) if layout.num_ranks > 1 else None
        )
        try:
            with memory_errors(layout, self.name):
                segment = self._meeting.arena() if self._meeting else make_segment(layout)
                self.part = ArenaPart(segment, layout, rank)
                """This rank's part of the arena."""
                self.part.take_memory()
        except BaseException:
            self._leave()
            raise

    def close(self) -> None:
        """Let go of the arena, which stays with the other ranks; a second call does nothing."""
        self._leave()
        self.part.let_go()

    def _leave(self) -> None:
        if self._meeting is not None:
            self._meeting.close()
