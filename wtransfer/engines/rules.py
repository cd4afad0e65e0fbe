"""How a publisher wants its rounds to be judged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LostPolicy = Literal["abort", "drop"]
"""What the loss of a worker before the commit does."""
NonfinitePolicy = Literal["allow", "warn", "reject"]
"""What NaN or infinity in the weights does."""


@dataclass(frozen=True)
class Rules:
    """The choices of one publisher."""

    min_workers: int = 1
    """Fewest instances that a round may have."""
    on_lost_worker: LostPolicy = "abort"
    """``"drop"`` lets the others commit, as long as `min_workers` remain."""
    nonfinite: NonfinitePolicy = "allow"
    """``"warn"`` logs it, ``"reject"`` ends the round; it is always counted."""
    deadline_s: float = 30.0
    """Longest time without progress, in seconds."""
