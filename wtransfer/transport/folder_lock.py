"""Have a folder to oneself for as long as one lives."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
import weakref
from typing import TYPE_CHECKING

from wtransfer.deadline import Deadline
from wtransfer.errors import StorageError, StorageInUseError
from wtransfer.transport.files import storage_errors, write_at

if TYPE_CHECKING:
    from wtransfer.transport.files import Folder

LOCK_NAME = ".wtransfer-lock"
"""File that the lock is on; it names the holder, and goes with it."""
PATIENCE_S = 2.0
"""How long to wait for a holder that may be ending, in seconds."""
_POLL_S = 0.05
_MAX_HOLDER_NBYTES = 1024
_HOLDER = "process "
_OPEN = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class FolderLock:
    """An exclusive lock, among all hosts that share the folder. The kernel frees it at our death.

    Args:
        folder: Stays open for as long as the lock is held.
        patience_s: How long to wait for a holder that is about to end, in seconds.

    Raises:
        StorageInUseError: Somebody has it; the text says who.
        StorageError: The lock's file cannot be made, a file of that name is somebody's own, or
            this file system has no locks.
    """

    def __init__(self, folder: Folder, patience_s: float = PATIENCE_S) -> None:
        self._folder = folder
        self._fd: int | None = None
        deadline = Deadline(patience_s)
        with storage_errors(f"locking {folder.path!r}"):
            while (fd := self._try()) is None:
                if deadline.expired:
                    raise StorageInUseError(
                        f"{folder.path!r} is in use by {self._holder()}; one publisher at a time "
                        "may write there: close that one, or take another folder"
                    )
                time.sleep(_POLL_S)
        self._fd = fd
        _held.add(self)

    @property
    def held(self) -> bool:
        """Whether this process holds it."""
        return self._fd is not None

    def release(self) -> None:
        """Let others have it; a second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(OSError):
            # Before it is freed: whoever waits for it finds that its file is gone, and looks again.
            os.unlink(LOCK_NAME, dir_fd=self._folder.fd)
        os.close(fd)

    def _try(self) -> int | None:
        fd = os.open(LOCK_NAME, _OPEN, 0o644, dir_fd=self._folder.fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._is_named(fd):
                self._check_ours(fd)
                os.ftruncate(fd, 0)
                write_at(fd, [memoryview(_me().encode())], 0)
                return fd
        except BlockingIOError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _check_ours(self, fd: int) -> None:
        """Raise unless a holder wrote what is in the file: the next one overwrites it."""
        found = os.pread(fd, len(_HOLDER), 0)
        if found not in (b"", _HOLDER.encode()):
            raise StorageError(
                f"'{self._folder.path}/{LOCK_NAME}' was not written by wtransfer, which needs that "
                "name: move the file away, or take another folder"
            )

    def _is_named(self, fd: int) -> bool:
        """Return whether what we have locked is what others will try to lock."""
        try:
            named = os.stat(LOCK_NAME, dir_fd=self._folder.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(fd))

    def _holder(self) -> str:
        try:
            holder = self._folder.read(LOCK_NAME, _MAX_HOLDER_NBYTES)
        except StorageError:
            holder = None
        return (holder or b"").decode("utf-8", "replace") or "somebody"


def _me() -> str:
    return f"{_HOLDER}{os.getpid()} on {socket.gethostname()}"


_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _leave_to_the_parent() -> None:
    """Close the child's descriptors: else the lock would live on in it when the parent is dead."""
    for lock in list(_held):
        fd, lock._fd = lock._fd, None  # noqa: SLF001 - the other half of the class
        if fd is not None:
            os.close(fd)


os.register_at_fork(after_in_child=_leave_to_the_parent)
