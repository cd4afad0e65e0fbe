"""How long still: one object that is made where a wait begins and passed down."""

from __future__ import annotations

import time

from wtransfer.errors import StallError


class Deadline:
    """A point in monotonic time that bounds one operation, however many waits it consists of.

    Args:
        seconds: Time allowed from now, in seconds.
    """

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def restart(self) -> None:
        """Allow the whole time again: something moved, so nothing is stalled."""
        self._end = time.monotonic() + self.seconds

    def remaining(self) -> float:
        """Return the seconds left, never below zero."""
        return max(0.0, self._end - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether no time is left."""
        return self.remaining() == 0.0

    def check(self, what: str, **facts: object) -> None:
        """Raise if no time is left.

        Args:
            what: What was being waited for, as it shall stand in the error.
            **facts: Further facts for the error (worker, round, phase).

        Raises:
            StallError: The deadline has passed.
        """
        if self.expired:
            raise StallError(
                f"no progress on {what} within {self.seconds:g} s", seconds=self.seconds, **facts
            )
