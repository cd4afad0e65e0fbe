"""What was done and what failed, as numbers; the first failure of each kind is logged as well."""

from __future__ import annotations

import logging
from collections import Counter

logger = logging.getLogger(__name__)


class Counts:
    """Numbers by name."""

    def __init__(self) -> None:
        self._numbers: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        """Count something."""
        self._numbers[f"{name}_total"] += number

    def fail(self, name: str, reason: str, told: object = "") -> None:
        """Count a failure, and its reason; the first of each reason is logged.

        Args:
            name: What failed.
            reason: Why, in a word.
            told: The whole story.
        """
        self.add(name)
        self.add(f"{name}_{reason}")
        if self._numbers[f"{name}_{reason}_total"] == 1:
            logger.warning(
                "%s (%s): %s; further ones are only counted", name.replace("_", " "), reason, told
            )

    def numbers(self) -> dict[str, float]:
        """Return all numbers."""
        return dict(self._numbers)
