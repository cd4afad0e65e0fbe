"""What the two sides of ``SharedStorageConnector`` tell each other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wtransfer.connectors.fenced import WeightHandshake, WeightReport
from wtransfer.connectors.interface import KVConnectorMetadata

if TYPE_CHECKING:
    from typing_extensions import Self

    from wtransfer.connectors.interface import KVConnectorWorkerMetadata
    from wtransfer.weights import WeightVersion, WeightVersions


@dataclass
class Transfer:
    """Blocks of one request that go to or come from the folder."""

    request_id: str
    """The request."""
    shelf: str
    """Folder of the blocks of its model and its weights."""
    names: list[bytes]
    """Name of each block."""
    block_ids: list[int]
    """Where each is in the cache."""
    versions: WeightVersions
    """Weights that the request began with, by rank; empty where that is not known any more."""
    first: int = 0
    """Which block of the request the first of them is."""


@dataclass
class StorageMetadata(KVConnectorMetadata):
    """What the workers do in a step."""

    step: int = 0
    """Number of the step."""
    loads: list[Transfer] = field(default_factory=list)
    """Blocks to load."""
    saves: list[Transfer] = field(default_factory=list)
    """Blocks to store once the step has computed them."""
    parting: list[Transfer] = field(default_factory=list)
    """Blocks to store of requests that have ended, which are then named as sent."""


@dataclass
class StorageHandshake(WeightHandshake):
    """What a worker says before the first step."""

    geometry: bytes = b""
    """How its part of a block is laid out: `BlockGeometry.digest`."""


@dataclass
class StorageSaid(WeightReport):
    """What a worker, or all of them together, say after a step."""

    steps: dict[int, int] = field(default_factory=dict)
    """By rank: the last step that is done."""
    saved: dict[int, int] = field(default_factory=dict)
    """By rank: the last step that counted, so that its blocks were stored."""
    began: dict[int, WeightVersion | None] = field(default_factory=dict)
    """By rank: what it computed with when the last step began."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Self:
        """Add what another worker has said; return this object."""
        assert isinstance(other, StorageSaid)
        self.steps |= other.steps
        self.saved |= other.saved
        self.began |= other.began
        return super().aggregate(other)
