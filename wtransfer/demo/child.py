"""One process of the demo, as the conductor sees it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from threading import Thread
from typing import TYPE_CHECKING

from wtransfer.demo.messages import decode_report, encode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from wtransfer.demo.messages import Command, Report

_TAIL_NBYTES = 4000


@dataclass(frozen=True)
class Ended:
    """A child's output ended, or stopped making sense; it sends no more reports."""

    child: Child
    """Which child."""
    error: Exception | None
    """What was wrong with its output, if anything."""


class Child:
    """A Python process that reads commands and writes reports.

    Args:
        name: For people.
        module: Run with ``-m``.
        arguments: Its command line.
        environ: Its environment.
        deliver: Called on a thread of the child with every report, and at last with `Ended`.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        deliver: Callable[[Report | Ended], None],
    ) -> None:
        self.name = name
        self._deliver = deliver
        # An unlinked file instead of a pipe: nobody has to read it for the child to go on.
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115  # closed in `end`
        # A session of its own keeps the terminal's Ctrl-C from it: the conductor alone hears that,
        # and closes the pipe.
        self._process = subprocess.Popen(  # noqa: S603  # our own module, our own arguments
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=dict(environ),
            start_new_session=True,
        )
        self._reader = Thread(target=self._read, name=f"demo-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        error: Exception | None = None
        try:
            for line in self._process.stdout:
                self._deliver(decode_report(line))
        except Exception as caught:
            error = caught
        self._deliver(Ended(self, error))

    def send(self, command: Command) -> None:
        """Send a command; one to a child that has ended is dropped, as `Ended` tells of it."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(encode(command))
            self._process.stdin.flush()
        except BrokenPipeError:
            return

    def ask_to_end(self) -> None:
        """Close its standard input, which asks it to end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            return

    def end(self, timeout_s: float) -> int:
        """See it off: ask, wait, and kill it if it does not go. Calling it again changes nothing.

        Args:
            timeout_s: Seconds it is given.

        Returns:
            Its exit status; negative: the signal that ended it.
        """
        self.ask_to_end()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
        return self._gone()

    def kill(self) -> int:
        """End it with SIGKILL, and return when it is gone; returns as `end`."""
        self._process.kill()
        self.ask_to_end()
        return self._gone()

    def _gone(self) -> int:
        status = self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()
        return status

    def last_words(self) -> str:
        """Return the end of what it wrote to standard error."""
        if self._stderr.closed:
            return ""
        # Not `seek`: the child writes through the same file position.
        file = self._stderr.fileno()
        start = max(0, os.fstat(file).st_size - _TAIL_NBYTES)
        return os.pread(file, _TAIL_NBYTES, start).decode("utf-8", "replace").strip()
