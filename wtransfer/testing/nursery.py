"""Inner half of a zygote: import, then fork on command and report how children end.

The other half, and the reasons, are in `wtransfer.testing.zygote`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import operator
import os
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_DATAGRAM = 1 << 18
"""Longest message, in bytes; each travels in one datagram."""

_PR_SET_PDEATHSIG = 1


class Spawn(msgspec.Struct, tag="spawn"):
    """Fork a child that calls a function."""

    target: str
    """``"module:function"``."""
    args: list[Any]
    """Positional arguments."""
    kwargs: dict[str, Any]
    """Keyword arguments."""
    stdout: str | None
    """File to append standard output to."""
    stderr: str | None
    """File to append standard error to."""


class Kill(msgspec.Struct, tag="kill"):
    """Send SIGKILL to a child, if it still runs."""

    pid: int
    """Its process id."""


class Started(msgspec.Struct, tag="started"):
    """The zygote, or a child, runs."""

    pid: int
    """Its process id."""


class Failed(msgspec.Struct, tag="failed"):
    """An import or a fork failed."""

    text: str
    """Cause."""


class Exited(msgspec.Struct, tag="exited"):
    """A child ended."""

    pid: int
    """Its process id, free for others now."""
    returncode: int
    """As `subprocess` has it: negative for a signal."""


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Spawn | Kill).decode


def main(fd: int, maker: int, preload: list[str]) -> None:
    """Be the zygote until its maker hangs up or ends; in a child, be that child. Never returns.

    Args:
        fd: This end of the socket pair.
        maker: Process id of the process at the other end.
        preload: Modules to import.
    """
    nursery = _Nursery(socket.socket(fileno=fd), maker)
    try:
        _import_all(preload)
    except Exception:
        nursery.tell(Failed(traceback.format_exc()))
        sys.exit(1)
    gc.collect()
    gc.freeze()
    nursery.tell(Started(os.getpid()))
    job = nursery.serve()
    if job is None:
        # Children have ended; skip the exit handlers of the preloaded modules.
        os._exit(0)
    sys.exit(_run(job))


def _import_all(modules: list[str]) -> None:
    for name in modules:
        importlib.import_module(name)
    num_threads = sum(1 for _ in Path("/proc/self/task").iterdir())
    if num_threads > 1:
        raise RuntimeError(
            f"importing {', '.join(modules)} left {num_threads - 1} threads running; a process "
            "with threads must not fork"
        )


class _Nursery:
    """The zygote's loop: commands in, ends of children out."""

    def __init__(self, commands: socket.socket, maker: int) -> None:
        self._commands = commands
        self._children: dict[int, int] = {}
        self._job: Spawn | None = None
        self._over = False
        self._maker = os.pidfd_open(maker)
        if os.getppid() != maker:
            # The maker ended before the line above: the descriptor may be of another process.
            os._exit(1)
        self._selector = selectors.DefaultSelector()
        self._watch(commands, self._command)
        self._watch(self._maker, self._end)

    def _watch(self, fd: socket.socket | int, then: Callable[[], None]) -> None:
        self._selector.register(fd, selectors.EVENT_READ, then)

    def tell(self, reply: Started | Failed | Exited) -> None:
        """Send to the maker, whose absence the loop notices by itself."""
        with contextlib.suppress(OSError):
            self._commands.send(_encode(reply))

    def serve(self) -> Spawn | None:
        """Return the job to run, in each child; None in the zygote, when it is to end."""
        while True:
            for key, _ in self._selector.select():
                key.data()
                if self._over:
                    return self._job

    def _command(self) -> None:
        try:
            datagram = self._commands.recv(MAX_DATAGRAM)
        except OSError:
            datagram = b""
        if not datagram:
            self._end()
            return
        command: Spawn | Kill = _decode(datagram)
        if isinstance(command, Spawn):
            self._fork(command)
        elif command.pid in self._children:
            os.kill(command.pid, signal.SIGKILL)

    def _fork(self, job: Spawn) -> None:
        zygote = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self.tell(Failed(f"fork: {error.strerror}"))
            return
        if pid == 0:
            self._job, self._over = job, True
            self._close_all()
            _become_child(zygote, job)
            return
        self._children[pid] = os.pidfd_open(pid)
        self._watch(self._children[pid], functools.partial(self._reap, pid))
        self.tell(Started(pid))

    def _close_all(self) -> None:
        # A child with these descriptors would hide the end of zygote and maker from one another.
        self._selector.close()
        self._commands.close()
        for fd in [self._maker, *self._children.values()]:
            os.close(fd)

    def _reap(self, pid: int) -> None:
        _, status = os.waitpid(pid, 0)
        pidfd = self._children.pop(pid)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        self.tell(Exited(pid, os.waitstatus_to_exitcode(status)))

    def _end(self) -> None:
        self._over = True
        # No id here can be of another process: a child keeps its id until `_reap`.
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in list(self._children):
            self._reap(pid)


def _become_child(zygote: int, job: Spawn) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != zygote:
        # The zygote was killed before `prctl` took effect.
        os._exit(1)
    for path, fd in ((job.stdout, 1), (job.stderr, 2)):
        if path is not None:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.dup2(opened, fd)
            os.close(opened)


def _run(job: Spawn) -> int:
    # A reader that follows a child's output needs each line when it is written.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    module, _, name = job.target.partition(":")
    function = operator.attrgetter(name)(importlib.import_module(module))
    result = function(*job.args, **job.kwargs)
    return result if isinstance(result, int) else 0
