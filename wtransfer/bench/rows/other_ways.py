"""How else the same weights come to the same number of workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wtransfer.bench.lab import JOBS
from wtransfer.bench.row import Goal, Row, Spread
from wtransfer.bench.rows.whole_round import large_take
from wtransfer.bench.scene import Scene, workers_in_words
from wtransfer.bench.scratch import Scratch

if TYPE_CHECKING:
    from wtransfer.bench.lab import Lab
    from wtransfer.bench.scene import Told
    from wtransfer.bench.sets import TensorSet


@dataclass(frozen=True)
class OtherWay:
    """A way to send that has no proof of receipt and no way back."""

    name: str
    """Of its row."""
    job: str
    """Function that each process runs."""
    what: str
    """In words."""
    goals: tuple[tuple[str, Goal], ...] = ()
    """How much faster we want to be, by engine."""

    def scene(self, tensors: TensorSet, num_workers: int, num_rounds: int, **more: Any) -> Scene:
        """Return what shows it."""
        arguments = {"tensors": tensors.plain(), "num_rounds": num_rounds, **more}
        return Scene(
            f"{self.what}, {tensors.kind}, {workers_in_words(num_workers)}",
            f"{JOBS}.{self.job}",
            f"{JOBS}.{self.job}",
            num_workers,
            tuple(arguments.items()),
        )


BY_TENSOR = OtherWay(
    "gloo",
    "broadcasting:tensor_by_tensor",
    "gloo broadcast, tensor by tensor",
    (("shm", Goal(">=", 5.0)),),
)
"""As most trainers do it."""
BUCKETED = OtherWay(
    "gloo-buckets",
    "broadcasting:in_buckets",
    "gloo broadcast, 64 MiB buckets allocated before",
    (("gloo", Goal(">=", 0.9)),),
)
"""The best of a broadcast."""
CHECKPOINT = OtherWay(
    "checkpoint",
    "checkpointing:save_and_load",
    "safetensors file in /dev/shm, saved and loaded",
    (("shm", Goal(">=", 20.0)),),
)
"""Without any network."""


def seconds_of(told: Told) -> Spread:
    """Return the seconds of the rounds of another way."""
    return Spread.of(told.trainer["seconds"])


@dataclass(frozen=True)
class Times:
    """How often a round of ours fits into one of another way.

    Args:
        way: The other one.
        engine: Which engine is ours.
    """

    way: OtherWay
    engine: str = "shm"

    @property
    def name(self) -> str:
        """That of the way."""
        return self.way.name

    @property
    def what(self) -> str:
        """In words."""
        return f"({self.way.what}) / ({self.engine}: publish to committed, verified)"

    def run(self, lab: Lab) -> Row:
        """Play both."""
        settings = lab.settings
        take = large_take(settings, settings.commits[0])
        with Scratch() as scratch:
            more = {"folder": scratch.path} if self.way is CHECKPOINT else {}
            theirs = seconds_of(
                lab.play(
                    self.way.scene(take.tensors, take.num_workers, settings.num_rounds, **more)
                )
            )
        ours = lab.rounds(take).seconds.median
        return Row(
            self.name,
            self.what,
            "times",
            theirs.map(lambda seconds: seconds / ours),
            dict(self.way.goals).get(self.engine),
            {
                "other_s": theirs.median,
                "other_gb_per_s": take.tensors.total_nbytes() / theirs.median / 1e9,
                "ours_s": ours,
            },
        )
