"""What a worker of D and a worker of P say to each other, over an authenticated channel.

D dials. P says `Card`, unasked. From then on D says `Ask`, P says `Found`, D copies and says
`Done`; at the end `Over`. A number that is not known is counted and changes nothing.
"""

from __future__ import annotations

import msgspec

from wtransfer.blocks import BlockGeometry
from wtransfer.transport.framing import Codec, MessageType

MAX_ASKED = 4096
"""Blocks that are asked for at once."""
_MAX_REQUEST_NBYTES = 4 * 1024  # of `parameters.MAX_TEXT` characters


class Card(msgspec.Struct, frozen=True):
    """Who has blocks, and how they are laid out. The first message."""

    engine_id: str
    """The instance."""
    rank: int
    """Its worker."""
    block_size: int
    """Tokens per block."""
    pages: tuple[tuple[str, int], ...]
    """As `BlockGeometry.pages`."""
    num_ranks: int
    """Among how many ranks heads are divided."""
    model: str
    """The model."""
    facts: dict[str, int | str]
    """How to get at the bytes; depends on the kind of connector."""

    @property
    def geometry(self) -> BlockGeometry:
        """How blocks are laid out there."""
        return BlockGeometry(self.block_size, self.pages, self.num_ranks, self.model)


class Ask(msgspec.Struct, frozen=True):
    """Lease blocks."""

    number: int
    """Of this question, on this connection."""
    request_id: str
    """Request whose blocks they are, as P knows it."""
    names: list[bytes]
    """The blocks."""

    def num_entries(self) -> int:
        """Return how many there are."""
        return len(self.names)


class Found(msgspec.Struct, frozen=True):
    """Say where they stand."""

    number: int
    """Of the question."""
    slots: list[int]
    """Slot of each; -1: not here."""

    def num_entries(self) -> int:
        """Return how many there are."""
        return len(self.slots)


class Done(msgspec.Struct, frozen=True):
    """Say that what was found is not read any more."""

    number: int
    """Of the question."""


class Over(msgspec.Struct, frozen=True):
    """Say that nothing more is wanted of a request: P need not keep its blocks."""

    request_id: str
    """The request, as P knows it."""


CODEC = Codec(
    [
        MessageType(1, Card),
        MessageType(2, Ask, max_entries=MAX_ASKED),
        MessageType(3, Found, max_entries=MAX_ASKED),
        MessageType(4, Done, max_nbytes=64),
        MessageType(5, Over, max_nbytes=_MAX_REQUEST_NBYTES + 64),
    ]
)
"""The messages, with their limits."""
