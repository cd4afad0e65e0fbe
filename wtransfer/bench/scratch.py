"""A folder that goes with the process that asked for it, however that ends."""

from __future__ import annotations

import subprocess
import sys
import tempfile

from typing_extensions import Self

MEMORY = "/dev/shm"  # noqa: S108 - what is made there has a name that nobody can guess
"""A file system in memory."""
LEAVE_S = 10.0
"""How long removing may take, in seconds."""

# A process of its own: it sees its standard input end even if the bench is killed, with which the
# bench's children die, too, and may just be writing.
_REMOVE = """
import os, shutil, sys, time
sys.stdin.read()
for _ in range(50):
    try:
        shutil.rmtree(sys.argv[1])
    except OSError:
        # What a writer has renamed meanwhile is not found either.
        if not os.path.lexists(sys.argv[1]):
            break
        time.sleep(0.1)
"""


class Scratch:
    """A folder in memory, or where it is wanted. Use it as a context manager.

    Args:
        where: Folder in which it is made; None: `MEMORY`.

    Raises:
        OSError: There is no such place, or it cannot be written to.
    """

    def __init__(self, where: str | None = None) -> None:
        self.path = tempfile.mkdtemp(prefix="wtransfer-bench-", dir=where or MEMORY)
        """Where it is."""
        self._remover = subprocess.Popen(  # noqa: S603 - this interpreter, our own arguments
            [sys.executable, "-I", "-S", "-c", _REMOVE, self.path],
            stdin=subprocess.PIPE,
            # Ctrl-C ends the bench, and this one with it.
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._remover.communicate(timeout=LEAVE_S)
