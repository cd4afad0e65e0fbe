"""Whole rounds, held against two plain copies of the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.bench.rounds import Take
from wtransfer.bench.row import Goal, Row, Spread
from wtransfer.bench.sets import TensorSet

if TYPE_CHECKING:
    from wtransfer.bench.lab import Lab
    from wtransfer.bench.settings import Settings

_GOALS = {"adopt": Goal(">=", 0.9), "copy": Goal(">=", 0.7)}


def large_take(settings: Settings, commit: str = "adopt", verified: bool = True) -> Take:
    """Return the rounds that most rows are about: a large model, the usual number of workers."""
    tensors = TensorSet("llama", settings.nbytes)
    return Take(tensors, commit, settings.base_workers, verified, settings.engine)


@dataclass(frozen=True)
class WholeRound:
    """A whole round: from publish until every worker has verified and committed.

    Args:
        commit: How workers commit.
        verified: Whether the digests are real.
        engine: Which engine moves the weights.
    """

    commit: str
    verified: bool = True
    engine: str = "shm"

    @property
    def name(self) -> str:
        """``adopt``, ``copy``, and the same with ``-unverified``."""
        return self.commit if self.verified else f"{self.commit}-unverified"

    @property
    def what(self) -> str:
        """In words."""
        how = f"commit by {'adopting' if self.commit == 'adopt' else 'copying'}"
        proof = "verified" if self.verified else "digests replaced by constants"
        return f"{self.engine}: (2 x memcpy) / (publish to committed), {how}, {proof}"

    def run(self, lab: Lab) -> Row:
        """Play the rounds; every value changes in each, every receipt is checked."""
        rounds = lab.rounds(large_take(lab.settings, self.commit, self.verified))
        goal = _GOALS[self.commit] if self.verified and self.engine == "shm" else None
        return Row(
            self.name,
            self.what,
            "",
            rounds.share,
            goal,
            beside=rounds.beside(),
            stages=rounds.stages(),
        )


@dataclass(frozen=True)
class CpuTime:
    """CPU time of trainer and workers in a round, held against a plain copy's.

    Args:
        commit: How workers commit.
        engine: Which engine moves the weights.
    """

    commit: str
    engine: str = "shm"

    @property
    def name(self) -> str:
        """``adopt-cpu``, ``copy-cpu``."""
        return f"{self.commit}-cpu"

    @property
    def what(self) -> str:
        """In words."""
        return f"{self.engine}: CPU seconds of trainer and workers, {self.commit} / those of memcpy"

    def run(self, lab: Lab) -> Row:
        """Compare the CPU time of the rounds that `WholeRound` plays."""
        rounds = lab.rounds(large_take(lab.settings, self.commit))
        trainer, workers = rounds.trainer_cpu_s, rounds.workers_cpu_s
        both = Spread.of(map(sum, zip(trainer, workers, strict=True)))
        gib = rounds.nbytes / (1 << 30)
        return Row(
            self.name,
            self.what,
            "",
            # A copy on one thread waits for nothing: its seconds are CPU seconds.
            both.map(lambda seconds: seconds / rounds.copy_s),
            beside={
                "cpu_s_per_gib": both.median / gib,
                "trainer_cpu_s_per_gib": Spread.of(trainer).median / gib,
                "workers_cpu_s_per_gib": Spread.of(workers).median / gib,
                "memcpy_cpu_s_per_gib": rounds.copy_s / gib,
            },
        )
