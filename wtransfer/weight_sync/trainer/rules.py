"""How a publisher wants its rounds to be judged."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

LostPolicy = Literal["abort", "drop"]
"""What the loss of a worker before the commit does."""
NonfinitePolicy = Literal["allow", "warn", "reject"]
"""What NaN or infinity in the weights does."""


@dataclass(frozen=True)
class Rules:
    """The choices of one publisher.

    Raises:
        ValueError: `min_workers` or `deadline_s` is no number that a round could be judged by.
    """

    min_workers: int = 1
    """Fewest instances that a round may have."""
    on_lost_worker: LostPolicy = "abort"
    """``"drop"`` lets the others commit, as long as `min_workers` remain."""
    nonfinite: NonfinitePolicy = "allow"
    """``"allow"`` does not look for it, ``"warn"`` logs and counts it, ``"reject"`` ends the
    round."""
    deadline_s: float = 30.0
    """Longest time without progress, in seconds."""

    def __post_init__(self) -> None:
        # bool is an int to isinstance; True workers are a mistake all the same.
        if type(self.min_workers) is not int or self.min_workers < 1:
            raise ValueError(f"min_workers is {self.min_workers!r}, expected an integer >= 1")
        if type(self.deadline_s) not in (int, float) or not 0 < self.deadline_s < math.inf:
            raise ValueError(
                f"deadline_s is {self.deadline_s!r}, expected a finite number of seconds > 0"
            )
