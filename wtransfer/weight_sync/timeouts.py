"""What callers may give as a time to wait."""

from __future__ import annotations

import numbers
from typing import Final, overload

LONGEST_S: Final = 1e9
"""A wait of some thirty years, in seconds, which every clock and lock can still count."""


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
