"""Metadata that both sides of the offloading connector exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wtransfer.connectors.fenced import WeightHandshake, WeightReport
from wtransfer.connectors.interface import KVConnectorMetadata

if TYPE_CHECKING:
    from wtransfer.connectors.interface import KVConnectorWorkerMetadata
    from wtransfer.specs.interface import GPULoadStoreSpec, LoadStoreSpec
    from wtransfer.weight_version import WeightVersions


@dataclass
class OffloadingHandshake(WeightHandshake):
    """Message of a worker before the first step."""

    layout: bytes = b""
    """Digest of its cache layout: blocks of other layouts have other keys."""


@dataclass
class Job:
    """A copy between the cache and the tier."""

    job_id: int
    """Identity."""
    request_id: str
    """Request for which the job is done."""
    blocks: GPULoadStoreSpec
    """Place in the cache."""
    tier: LoadStoreSpec
    """Place in the tier."""
    versions: WeightVersions
    """Version that each rank must compute with for the job to be done there."""


@dataclass
class OffloadingMetadata(KVConnectorMetadata):
    """Work of every worker in one step."""

    step: int = 0
    """Number of the step."""
    loads: list[Job] = field(default_factory=list)
    """Jobs begun in this step; their requests wait for them."""
    stores: list[Job] = field(default_factory=list)
    """Jobs begun after the forward pass, if the step counts."""
    gone: dict[str, list[int]] = field(default_factory=dict)
    """Blocks, by request, that are to be loaded and have gone meanwhile."""
    preempted: list[str] = field(default_factory=list)
    """Requests whose blocks are others' from this step on."""
    ended: list[str] = field(default_factory=list)
    """Requests that have ended, and whose blocks stay until their jobs have ended."""
    overdue: list[int] = field(default_factory=list)
    """Jobs that the spec has not reported in time: no request waits for them any more."""


@dataclass
class Outcome:
    """Outcome of a job on one rank."""

    job_id: int
    """Identity of the job."""
    success: bool
    """True if the job was done."""
    nbytes: int = 0
    """Bytes moved."""


@dataclass
class OffloadingWorkerMetadata(WeightReport):
    """Report of workers after a step."""

    outcomes: dict[int, list[Outcome]] = field(default_factory=dict)
    """Jobs that have ended, by rank."""
    steps: dict[int, int] = field(default_factory=dict)
    """Step that the report follows, by rank."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> OffloadingWorkerMetadata:
        """Add another worker's report; return this object."""
        super().aggregate(other)
        assert isinstance(other, OffloadingWorkerMetadata)
        self.outcomes |= other.outcomes
        self.steps |= other.steps
        return self
