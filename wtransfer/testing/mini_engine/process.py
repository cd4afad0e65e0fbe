"""A process of an instance, as whoever starts it has it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING, Protocol

from wtransfer.errors import PeerError, StallError

if TYPE_CHECKING:
    from wtransfer.deadline import Deadline

INSTANCE = "wtransfer.testing.mini_engine.instance_process:main"
"""What the process of an instance calls."""
RANK = "wtransfer.testing.mini_engine.rank_process:main"
"""What the process of a rank calls."""
MODULES = (
    "wtransfer.testing.mini_engine.instance_process",
    "wtransfer.testing.mini_engine.rank_process",
)
"""What a zygote of such processes imports beforehand."""
END_S = 10.0
"""How long a process is given to end, before it is killed."""


class Process(Protocol):
    """A process that was started, as `wtransfer.transport.zygote` has it."""

    pid: int
    """Its id."""

    def poll(self) -> int | None:
        """Return how it has ended; None: it runs."""

    def kill(self) -> None:
        """Send SIGKILL."""

    def wait(self, timeout_s: float) -> int:
        """Return how it has ended.

        Raises:
            StallError: It runs still.
        """


def ended(process: Process, deadline: Deadline) -> int:
    """Wait until a process has ended, and kill it if it does not by itself.

    Args:
        process: The process.
        deadline: Until when it is waited for.

    Returns:
        How it has ended.
    """
    try:
        return process.wait(deadline.remaining())
    except StallError:
        process.kill()
        return process.wait(END_S)
    except PeerError:
        # Who has started it is gone, and has taken it along.
        return -signal.SIGKILL
