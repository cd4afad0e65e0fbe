"""What more workers cost the trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.bench.row import Goal, Row
from wtransfer.bench.rows.whole_round import large_take

if TYPE_CHECKING:
    from wtransfer.bench.lab import Lab


class MoreWorkers:
    """Time until the trainer may train on: with the most workers, and with the usual number.

    Args:
        num_workers: The most.
    """

    name = "packed"

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers

    @property
    def what(self) -> str:
        """In words."""
        return f"shm: time until the trainer may train on, {self._num_workers} workers / the usual"

    def run(self, lab: Lab) -> Row:
        """Play rounds with both numbers of workers."""
        take = large_take(lab.settings)
        few, many = lab.rounds(take), lab.rounds(take.to(self._num_workers))
        return Row(
            self.name,
            self.what,
            "",
            many.packed_s.map(lambda seconds: seconds / few.packed_s.median),
            Goal("<=", 1.1),
            {
                "usual_workers": take.num_workers,
                "usual_packed_s": few.packed_s.median,
                "usual_round_s": few.seconds.median,
                "workers": self._num_workers,
                "packed_s": many.packed_s.median,
                "round_s": many.seconds.median,
            },
            stages=many.stages(),
        )
