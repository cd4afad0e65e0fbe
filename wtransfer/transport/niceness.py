"""Threads that step back behind the rest of the process: what they do is for a later step."""

from __future__ import annotations

import contextlib
import os
import sys
import threading

NICENESS = 10
"""Priority of threads for whose work nobody waits: on busy processors they get about a tenth."""


def step_back(niceness: int = NICENESS) -> None:
    """Let this thread have what processors the others leave.

    Serving, and a trainer on the same host that wants to train on, come first.

    Args:
        niceness: How far to step back; 0: not at all.
    """
    # Only there do threads have priorities of their own, under the numbers of processes.
    if sys.platform == "linux" and niceness:
        thread = threading.get_native_id()
        present = os.getpriority(os.PRIO_PROCESS, thread)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(present, niceness))
