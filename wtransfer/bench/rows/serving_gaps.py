"""How long readers wait for a token while weights travel, and while they are committed."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, Any

from wtransfer.bench.lab import JOBS
from wtransfer.bench.row import Goal, Row, Spread
from wtransfer.bench.scene import Scene
from wtransfer.bench.sets import TensorSet
from wtransfer.demo.messages import Applied, Ready
from wtransfer.demo.weights import WorkerTrace

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.bench.lab import Lab


@dataclass(frozen=True)
class Gaps:
    """The longest waits for a token in one round, in seconds."""

    quiet_s: float
    """In a time as long as the transfer, just before the round, in which nothing happened."""
    transfer_s: float
    """From publish to the commit."""
    around_commit_s: float
    """From the last token before the commit to the first one after it."""
    commit_s: float
    """What the commit itself took of it."""
    usual_s: float
    """The median of all waits."""


class TransferGap:
    """The longest wait during a transfer against the longest when nothing happens."""

    name = "gap"
    what = "longest gap between two served tokens: during the transfer / in a quiet time as long"

    def run(self, lab: Lab) -> Row:
        """Play rounds into a worker that serves."""
        gaps = _play(lab)
        quiet = Spread.of(each.quiet_s for each in gaps)
        transfer = Spread.of(each.transfer_s for each in gaps)
        return Row(
            self.name,
            self.what,
            "",
            transfer.map(lambda seconds: seconds / quiet.median),
            Goal("<=", 2.0),
            {
                "usual_gap_s": gaps[0].usual_s,
                "longest_quiet_s": quiet.median,
                "longest_in_transfer_s": transfer.median,
                "around_commit_s": Spread.of(each.around_commit_s for each in gaps).median,
            },
        )


class CommitPause:
    """How long serving stands still for a commit by adopting."""

    name = "pause"
    what = "serving stands still for a commit by adopting"

    def run(self, lab: Lab) -> Row:
        """Play rounds into a worker that serves."""
        gaps = _play(lab)
        return Row(
            self.name,
            self.what,
            "ms",
            Spread.of(each.commit_s * 1e3 for each in gaps),
            Goal("<=", 5.0),
            {
                "update_nbytes": _tensors(lab).total_nbytes(),
                "usual_gap_s": gaps[0].usual_s,
                "around_commit_s": Spread.of(each.around_commit_s for each in gaps).median,
            },
        )


def _tensors(lab: Lab) -> TensorSet:
    return TensorSet("llama", lab.settings.nbytes)


def _play(lab: Lab) -> list[Gaps]:
    arguments = {"tensors": _tensors(lab).plain(), "num_rounds": lab.settings.num_rounds}
    told = lab.play(
        Scene(
            "serving, adopt, 1 worker",
            f"{JOBS}.serving:publish_between_pauses",
            f"{JOBS}.serving:serve",
            1,
            tuple(arguments.items()),
        )
    )
    life = life_of(told.workers[0])
    return [gaps_of(life, each) for each in told.trainer["rounds"]]


def life_of(told: dict[str, Any]) -> WorkerTrace:
    """Return what a worker did, by what it told."""
    trace = WorkerTrace(Ready("worker", 0, None, "", "fresh"))
    trace.times = list(told["tokens"])
    commits: Sequence[tuple[str, float, float]] = told["commits"]
    trace.commits = [Applied("worker", version, "", *times) for version, *times in commits]
    return trace


def gaps_of(trace: WorkerTrace, told: dict[str, Any]) -> Gaps:
    """Return the longest waits around one round, by what the trainer told of it."""
    applied = next(each for each in trace.commits if each.version == told["version"])

    def longest(since: float, until: float) -> float:
        """Return the longest gap that overlaps an interval and holds no commit."""
        return max(
            (
                after - before
                for before, after in trace.gaps(since, until)
                if not any(before <= each.started_at < after for each in trace.commits)
            ),
            default=0.0,
        )

    transfer_s = applied.started_at - told["began"]
    quiet_from = told["quiet_from"]
    return Gaps(
        quiet_s=longest(quiet_from, quiet_from + transfer_s),
        transfer_s=longest(told["began"], applied.started_at),
        around_commit_s=max(
            (
                after - before
                for before, after in trace.gaps(applied.started_at, applied.ended_at)
                if before <= applied.started_at and applied.ended_at <= after
            ),
            default=0.0,
        ),
        commit_s=applied.ended_at - applied.started_at,
        usual_s=median([after - before for before, after in pairwise(trace.times)] or [0.0]),
    )
