"""What the ranks of a trainer say to each other, beside the collectives that move the shards.

P is the rank that publishes, R any other that holds a part of its weights. One round:

1. R `Arrive`, with a digest of how its tensors lie; P `Begin`, once its own round is under way.
2. Where the digests differ: P `Describe`, R `Description`, and P ends the round with the first
   tensor that differs.
3. P `Pass`: both begin to iterate what they hold. R `Ready` when it has the next shard in hand and
   has checked it; P `Gather` once all have; then, and only then, all enter the collective.
4. P `Packed`: nothing more is gathered, and R may go on with its own affairs. P `End`, for better
   or worse. Who arrives between the two has come for the next round.

R may say `Failed` at any point; P then ends the round. Nobody is ever in a collective that another
has not said to enter, so the trainer's own group stays in step whatever fails.
"""

from __future__ import annotations

import msgspec

from wtransfer.manifest import MAX_PIECES
from wtransfer.transport.framing import MIB, Codec, MessageType
from wtransfer.weight_sync.messages import ErrorInfo  # noqa: TC001  # fields of messages


class Arrive(msgspec.Struct, frozen=True):
    """R: my program has called `TrainerRank.publish`."""

    call: int
    """Which call of that process; answers name it."""
    rank: int
    """Rank in torch's default group."""
    version: str
    """Label, which must be the publisher's."""
    layout: str
    """Digest of how the tensors lie."""


class Begin(msgspec.Struct, frozen=True):
    """P: the round of that version is under way."""

    call: int
    """Call."""


class Describe(msgspec.Struct, frozen=True):
    """P: your layout is not mine; say what it is."""

    call: int
    """Call."""


class Description(msgspec.Struct, frozen=True):
    """R: how my tensors lie."""

    call: int
    """Call."""
    lines: list[tuple[str, str]]
    """Name and the rest, in order."""

    def num_entries(self) -> int:
        """Entries, for the frame's limit."""
        return len(self.lines)


class Pass(msgspec.Struct, frozen=True):
    """P: begin to iterate, from the first tensor on."""

    call: int
    """Call."""
    number: int
    """Which pass of the round."""


class Ready(msgspec.Struct, frozen=True):
    """R: I have my shard of a tensor in hand, and it is as it should be."""

    call: int
    """Call."""
    number: int
    """Pass."""
    index: int
    """Tensor, by its place in the metadata."""


class Gather(msgspec.Struct, frozen=True):
    """P: everybody is ready; enter the collective."""

    call: int
    """Call."""
    number: int
    """Pass."""
    index: int
    """Tensor."""


class Packed(msgspec.Struct, frozen=True):
    """P: the weights may be changed again."""

    call: int
    """Call."""


class End(msgspec.Struct, frozen=True):
    """P: the round is over."""

    call: int
    """Call."""
    error: ErrorInfo | None = None
    """Why it failed."""
    fingerprint: str = ""
    """Identity of what was published."""


class Failed(msgspec.Struct, frozen=True):
    """R: I cannot go on."""

    call: int
    """Call."""
    error: ErrorInfo
    """Why."""


RANK_CODEC = Codec(
    [
        MessageType(64, Arrive),
        MessageType(65, Begin),
        MessageType(66, Describe),
        MessageType(67, Description, max_nbytes=64 * MIB, max_entries=MAX_PIECES),
        MessageType(68, Pass),
        MessageType(69, Ready),
        MessageType(70, Gather),
        MessageType(71, Packed),
        MessageType(72, End),
        MessageType(73, Failed),
    ]
)
"""Every message between ranks with its limits."""
