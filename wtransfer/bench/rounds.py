"""Rounds that were played: their seconds, and how they compare with two plain copies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from wtransfer.bench.row import Spread
from wtransfer.bench.scene import workers_in_words

if TYPE_CHECKING:
    from wtransfer.bench.scene import Told
    from wtransfer.bench.sets import TensorSet


@dataclass(frozen=True)
class Take:
    """What is sent, and how it is received."""

    tensors: TensorSet
    """What."""
    commit: str = "adopt"
    """How workers commit."""
    num_workers: int = 1
    """How many there are."""
    verified: bool = True
    """Whether the digests are real."""
    engine: str = "shm"
    """Which engine moves it."""

    def to(self, num_workers: int) -> Take:
        """Return the same with another number of workers."""
        return replace(self, num_workers=num_workers)

    @property
    def name(self) -> str:
        """For people."""
        digests = "" if self.verified else ", without verification"
        workers = workers_in_words(self.num_workers)
        return f"{self.engine}, {self.tensors.kind}, {self.commit}, {workers}{digests}"


@dataclass(frozen=True)
class Rounds:
    """The rounds of one scene that count."""

    told: Told
    """What the trainer said of them."""
    copy_s: float
    """Seconds of a plain copy of the same bytes, the fastest just before and after."""

    @property
    def nbytes(self) -> int:
        """Bytes of one update."""
        return int(self._rounds[0]["nbytes"])

    @property
    def _rounds(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.told.trainer["rounds"]
        return found

    @property
    def seconds(self) -> Spread:
        """From publish to the last receipt."""
        return self.phase("total")

    @property
    def packed_s(self) -> Spread:
        """From publish until the trainer may train on."""
        return Spread.of(each["packed_s"] for each in self._rounds)

    @property
    def share(self) -> Spread:
        """Time of two plain copies, divided by that of a round: 1 would be as fast as can be."""
        return self.seconds.map(lambda seconds: 2 * self.copy_s / seconds)

    @property
    def gb_per_s(self) -> float:
        """Bytes by seconds, in 10^9 per second."""
        return self.nbytes / self.seconds.median / 1e9

    @property
    def trainer_cpu_s(self) -> list[float]:
        """CPU seconds of the trainer, round by round."""
        return [each["cpu_s"] for each in self._rounds]

    @property
    def workers_cpu_s(self) -> list[float]:
        """CPU seconds of all workers together, from commit to commit."""
        commits = [each["cpu_s"][-len(self._rounds) - 1 :] for each in self.told.workers]
        per_worker = [[stop - start for start, stop in pairwise(each)] for each in commits]
        return [sum(each) for each in zip(*per_worker, strict=True)]

    def phase(self, name: str) -> Spread:
        """Return the seconds of a phase of the trainer."""
        return Spread.of(each["seconds"][name] for each in self._rounds)

    def beside(self) -> dict[str, float]:
        """Return what a share was computed from."""
        return {
            "update_nbytes": self.nbytes,
            "round_s": self.seconds.median,
            "round_gb_per_s": self.gb_per_s,
            "memcpy_s": self.copy_s,
            "memcpy_gb_per_s": self.nbytes / self.copy_s / 1e9,
        }

    def stages(self) -> dict[str, float]:
        """Return the median seconds of every phase of the trainer and stage of the workers."""
        first = self._rounds[0]
        phases = {f"{name}_s": self.phase(name).median for name in first["seconds"]}
        return phases | {
            f"worker_{name}_s": Spread.of(
                worker[name] for each in self._rounds for worker in each["workers"]
            ).median
            for name in first["workers"][0]
        }
