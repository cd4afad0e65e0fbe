"""Time that the model takes for a token of a prompt, beside which a load of KV cache has to pay."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

NUM_STEPS = 32
"""Steps of the model of which the mean time is taken."""


class StepTimes:
    """Times of the last steps that computed tokens of prompts. One thread calls it."""

    def __init__(self) -> None:
        self._begun: dict[int, tuple[float, int]] = {}
        self._last_end = 0.0
        self._steps: deque[tuple[float, int]] = deque(maxlen=NUM_STEPS)

    def begin(self, step: int, counts: Collection[int], chunk: int) -> None:
        """Note a step; the mean leaves out steps in which no request computes a whole chunk.

        Args:
            step: Number of the step; numbers rise.
            counts: Tokens that the step computes of each request.
            chunk: Tokens of a chunk that is kept.
        """
        num_tokens = sum(counts) if max(counts, default=0) >= chunk else 0
        self._begun[step] = (time.monotonic(), num_tokens)

    def end(self, step: int) -> None:
        """Note that all ranks have ended a step, and those before it."""
        now = time.monotonic()
        begun = [self._begun.pop(each) for each in list(self._begun) if each <= step]
        # The next step may be planned while one runs: its beginning is then the end of that one.
        if len(begun) == 1 and begun[0][1]:
            began, num_tokens = begun[0]
            self._steps.append((now - max(began, self._last_end), num_tokens))
        if begun:
            self._last_end = now

    @property
    def seconds_per_token(self) -> float | None:
        """Mean time for a token of a prompt; None: nothing was measured yet."""
        num_tokens = sum(each[1] for each in self._steps)
        return sum(each[0] for each in self._steps) / num_tokens if num_tokens else None
