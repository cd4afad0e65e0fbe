"""Processes that start in milliseconds: children forked from one that has torch imported already.

Importing torch costs two seconds of CPU, forking a process that has done it about ten milliseconds.
The zygote is such a process: it imports, then only forks, so it stays single-threaded (threads do
not survive a fork, the locks that they hold do).

Children are real processes: they have a pid, can be stopped and killed, end like any interpreter.
No child outlives the process that made the zygote: the zygote watches its maker, and kills the
children before it ends; should the zygote itself be killed, the kernel kills them. Processes that
a child starts are not covered.

The function to run travels as ``"module:function"`` over a socket pair that only the creating
process holds: no other process can make a zygote import anything.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from wtransfer.deadline import Deadline
from wtransfer.errors import (
    ClosedError,
    ForkedError,
    LimitError,
    PeerLostError,
    StallError,
    WTransferError,
)
from wtransfer.testing.nursery import MAX_DATAGRAM, Exited, Failed, Kill, Spawn, Started

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

START_DEADLINE_S = 120.0
"""Time for the imports, in seconds: disks may be cold."""
REPLY_DEADLINE_S = 10.0
"""Time for a fork, and for ending all children, in seconds."""

# Libraries that start threads when they are imported read these.
_THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# The import path is set before anything is imported, so that the zygote finds what its maker finds.
_BOOT = (
    "import json, sys; settings = json.loads(sys.argv[1]); sys.path[:] = settings.pop('path'); "
    "from wtransfer.testing.nursery import main; main(**settings)"
)


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Started | Failed | Exited).decode


class Child:
    """A forked process. Made by `Zygote.spawn`."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self.pid = pid
        """Process id; valid for signals until the end was seen."""
        self._zygote = zygote

    def poll(self) -> int | None:
        """Return the return code as `subprocess` has it (negative: signal), None while it runs.

        Raises:
            PeerLostError: The zygote is gone, and with it its children.
        """
        return self._zygote._returncode(self.pid, 0.0)  # noqa: SLF001 - two halves of one thing

    def wait(self, timeout_s: float) -> int:
        """Wait for the end and return the return code.

        Raises:
            StallError: The process still runs after `timeout_s` seconds.
            PeerLostError: The zygote is gone, and with it its children.
        """
        deadline = Deadline(timeout_s)
        while True:
            returncode = self._zygote._returncode(self.pid, min(0.05, deadline.remaining()))  # noqa: SLF001
            if returncode is not None:
                return returncode
            deadline.check(f"the end of process {self.pid}")

    def kill(self) -> None:
        """Send SIGKILL; does nothing to a process that has ended.

        The zygote sends the signal: it knows whether the id is still that of the child.
        """
        self._zygote._kill(self.pid)  # noqa: SLF001


class Zygote:
    """A process that forks others on command. Use it as a context manager, or call `close`.

    Args:
        preload: Modules to import; none may leave a thread running.
        paths: Folders to import from besides this process's own ``sys.path``.

    Raises:
        PeerLostError: A module could not be imported, or left a thread; the text says which.

    Cost: the imports, once; about 10 ms for each child. BLAS and OpenMP have one thread in it.
    """

    def __init__(
        self, preload: Sequence[str] = ("torch",), paths: Sequence[str | Path] = ()
    ) -> None:
        self._lock = threading.Lock()
        self._returncodes: dict[int, int] = {}
        self._closed = False
        self._maker = os.getpid()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - this interpreter, our own arguments
                [sys.executable, "-c", _BOOT, _settings(theirs.fileno(), preload, paths)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, **dict.fromkeys(_THREAD_COUNTS, "1")},
                # Ctrl-C is for the maker to handle; it closes the zygote on its way out.
                start_new_session=True,
            )
        self.pid = self._process.pid
        """Process id of the zygote itself."""
        try:
            with self._lock:
                self._reply(Deadline(START_DEADLINE_S))
        except BaseException:
            self.close()
            raise

    def spawn(
        self,
        target: str,
        *args: Any,
        stdout: str | Path | None = None,
        stderr: str | Path | None = None,
        **kwargs: Any,
    ) -> Child:
        """Fork a child that calls a function and ends with what it returns.

        Args:
            target: ``"module:function"``; an int that it returns is the return code, an exception
                is printed and makes it 1.
            *args: Positional arguments of the function, of types that msgpack can hold.
            stdout: File to append standard output to; else it is inherited.
            stderr: File to append standard error to; else it is inherited.
            **kwargs: Keyword arguments of the function.

        Raises:
            ClosedError: The zygote was closed.
            PeerLostError: The zygote is gone, or could not fork.
            LimitError: The arguments are too large.
        """
        command = Spawn(
            target,
            list(args),
            kwargs,
            None if stdout is None else str(stdout),
            None if stderr is None else str(stderr),
        )
        with self._lock:
            self._send(command)
            return Child(self, self._reply(Deadline(REPLY_DEADLINE_S)))

    def close(self) -> None:
        """Kill all children and end the zygote; a second call does nothing."""
        with self._lock:
            # A forked copy must not end the zygote of the process that made it.
            if self._closed or os.getpid() != self._maker:
                return
            self._closed = True
            # The end of our half is the command to end. Not close(): how the children ended is
            # still to be read, and a forked copy of this socket would keep the connection up.
            with contextlib.suppress(OSError, WTransferError), self._socket:
                self._socket.shutdown(socket.SHUT_WR)
                deadline = Deadline(REPLY_DEADLINE_S)
                while not deadline.expired:
                    self._receive(deadline.remaining())
        try:
            self._process.wait(REPLY_DEADLINE_S)
        except subprocess.TimeoutExpired:
            # The zygote may be stopped. Its children die with it: PR_SET_PDEATHSIG.
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- the conversation; callers of these hold the lock ---------------------------------------

    def _send(self, command: Spawn | Kill) -> None:
        if self._closed:
            raise ClosedError("this zygote was closed; make another one")
        self._check_owner()
        self._socket.settimeout(REPLY_DEADLINE_S)
        try:
            self._socket.send(_encode(command))
        except TimeoutError as error:
            raise StallError("the zygote does not listen", seconds=REPLY_DEADLINE_S) from error
        except OSError as error:
            if error.errno == errno.EMSGSIZE:
                raise LimitError("arguments of a child are too large; pass a file") from error
            raise PeerLostError(f"the zygote is gone ({error.strerror})") from error

    def _reply(self, deadline: Deadline) -> int:
        """Return the pid that the zygote answers; ends that it reports meanwhile are noted."""
        while True:
            reply = self._receive(deadline.remaining())
            if isinstance(reply, Started):
                return reply.pid
            if isinstance(reply, Failed):
                raise PeerLostError(f"the zygote failed: {reply.text}")
            deadline.check("an answer of the zygote")

    def _receive(self, timeout_s: float) -> Started | Failed | None:
        """Read one message, and note it if it is the end of a child."""
        self._check_owner()
        self._socket.settimeout(timeout_s)
        try:
            datagram = self._socket.recv(MAX_DATAGRAM)
        except (BlockingIOError, TimeoutError):
            return None
        except OSError as error:
            raise PeerLostError(f"the zygote is gone ({error.strerror})") from error
        if not datagram:
            raise PeerLostError(f"the zygote is gone (return code {self._process.poll()})")
        reply: Started | Failed | Exited = _decode(datagram)
        if isinstance(reply, Exited):
            self._returncodes[reply.pid] = reply.returncode
            return None
        return reply

    def _check_owner(self) -> None:
        if os.getpid() != self._maker:
            raise ForkedError("this zygote belongs to the parent process; make one after fork()")

    # -- for children; they take the lock -------------------------------------------------------

    def _returncode(self, pid: int, timeout_s: float) -> int | None:
        with self._lock:
            if pid not in self._returncodes:
                self._receive(timeout_s)
            return self._returncodes.get(pid)

    def _kill(self, pid: int) -> None:
        with self._lock:
            if pid not in self._returncodes:
                self._send(Kill(pid))


def _settings(fd: int, preload: Sequence[str], paths: Sequence[str | Path]) -> str:
    # An empty entry means the current folder, which the maker may leave.
    path = [str(Path(entry).absolute()) for entry in [*paths, *sys.path]]
    return json.dumps({"fd": fd, "maker": os.getpid(), "preload": [*preload], "path": path})
