"""Keep KV cache of old weights from being used: the one state machine behind every connector.

The worker holds the weights and decides: `WorkerFence` compares each job with the weight version
that the process computes with at that moment. The scheduler learns of a commit from the workers'
reports, possibly late: `SchedulerFence` notes the versions that a request began with. A job carries
these versions to the worker.

W is the worker's side, S the scheduler's:

| on | event                              | effect                                                 |
| W  | weights are bound, a commit ends   | a version (fingerprint, epoch); the epoch is new, also |
|    |                                    | on the way back to earlier weights                     |
| W  | a commit begins                    | no version: jobs are refused until it ends             |
| S  | `update`: ranks report the same    | nothing                                                |
| S  | `update`: a rank reports another   | `current` is replaced, or None while a rank has none;  |
|    | version, or none                   | every request that has begun is stale for good         |
| S  | `update`: a report is overtaken    | ignored: the epochs of one process only grow           |
| S  | `update` fails                     | the fence is closed: `current` is None for good        |
| S  | `begin`: a request has no blocks   | it has the current versions; if None, it is stale      |
| S  | `ensure_begun`: it gets blocks     | as `begin`, unless it has begun                        |
| S  | a load or store is planned         | it carries the request's versions, and its keys their  |
|    |                                    | fingerprint; a stale request loads and stores nothing  |
| W  | a load or store is submitted       | it fails unless `admits`, and touches no byte          |
| W  | a load is finished                 | it fails unless `admits`: its blocks are computed      |
| W  | a store is finished, however late  | kept: a block belongs to its store until then, so its  |
|    |                                    | bytes are of the weights in its key                    |
| S  | a load has failed                  | its keys are invalidated (`load_failed`, else          |
|    |                                    | `InvalidatedKeys`) if its versions are current; else   |
|    |                                    | the blocks may be intact                               |
| S  | `forget`: a request has ended      | its versions are dropped; its jobs keep theirs         |

Why no order of events serves stale KV:

* Worker first. The scheduler still plans for the old versions; the worker refuses those jobs.
* Scheduler first: one rank reports before another rank's step ends. Requests that had begun are
  stale. A new one has the new version of the one rank and the old one of the other, which refuses
  its jobs after its own commit; blocks that both compute before are named by both versions
  together.
* Commit and way back between two reports. The fingerprint is as before, the epoch is not, and both
  sides compare both.
* A commit while a load runs. The load is compared again when it is finished; only then does its
  request compute.
* A commit while a step computes. A host commits between two steps, and does not count a step that
  was planned for other versions. A host also empties the model's own prefix cache at a commit.

A missed commit costs a miss at worst: keys contain the fingerprint of all ranks.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import TYPE_CHECKING

import xxhash

from wtransfer.kv.keys import FENCE_NBYTES, OffloadKey
from wtransfer.weight_version import (
    COUNT_BITS,
    WeightVersion,
    instance_fingerprint,
    known_versions,
    process_weights,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from wtransfer.weight_version import ProcessWeights, WeightVersions

logger = logging.getLogger(__name__)


class SchedulerFence:
    """The scheduler's side: which weight versions a request began with, and whether they are stale.

    Args:
        num_ranks: Workers of the instance.
    """

    def __init__(self, num_ranks: int) -> None:
        self.current: WeightVersions | None = None
        """Versions of all ranks; None: not all are known. A change makes another object."""
        self._fingerprint = ""
        # By rank.
        self._reported: list[WeightVersion | None] = [None] * num_ranks
        self._epochs = [-1] * num_ranks
        self._began: dict[str, WeightVersions | None] = {}
        self._is_closed = False

    def update(self, reported: Mapping[int, Sequence[str | int] | None]) -> bool:
        """Take the reports of ranks: the version of each, or None while its weights change.

        Returns:
            True if the instance computes with other weights than were last known.
        """
        try:
            for rank, report in reported.items():
                # On the wire a version may have become a plain list.
                version = None if report is None else WeightVersion(*report)  # type: ignore[arg-type]
                if version is not None:
                    last = self._epochs[rank]
                    # Another process is believed: the rank was restarted.
                    is_same_process = version.epoch >> COUNT_BITS == last >> COUNT_BITS
                    if is_same_process and version.epoch < last:
                        continue
                    self._epochs[rank] = version.epoch
                self._reported[rank] = version
            versions = None if self._is_closed else known_versions(self._reported)
        except Exception:
            if not self._is_closed:
                logger.exception(
                    "the KV fence failed on the report %r and stays closed: no KV block is loaded "
                    "or stored from now on",
                    reported,
                )
            self._is_closed, versions = True, None
        if versions == self.current:
            return False
        self.current = versions
        if versions is None:
            return False
        before, self._fingerprint = self._fingerprint, instance_fingerprint(versions)
        return before not in ("", self._fingerprint)

    def begin(self, request_id: str) -> str | None:
        """Let a request that has no blocks begin with the current versions.

        Returns:
            As `fingerprint`.
        """
        self._began[request_id] = self.current
        return self.fingerprint(request_id)

    def ensure_begun(self, request_id: str) -> None:
        """Let a request that gets blocks begin with the current versions, unless it has begun."""
        self._began.setdefault(request_id, self.current)

    def versions(self, request_id: str) -> WeightVersions | None:
        """Return the versions that a request began with; None if it is stale or has not begun."""
        began = self._began.get(request_id)
        # By identity: equal versions with unknown ones in between are another object.
        return began if began is self.current else None

    @property
    def current_fingerprint(self) -> str | None:
        """Identity of `current`: the weights under which blocks are named now."""
        return None if self.current is None else self._fingerprint

    def fingerprint(self, request_id: str) -> str | None:
        """Return the identity of `versions`: the weights under which its blocks are named."""
        return None if self.versions(request_id) is None else self._fingerprint

    def forget(self, request_id: str) -> None:
        """Drop a request that has ended."""
        self._began.pop(request_id, None)


class WorkerFence:
    """The worker's side, which holds the weights and so decides.

    Args:
        rank: Rank of the worker.
        weights: Weights that this process computes with.
    """

    def __init__(self, rank: int, weights: ProcessWeights = process_weights) -> None:
        self.rank = rank
        self._weights = weights

    def version(self) -> WeightVersion | None:
        """Return the version that this process computes with now; None while weights change."""
        return self._weights.version()

    def admits(self, versions: Sequence[Sequence[str | int]]) -> bool:
        """Return whether a job that was planned for these versions, by rank, may be done now."""
        known = known_versions(versions)
        return known is not None and self.rank < len(known) and known[self.rank] == self.version()

    def report(self) -> dict[int, WeightVersion | None]:
        """Return this rank's part of the argument of `SchedulerFence.update`."""
        return {self.rank: self.version()}


class InvalidatedKeys:
    """Replace the keys of blocks that could not be loaded.

    The manager of a tier does not learn that a worker found a block damaged: it goes on to answer
    *hit* to look-ups and *kept already* to stores. Under another key the block is not looked up any
    more, and an intact one can be stored.
    """

    MAX_KEYS = 65_536
    """Keys that are remembered. The oldest are dropped, and looked up once more."""

    def __init__(self) -> None:
        # No plain dict: finding its first entry takes longer with every entry deleted before it.
        self._replaced: OrderedDict[OffloadKey, OffloadKey] = OrderedDict()

    def add(self, keys: Iterable[OffloadKey]) -> int:
        """Invalidate keys under which a load has failed; return how many were valid."""
        # A key that was replaced before stays so: its replacement may be intact by now.
        new = [key for key in keys if key not in self._replaced]
        for key in new:
            self._replaced[key] = OffloadKey(xxhash.xxh3_128_digest(key) + key[FENCE_NBYTES:])
        while len(self._replaced) > self.MAX_KEYS:
            self._replaced.popitem(last=False)
        return len(new)

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def valid(self, keys: Iterable[OffloadKey]) -> list[OffloadKey]:
        """Return the keys under which these blocks are kept now."""
        if not self._replaced:
            return list(keys)
        return [self._valid(key) for key in keys]

    def _valid(self, key: OffloadKey) -> OffloadKey:
        while key in self._replaced:
            key = self._replaced[key]
        return key
