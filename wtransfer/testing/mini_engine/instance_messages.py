"""What an instance and its user tell each other."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from wtransfer.testing.mini_engine.build import HostSettings  # noqa: TC001  (msgspec reads it)

# -- to the instance ------------------------------------------------------------------------------


class Begin(msgspec.Struct, frozen=True, tag=True):
    """The first message: what to be."""

    settings: HostSettings
    """Of the host."""
    ranks_apart: bool
    """Whether ranks are processes of their own, also where there is only one."""


class Submit(msgspec.Struct, frozen=True, tag=True):
    """Serve a request; an `Answer` or a `Refusal` follows."""

    number: int
    """Which, for the answer."""
    prompt: list[int]
    """Its tokens."""
    max_new_tokens: int
    """How many are generated."""
    kv_transfer_params: dict[str, Any] | None
    """What the connector is told of it."""
    sent_at: float
    """`time.monotonic` when it was submitted: processes of one host share it."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request before its time; its `Answer` follows, unless it has been given already."""

    number: int
    """Which."""


class ForgetCache(msgspec.Struct, frozen=True, tag=True):
    """Forget what the blocks that nobody holds contain; nothing follows."""


class AskNumbers(msgspec.Struct, frozen=True, tag=True):
    """Say what was done so far; `Numbers` follow."""


Order: TypeAlias = Submit | Abort | ForgetCache | AskNumbers

# -- from the instance ----------------------------------------------------------------------------


class SpawnRank(msgspec.Struct, frozen=True, tag=True):
    """Start the process of a rank: the user knows how."""

    address: str
    """What it is given."""


class Serving(msgspec.Struct, frozen=True, tag=True):
    """It is ready for requests."""


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """A request cannot be served."""

    number: int
    """Which."""
    reason: str
    """Why."""


class Answer(msgspec.Struct, frozen=True, tag=True):
    """What came of a request."""

    number: int
    """Which."""
    state: str
    """``finished``, ``aborted`` or ``failed``."""
    tokens: list[int]
    """What was generated."""
    kv_transfer_params: dict[str, Any] | None
    """What the connector says to the instance that goes on with it."""
    counts: dict[str, int]
    """What the scheduler has counted while it was served: its own, if it was alone."""
    total_s: float
    """Seconds from the submission to the end."""
    first_token_s: float | None
    """Seconds from the submission to the end of the step that gave the first token."""
    load_s: float | None
    """Seconds that it waited for keys and values while others were served; None: it did not."""
    error: str | None = None
    """Why it has failed."""


class Numbers(msgspec.Struct, frozen=True, tag=True):
    """What was done so far."""

    scheduler: dict[str, int]
    """By the scheduler."""
    connector: dict[str, float]
    """By the connector's scheduler side."""
    workers: list[dict[str, float]]
    """By its worker sides, in order of rank."""


Reply: TypeAlias = SpawnRank | Serving | Refusal | Answer | Numbers

BEGINNINGS: msgspec.msgpack.Decoder[Begin] = msgspec.msgpack.Decoder(Begin)
"""Reads the first message."""
ORDERS: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)
"""Reads those that follow."""
REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
"""Reads what the instance says."""
