"""Which rows ``bench weights`` has, in order."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.bench.rows.dead_peer import DeadPeer
from wtransfer.bench.rows.many_small import ManySmall
from wtransfer.bench.rows.more_workers import MoreWorkers
from wtransfer.bench.rows.other_ways import BUCKETED, BY_TENSOR, CHECKPOINT, Times
from wtransfer.bench.rows.serving_gaps import CommitPause, TransferGap
from wtransfer.bench.rows.staging_memory import StagingMemory
from wtransfer.bench.rows.whole_round import CpuTime, WholeRound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer.bench.row import Measure
    from wtransfer.bench.settings import Settings


def measures(settings: Settings) -> Iterator[Measure]:
    """Yield what measures each row that makes sense with these settings."""
    engine = settings.engine
    for verified in (True, False):
        for commit in settings.commits:
            yield WholeRound(commit, verified, engine)
    for commit in settings.commits:
        yield CpuTime(commit, engine)
    for way in (BY_TENSOR, BUCKETED, CHECKPOINT):
        yield Times(way, engine)
    yield ManySmall(engine)
    if engine == "shm":
        yield from _of_shared_memory(settings)


def _of_shared_memory(settings: Settings) -> Iterator[Measure]:
    """Yield the rows whose goals are those of shared memory only."""
    if max(settings.workers) > settings.base_workers:
        yield MoreWorkers(max(settings.workers))
    yield StagingMemory()
    yield TransferGap()
    yield CommitPause()
    yield DeadPeer()
