"""One number of the bench, with its goal, its spread and its neighbours."""

from __future__ import annotations

import operator
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from wtransfer.bench.lab import Lab

_RELATIONS = {">=": operator.ge, "<=": operator.le}


class Spread(NamedTuple):
    """Several measurements of one thing."""

    median: float
    """The one in the middle."""
    low: float
    """The least."""
    high: float
    """The greatest."""

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one measurement."""
        known = list(values)
        return cls(statistics.median(known), min(known), max(known))

    def map(self, function: Callable[[float], float]) -> Spread:
        """Return the spread of a monotonic function of each measurement."""
        ends = sorted((function(self.low), function(self.high)))
        return Spread(function(self.median), *ends)


class Goal(NamedTuple):
    """What a number should be."""

    relation: Literal[">=", "<="]
    """On which side of it."""
    value: float
    """Of what."""

    def reached_by(self, value: float) -> bool:
        """Whether a number is there."""
        return bool(_RELATIONS[self.relation](value, self.value))

    def __str__(self) -> str:
        return f"{self.relation} {self.value:g}"


@dataclass(frozen=True)
class Row:
    """A number, measured."""

    name: str
    """Stable name, for ``--only`` and ``--json``."""
    what: str
    """In words."""
    unit: str
    """Of the value; empty for a ratio."""
    spread: Spread
    """Median, least and greatest."""
    goal: Goal | None = None
    """None: there is none, the number stands beside others."""
    beside: dict[str, float] = field(default_factory=dict)
    """Neighbours, measured in the same run; names end in their unit where they have one."""
    stages: dict[str, float] = field(default_factory=dict)
    """Median seconds of what a round consists of."""
    limit: float | None = None
    """What no single measurement may exceed."""
    note: str = ""
    """What must be known to read it."""

    @property
    def reached(self) -> bool | None:
        """Whether the goal is; None where there is none."""
        if self.goal is None:
            return None
        within = self.limit is None or self.spread.high <= self.limit
        return within and self.goal.reached_by(self.spread.median)


@dataclass(frozen=True)
class Failed:
    """A number that could not be measured."""

    name: str
    """Its name."""
    what: str
    """In words."""
    error: str
    """Why."""


class Measure(Protocol):
    """What measures one row. A sister of `bench weights` brings measures of its own."""

    @property
    def name(self) -> str:
        """Stable name of the row."""
        ...

    @property
    def what(self) -> str:
        """The number in words."""
        ...

    def run(self, lab: Lab) -> Row:
        """Measure.

        Args:
            lab: Plays scenes; one that several rows need is played once.

        Raises:
            WTransferError: A scene failed.
        """
        ...
