"""What scheduler and workers tell each other: plain data, also where they share a process."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from wtransfer.specs.interface import LoadStoreSpec
from wtransfer.weights import WeightsStamp

Place = tuple[str, dict[str, Any]]
"""A `LoadStoreSpec` as plain data: name of its class, and its attributes."""


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


class Job(msgspec.Struct, frozen=True):
    """A copy between the cache and the tier."""

    job_id: int
    """Identity."""
    kind: Literal["load", "store"]
    """From the tier, or into it."""
    blocks: Place
    """Where in the cache."""
    tier: Place
    """Where in the tier."""


class StepPlan(msgspec.Struct, frozen=True):
    """One step, the same for all ranks."""

    stamps: list[WeightsStamp] | None = None
    """What each rank must compute with for the spans to be right: the blocks that they build on
    were computed with it. None: nothing is known yet, and there are no spans."""
    spans: list[Span] = []
    """What the model computes."""
    jobs: list[Job] = []
    """What the offloading worker begins, before that."""


class Finished(msgspec.Struct, frozen=True):
    """How a job ended on one rank."""

    job_id: int
    """Which."""
    success: bool
    """Whether it was done."""
    nbytes: int = 0
    """Bytes moved."""


class StepResult(msgspec.Struct, frozen=True):
    """What came of a step on one rank."""

    stamp: WeightsStamp | None
    """What the rank computed with; None: its weights have no name, and nothing was computed."""
    executed: bool
    """Whether the spans were computed. If not, nothing of theirs was written."""
    tokens: dict[str, int]
    """The token that follows each span."""
    finished: list[Finished]
    """Jobs that have ended since the last step."""


def as_place(spec: LoadStoreSpec) -> Place:
    """Return where blocks are, as plain data."""
    attributes = {
        name: as_place(value) if isinstance(value, LoadStoreSpec) else value
        for name, value in vars(spec).items()
    }
    return type(spec).__name__, attributes


def from_place(place: Place) -> LoadStoreSpec:
    """Return where blocks are. Only classes that this process has loaded are made.

    Raises:
        LookupError: It has loaded none of that name.
    """
    name, attributes = place
    found = _loaded(LoadStoreSpec).get(name)
    if found is None:
        raise LookupError(f"{name!r} is no LoadStoreSpec of this process")
    spec = found.__new__(found)
    for attribute, value in attributes.items():
        setattr(spec, attribute, _value(value, attribute))
    return spec


def _value(value: Any, attribute: str) -> Any:
    if attribute == "stamps":
        return tuple(WeightsStamp(*stamp) for stamp in value)
    return from_place((value[0], value[1])) if attribute == "inner" else value


def _loaded(cls: type[LoadStoreSpec]) -> dict[str, type[LoadStoreSpec]]:
    found = {cls.__name__: cls}
    for sub in cls.__subclasses__():
        found |= _loaded(sub)
    return found
