"""The yardstick: plain copies in a process of their own."""

from __future__ import annotations

from typing import Any

from wtransfer.bench.jobs import tell
from wtransfer.demo.model import memcpy_seconds


def measure(nbytes: int, **_: Any) -> None:
    """Tell the seconds of the fastest plain copy of so many bytes, on one thread."""
    tell(seconds=memcpy_seconds(nbytes))
