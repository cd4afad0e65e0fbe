"""What the two sides of one instance tell each other. Plain data: hosts move it without pickle."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wtransfer.connectors.fenced import WeightHandshake, WeightReport
from wtransfer.connectors.interface import KVConnectorMetadata, KVConnectorWorkerMetadata

if TYPE_CHECKING:
    from wtransfer.weights import Stamps


@dataclass
class Place:
    """Where the blocks of a request are."""

    engine_id: str
    """Instance that has them."""
    request_id: str
    """The request there."""
    addresses: list[str]
    """Where its workers listen, in order of rank."""
    tokens: list[str]
    """What to prove to know there, in order of rank; none: what the options say."""

    def of(self, rank: int) -> tuple[str, str]:
        """Return where one of its workers listens, and what to prove to know there."""
        return self.addresses[rank], self.tokens[rank] if rank < len(self.tokens) else ""


@dataclass
class Load:
    """Blocks that a request waits for."""

    request_id: str
    """The request here."""
    place: Place
    """Where they are."""
    names: list[bytes]
    """Their names."""
    block_ids: list[int]
    """Where they belong."""
    versions: Stamps
    """What the request began with; empty: not what the workers have now."""


@dataclass
class Save:
    """Blocks of a request that are full at the end of this step."""

    request_id: str
    """The request."""
    names: list[bytes]
    """Their names."""
    block_ids: list[int]
    """Where they are."""
    versions: Stamps
    """What the request began with."""


@dataclass
class RelayMetadata(KVConnectorMetadata):
    """What workers have to do in one step."""

    saves: list[Save] = field(default_factory=list)
    """What to put on the shelf."""
    loads: list[Load] = field(default_factory=list)
    """What to fetch."""
    ended: list[str] = field(default_factory=list)
    """Requests that are gone while they wait: their loads are of no use any more."""
    unwanted: list[Place] = field(default_factory=list)
    """What was kept for requests that do not come for it."""
    leave: list[str] = field(default_factory=list)
    """Requests whose blocks are to stay on the shelf for the time of a lease from now on."""
    drop: list[str] = field(default_factory=list)
    """Requests for whose blocks nobody comes."""
    withdrawn: list[bytes] = field(default_factory=list)
    """Blocks that were saved and are not what their names say: a load into them had failed."""


@dataclass
class RelayHandshake(WeightHandshake):
    """Where one worker listens."""

    address: str = ""
    """Its address; empty: it hands nothing on."""
    token: str = ""
    """What to prove to know there; empty: what the options say."""


@dataclass
class RelaySaid(WeightReport):
    """What workers say after a step."""

    not_saved: set[bytes] = field(default_factory=set)
    """Blocks that any of them was to save in a step that did not count."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> RelaySaid:
        """Add what another worker has said; return this object."""
        super().aggregate(other)
        assert isinstance(other, RelaySaid)
        self.not_saved |= other.not_saved
        return self
