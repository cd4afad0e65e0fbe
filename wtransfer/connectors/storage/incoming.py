"""Files that are being written, and what of them writers have left that have died.

A writer holds a lock on its file, which goes when it dies. But a file that was created has no lock
yet, and a sweep may come just then. What is safe is the order, on both sides:

1. A writer creates the file, locks it, and only then looks whether it still has its name.
2. A sweep locks a file, and removes it before it lets go of the lock.

So it matters who has the lock first. If it is the sweep, the writer finds it locked or without a
name, and creates another one. If it is the writer, the sweep leaves the file alone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import time
from typing import TYPE_CHECKING

from wtransfer.errors import StorageError, WTransferError
from wtransfer.transport.files import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer.transport.files import Folder

_ABANDONED_S = 3600.0
# Each of them was met by a sweep, which there is once in the life of an instance.
_MAX_TRIES = 16
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})


class Incoming:
    """The folder of files that are being written.

    Args:
        folder: The folder; `close` closes it.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        """Where they are."""

    def close(self) -> None:
        """Close it; a second call does nothing."""
        self.folder.close()

    @contextlib.contextmanager
    def file(self) -> Iterator[tuple[str, int]]:
        """Create a file that no sweep takes away, and yield its name and a descriptor.

        If an error ends the writing, nothing is left of it; else it was given another name.

        Raises:
            WTransferError: It cannot be created.
        """
        with contextlib.ExitStack() as on_error:
            name, fd = self._create(on_error)
            yield name, fd
            on_error.pop_all()
            os.close(fd)

    def _create(self, on_error: contextlib.ExitStack) -> tuple[str, int]:
        for _ in range(_MAX_TRIES):
            name = f"{secrets.token_hex(8)}.tmp"
            fd = self.folder.create_file(name)
            on_error.callback(self._drop, name, fd)
            if lock(fd) and self._has(name):
                return name, fd
            on_error.close()
        raise StorageError(
            f"each of {_MAX_TRIES} new files in {self.folder.path!r} was taken away before it "
            "could be written; let only wtransfer write there"
        )

    def _drop(self, name: str, fd: int) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self.folder.fd)
        os.close(fd)

    def _has(self, name: str) -> bool:
        with storage_errors(f"looking for '{self.folder.path}/{name}'"):
            try:
                os.stat(name, dir_fd=self.folder.fd, follow_symlinks=False)
            except FileNotFoundError:
                return False
        return True

    def sweep(self) -> None:
        """Remove what writers that have died have left, as far as it can be."""
        with contextlib.suppress(WTransferError):
            for name in self.folder.names():
                with contextlib.suppress(WTransferError, OSError):
                    self._sweep(name)

    def _sweep(self, name: str) -> None:
        try:
            fd = self.folder.open_file(name)
        except StorageError as error:
            # Something that no writer makes.
            if not isinstance(error.__cause__, FileNotFoundError):
                self.folder.remove(name)
            return
        try:
            if _is_abandoned(fd):
                self.folder.remove(name)
        finally:
            os.close(fd)


def lock(fd: int) -> bool:
    """Say that a file has a writer, until it is closed.

    Returns:
        Whether that could be said: False while somebody else says so, or a sweep has the file.

    Raises:
        StorageError: The disk fails.
    """
    with storage_errors("locking a file that is being written"):
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            # Leftovers are then told by their age.
            if error.errno not in _NO_LOCKS:
                raise
    return True


def _is_abandoned(fd: int) -> bool:
    """Return whether nobody writes to a file; if so, it is now locked as long as it is open."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        # No locks on this file system; nobody takes that long for a block.
        return time.time() - os.fstat(fd).st_mtime > _ABANDONED_S
    return True
