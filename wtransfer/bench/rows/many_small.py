"""What a tensor costs that has hardly any bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.bench.rounds import Take
from wtransfer.bench.row import Goal, Row
from wtransfer.bench.rows.other_ways import BUCKETED, BY_TENSOR, seconds_of
from wtransfer.bench.sets import TensorSet

if TYPE_CHECKING:
    from wtransfer.bench.lab import Lab

# Broadcast one by one they take seconds, and hardly vary.
_NUM_OTHER_ROUNDS = 2


@dataclass(frozen=True)
class ManySmall:
    """Many small tensors against one that has as many bytes.

    Args:
        engine: Which engine moves them.
    """

    engine: str = "shm"
    name = "small"

    @property
    def what(self) -> str:
        """In words."""
        return (
            f"{self.engine}: microseconds for each of many small tensors, above one tensor of the "
            "same bytes"
        )

    def run(self, lab: Lab) -> Row:
        """Play rounds of both."""
        settings = lab.settings
        number, workers = settings.num_small, settings.base_workers
        many_small, as_one = (
            TensorSet(kind, settings.small_nbytes, number) for kind in ("many", "one")
        )
        many = lab.rounds(Take(many_small, num_workers=workers, engine=self.engine))
        one = lab.rounds(Take(as_one, num_workers=workers, engine=self.engine))
        each_us = many.seconds.map(lambda s: (s - one.seconds.median) / number * 1e6)
        beside: dict[str, float] = {
            "number": number,
            "each_nbytes": settings.small_nbytes,
            "one_s": one.seconds.median,
            "many_s": many.seconds.median,
        }
        for way in (BY_TENSOR, BUCKETED):
            sent = lab.play(way.scene(many_small, workers, _NUM_OTHER_ROUNDS))
            beside[f"{way.name}_each_us"] = seconds_of(sent).median / number * 1e6
        return Row(
            self.name,
            self.what,
            "us",
            each_us,
            Goal("<=", 8.0),
            beside=beside,
            stages=many.stages(),
        )
