"""What scheduler and workers tell each other: plain data, also where they share a process."""

from __future__ import annotations

from typing import Any

import msgspec

from wtransfer.weights import WeightsStamp  # noqa: TC001  (msgspec reads it)


class Span(msgspec.Struct, frozen=True):
    """Consecutive tokens of one request that are computed in a step."""

    request_id: str
    """Whose."""
    tokens: list[int]
    """The tokens."""
    start: int
    """Position of the first."""
    block_ids: list[int]
    """All blocks of the request, in order."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step, the same for all ranks."""

    stamps: list[WeightsStamp] | None = None
    """What each rank must compute with for the spans to be right: the blocks that they build on
    were computed with it. None: nothing is known yet, and there are no spans."""
    spans: list[Span] = []
    """What the model computes."""
    metadata: Any = None
    """What the connector's scheduler side tells its worker side, made plain; None: there is no
    connector."""
    loads_first: bool = False
    """Whether the connector's loads must have come before the spans are computed."""
    finished_req_ids: set[str] = set()
    """Requests that have ended since the last step."""


class Said(msgspec.Struct, frozen=True):
    """What one rank's side of the connector says after a step."""

    finished_sending: set[str] = set()
    """Requests that it has sent."""
    finished_recving: set[str] = set()
    """Requests that it has received."""
    invalid_block_ids: set[int] = set()
    """Blocks that it could not load."""
    metadata: Any = None
    """What it tells the scheduler's side."""


class StepResult(msgspec.Struct, frozen=True):
    """What came of a step on one rank."""

    stamp: WeightsStamp | None
    """What the rank computed with; None: its weights have no name, and nothing was computed."""
    executed: bool
    """Whether the spans were computed. If not, nothing of theirs was written that counts."""
    tokens: dict[str, int]
    """The token that follows each span."""
    said: Said | None = None
    """What the connector says; None: there is none."""


class Ready(msgspec.Struct, frozen=True):
    """The first message of a rank."""

    handshake: Any = None
    """What its side of the connector tells others; None: nothing."""
