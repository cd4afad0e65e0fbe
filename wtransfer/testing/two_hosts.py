"""Two hosts within a process: network namespaces joined by a cable, which threads enter.

Linux only, and for root: `setns` moves the calling thread alone, and the threads and processes that
it starts begin where it is. Nothing is named: both namespaces, and the cable, are gone once the
last descriptor of them is closed, whatever becomes of the process.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

from wtransfer.calls import call_apart

if TYPE_CHECKING:
    from collections.abc import Iterator

    from typing_extensions import Self

TRAINER_ADDRESS = "10.77.9.1"
"""Address of the trainer's host."""
WORKER_ADDRESS = "10.77.9.2"
"""Address of the worker's host."""
_CLONE_NEWNET = 0x40000000
_OWN = "/proc/thread-self/ns/net"


class NoTwoHostsError(Exception):
    """Network namespaces cannot be made here; the text says why."""


class TwoHosts:
    """A trainer's host and a worker's; a context manager.

    Raises:
        NoTwoHostsError: This process may not make them, or there is no program ``ip``.
    """

    def __init__(self) -> None:
        self._fds: list[int] = []
        try:
            for _ in range(2):
                self._fds.append(call_apart(_new_namespace, "wtransfer-kit-host"))
            with self.on_trainer():
                self._link("worker", TRAINER_ADDRESS)
            with self.on_worker():
                self._link("", WORKER_ADDRESS)
        except OSError as error:
            self._close()
            raise NoTwoHostsError(f"{type(error).__name__}: {error}") from error
        except BaseException:
            self._close()
            raise

    @contextlib.contextmanager
    def on_trainer(self) -> Iterator[None]:
        """Have the calling thread on the trainer's host within the block."""
        with _within(self._fds[0]):
            yield

    @contextlib.contextmanager
    def on_worker(self) -> Iterator[None]:
        """Have the calling thread on the worker's host within the block."""
        with _within(self._fds[1]):
            yield

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _link(self, peer: str, address: str) -> None:
        """Set up this host's end of the cable, which is made with its `peer`."""
        if peer:
            other = f"/proc/{os.getpid()}/fd/{self._fds[1]}"
            _ip("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", other)
        _ip("address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("link", "set", device, "up")

    def _close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())


def _new_namespace() -> int:
    """Return a descriptor of a new namespace; the calling thread stays in it."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"unshare(CLONE_NEWNET): {os.strerror(number)}")
    return os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)


@contextlib.contextmanager
def _within(fd: int) -> Iterator[None]:
    before = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _enter(fd)
        try:
            yield
        finally:
            _enter(before)
    finally:
        os.close(before)


def _enter(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


def _ip(*arguments: str) -> None:
    program = shutil.which("ip") or "/usr/sbin/ip"
    command = [program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
