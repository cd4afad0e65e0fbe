"""Payoff of loads from a tier: their time beside that of computing the same blocks."""

from __future__ import annotations

import time
from collections import deque

WINDOW = 32
"""Loads, and steps of the model, of which the mean is taken."""
MIN_LOADS = 16
"""Loads that are measured before any is skipped."""
LEAVE_S = 30.0
"""Time for which losing loads are skipped before they are measured again, in seconds."""


class Payoff:
    """Compares loads with computing. One thread calls it.

    Args:
        tokens_per_block: Tokens of a block that is kept.
    """

    def __init__(self, tokens_per_block: int) -> None:
        self._tokens_per_block = tokens_per_block
        self._loads: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._last_end = 0.0
        self._load_s = self._compute_s = 0.0
        self._left_until = 0.0

    def computed(self, seconds_per_token: float | None) -> None:
        """Record how long the model takes for a token of a prompt; None: not known yet."""
        self._compute_s = (seconds_per_token or 0.0) * self._tokens_per_block

    def end(self, num_blocks: int, began: float) -> None:
        """Record the end of a load; of those that run side by side, each counts from the last end.

        Args:
            num_blocks: Blocks that it has loaded; 0: it failed.
            began: Time at which it began, by the monotonic clock.
        """
        now = time.monotonic()
        seconds, self._last_end = now - max(self._last_end, began), now
        if not num_blocks:
            return
        self._loads.append((seconds, num_blocks))
        self._load_s = sum(each[0] for each in self._loads) / sum(each[1] for each in self._loads)

    def skip(self) -> bool:
        """Decide whether to skip a load; after loads that lose, all are for `LEAVE_S`."""
        now = time.monotonic()
        if now < self._left_until:
            return True
        if len(self._loads) < MIN_LOADS or not 0 < self._compute_s < self._load_s:
            return False
        self._left_until = now + LEAVE_S
        self._loads.clear()
        return True

    def numbers(self) -> dict[str, float]:
        """Return both times, in seconds per block; 0: not measured yet."""
        return {
            "load_seconds_per_block": self._load_s,
            "compute_seconds_per_block": self._compute_s,
        }
