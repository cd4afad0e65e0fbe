"""A child's end of its pipes: commands come in on one thread, reports go out as lines."""

from __future__ import annotations

import os
import queue
import sys
from threading import Thread
from typing import TYPE_CHECKING, BinaryIO

from wtransfer.demo.messages import decode_command, encode

if TYPE_CHECKING:
    from wtransfer.demo.messages import Command, Report


class StoppedError(Exception):
    """The conductor closed the pipe, or is gone: the process has to end."""


class Inbox:
    """Commands of the conductor, in order.

    Args:
        stream: Where lines come from.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        # None stands for the end of the stream.
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        Thread(target=self._read, name="demo-inbox", daemon=True).start()

    @classmethod
    def of_stdin(cls) -> Inbox:
        """Return the inbox of this process."""
        # A reader of its own: the interpreter takes the lock of `sys.stdin` when it ends, and
        # aborts if a thread still waits there.
        return cls(os.fdopen(os.dup(sys.stdin.fileno()), "rb"))

    def _read(self) -> None:
        try:
            for line in self._stream:
                self._commands.put(decode_command(line))
        finally:
            self._commands.put(None)

    def wait(self, timeout_s: float | None = None) -> Command | None:
        """Return the next command, or None if none came in time.

        Args:
            timeout_s: Seconds to wait; None waits until a command comes or the stream ends.

        Raises:
            StoppedError: The stream has ended.
        """
        try:
            command = self._commands.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if command is None:
            # Whoever asks next, on whatever thread, shall see the end as well.
            self._commands.put(None)
            raise StoppedError
        return command

    def poll(self) -> Command | None:
        """Return the next command if there is one; raises as `wait`."""
        return None if self._commands.empty() else self.wait()


def report(message: Report) -> None:
    """Tell the conductor.

    Raises:
        StoppedError: Nobody listens any more.
    """
    try:
        sys.stdout.buffer.write(encode(message))
        sys.stdout.buffer.flush()
    except BrokenPipeError as error:
        raise StoppedError from error
