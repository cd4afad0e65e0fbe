"""The fence against stale KV, for connectors: what each side knows of the weights.

The worker's side holds the weights, and has the last word. The scheduler's side hears of them, late
perhaps, and notes what a request begins with; what it plans carries that note. So a worker may find
that a plan is for other weights than it has, and then does nothing: a load is a miss, a save is
left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import Self

from wtransfer.connectors.interface import KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata
from wtransfer.weights import RankStamps, instance_fingerprint, known_stamps, process_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wtransfer.weights import ProcessWeights, Stamps, WeightsStamp

Stamp = tuple[str, int]
"""A `WeightsStamp` as it travels."""


@dataclass
class WorkerStamps(KVConnectorWorkerMetadata):
    """What workers compute with, for the scheduler's side; a base for those that say more."""

    stamps: dict[int, Stamp | None] = field(default_factory=dict)
    """By rank; None while a rank's weights are changing."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> Self:
        """Add what another worker has said; return this object."""
        assert isinstance(other, WorkerStamps)
        self.stamps |= other.stamps
        return self


@dataclass
class StampedHandshake(KVConnectorHandshakeMetadata):
    """What a worker computes with before the first step; a base for those that say more."""

    stamp: Stamp | None = None
    """Of its rank."""


def plain_stamps(stamps: Stamps | None) -> list[Stamp]:
    """Return stamps as they travel; of None, of no rank: nothing fits those."""
    return [(each.fingerprint, each.epoch) for each in stamps or ()]


def handshake_stamps(
    metadata: Mapping[int, KVConnectorHandshakeMetadata],
) -> dict[int, Stamp | None]:
    """Return what workers compute with before the first step, of those that say it."""
    said = {rank: each for rank, each in metadata.items() if isinstance(each, StampedHandshake)}
    return {rank: each.stamp for rank, each in said.items()}


class SchedulerFence:
    """What the scheduler's side knows of the weights.

    Args:
        num_ranks: Workers of the instance.
    """

    def __init__(self, num_ranks: int) -> None:
        self.now: Stamps | None = None
        """What the ranks compute with, as far as is known; None: not of all of them."""
        self._heard = RankStamps(num_ranks)
        self._began: dict[str, Stamps | None] = {}

    def hear(self, stamps: Mapping[int, Sequence[str | int] | None]) -> None:
        """Take what workers have said."""
        self._heard.hear(stamps)
        self.now = known_stamps(self._heard.now)

    def begin(self, request_id: str) -> str | None:
        """Note what a request begins with, that has no blocks.

        It may have had some, under other weights, and have lost them: it begins anew, and whole.

        Returns:
            The weights under which its blocks are named; None: it is out, and finds nothing.
        """
        self._began[request_id] = self.now
        return self.fingerprint(request_id)

    def settle(self, request_id: str) -> None:
        """Hear that a request has got blocks, whether or not it was asked about before."""
        self._began.setdefault(request_id, self.now)

    def stamps(self, request_id: str) -> Stamps | None:
        """Return what a request began with; None if that is not what the ranks compute with now."""
        began = self._began.get(request_id)
        return None if began is None or began != self.now else began

    def fingerprint(self, request_id: str) -> str | None:
        """Return the identity of `stamps`."""
        stamps = self.stamps(request_id)
        return None if stamps is None else instance_fingerprint(stamps)

    def forget(self, request_id: str) -> None:
        """Hear that a request has ended."""
        self._began.pop(request_id, None)


class WorkerFence:
    """What one worker's side knows of the weights, which it holds.

    Args:
        rank: Its rank.
        weights: What this process computes with.
    """

    def __init__(self, rank: int, weights: ProcessWeights = process_weights) -> None:
        self.rank = rank
        """Its rank."""
        self._weights = weights

    def stamp(self) -> WeightsStamp | None:
        """Return what this process computes with at this moment; None while that changes."""
        return self._weights.stamp()

    def admits(self, stamps: Sequence[Sequence[str | int]]) -> bool:
        """Return whether something that was planned for these weights may be done now."""
        known, now = known_stamps(stamps), self.stamp()
        if known is None or now is None or self.rank >= len(known):
            return False
        return known[self.rank] == now

    def say(self) -> dict[int, Stamp | None]:
        """Return what the scheduler's side shall hear."""
        stamp = self.stamp()
        return {self.rank: None if stamp is None else (stamp.fingerprint, stamp.epoch)}
