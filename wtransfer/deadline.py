"""Time left: one object that is made where a wait begins and passed down."""

from __future__ import annotations

import numbers
import time
from typing import Final, overload

from wtransfer.errors import StallError

LONGEST_S: Final = 1e9
"""A wait of some thirty years, in seconds, which every clock and lock can still count."""


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
        """True if no time is left."""
        return self.remaining() == 0.0

    def check(self, what: str, **facts: object) -> None:
        """Raise if no time is left.

        Args:
            what: Event that was being waited for, as it shall stand in the error.
            **facts: Further facts for the error (worker, round, phase).

        Raises:
            StallError: The deadline has passed.
        """
        if self.expired:
            raise StallError(
                f"no progress on {what} within {self.seconds:g} s", seconds=self.seconds, **facts
            )


@overload
def checked_timeout(timeout_s: float) -> float: ...


@overload
def checked_timeout(timeout_s: float | None, *, endless: bool) -> float | None: ...


def checked_timeout(timeout_s: float | None, *, endless: bool = False) -> float | None:
    """Return a time to wait, in seconds, that locks and event loops take.

    Args:
        timeout_s: As the caller has given it.
        endless: Whether None is allowed: no limit.

    Raises:
        ValueError: Not a number, or less than 0.
    """
    if timeout_s is None and endless:
        return None
    # NaN is not at least 0 either, and a wait for it would never end.
    if isinstance(timeout_s, (float, numbers.Real)) and timeout_s >= 0:
        return min(float(timeout_s), LONGEST_S)
    raise ValueError(f"timeout_s is {timeout_s!r}, expected a number of seconds, at least 0")
