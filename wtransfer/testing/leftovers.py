"""What a process holds that it did not hold before: threads, descriptors, shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import threading
import time
from collections import Counter
from pathlib import Path

_POLL_S = 0.02


class Leftovers:
    """Notes what this process holds now, to tell later what has come on top.

    Linux only. Descriptors and mappings are counted by kind, since their numbers are reused.
    """

    def __init__(self) -> None:
        self._threads = set(threading.enumerate())
        self._held = _held()

    def found(self, within_s: float = 5.0) -> list[str]:
        """Return what is held more than at first, once it is nothing or the time is over.

        Args:
            within_s: How long to wait for things to go, in seconds.
        """
        end = time.monotonic() + within_s
        while (found := self._more()) and time.monotonic() < end:
            # What only the garbage collector could free is nobody's any more.
            gc.collect()
            time.sleep(_POLL_S)
        return found

    def _more(self) -> list[str]:
        threads = [t.name for t in threading.enumerate() if t not in self._threads]
        more = [f"{number} x {what}" for what, number in (_held() - self._held).items()]
        return [f"thread {name}" for name in threads] + more


def _held() -> Counter[str]:
    held: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):  # noqa: PTH208 - names, and one of them vanishes
        with contextlib.suppress(OSError):
            target = Path(f"/proc/self/fd/{fd}").readlink()
            held[f"descriptor of {re.sub('[0-9]+', '#', str(target))}"] += 1
    for line in Path("/proc/self/maps").read_text("utf-8").splitlines():
        if "/memfd:" in line or "/dev/shm/" in line:  # noqa: S108 - looked at, not written
            held[f"mapping of {line.split(maxsplit=5)[5]}"] += 1
    held.update(f"file /dev/shm/{name}" for name in os.listdir("/dev/shm"))  # noqa: PTH208, S108
    return held
