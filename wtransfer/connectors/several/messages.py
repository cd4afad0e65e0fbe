"""What the two sides of ``MultiConnector`` tell each other: what each child tells, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wtransfer.connectors.interface import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass
class SeveralMetadata(KVConnectorMetadata):
    """What the workers do in a step."""

    children: list[KVConnectorMetadata] = field(default_factory=list)
    """Of each child."""
    loading: dict[str, int] = field(default_factory=dict)
    """Requests whose load begins and outlasts the step, with the child that loads."""
    holding: dict[str, list[int]] = field(default_factory=dict)
    """Requests that have ended, with the children for which their blocks stay."""
    ended_loading: set[str] = field(default_factory=set)
    """Those of `holding` that ended while they were loaded: they are named as received."""
    begun: set[str] = field(default_factory=set)
    """New requests: what was said under their names before is not about them."""


@dataclass
class SeveralSaid(KVConnectorWorkerMetadata):
    """What a worker, or all of them together, say after a step."""

    children: list[KVConnectorWorkerMetadata | None] = field(default_factory=list)
    """Of each child."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Self:
        """Add what another worker has said; return this object."""
        assert isinstance(other, SeveralSaid)
        assert len(self.children) == len(other.children)
        self.children = [
            theirs if ours is None else ours if theirs is None else ours.aggregate(theirs)
            for ours, theirs in zip(self.children, other.children, strict=True)
        ]
        return self


@dataclass
class SeveralHandshake(KVConnectorHandshakeMetadata):
    """What workers of other instances must know."""

    children: list[KVConnectorHandshakeMetadata | None] = field(default_factory=list)
    """Of each child."""
