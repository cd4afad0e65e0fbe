"""Folders that several processes share: atomic writes, no symbolic links, bounded reads, a lock.

A `Folder` is opened once; everything in it is reached by its descriptor and a plain name. So no
name leads out of it, and no symbolic link is followed and no pipe waited for.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import socket
import stat
import time
import weakref
from typing import TYPE_CHECKING

from wtransfer.deadline import Deadline
from wtransfer.errors import (
    DescriptorLimitError,
    StagingMemoryError,
    StorageError,
    StorageInUseError,
    WTransferError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

MAX_NAME_NBYTES = 255
"""Longest name of a file, in bytes."""
LOCK_NAME = ".wtransfer-lock"
"""File that a `FolderLock` is on; it names the holder and is removed with the lock."""
LOCK_PATIENCE_S = 2.0
"""How long to wait for a holder that may be ending, in seconds."""

# Without O_NONBLOCK, opening a pipe would wait for its other end.
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
# Never writable by all, whatever the umask is; it may take more away.
_FILE_MODE, _FOLDER_MODE = 0o664, 0o775
_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp", re.DOTALL)


class Folder:
    """An open folder.

    Args:
        path: Path of the folder.
        follow: Whether the folder itself may be a symbolic link. The path to it may hold links.
        parent: The folder in which `path` is a plain name; links are not followed then.

    Raises:
        StorageError: The path does not exist, is no folder, or may not be read.
        DescriptorLimitError: No descriptor is left.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, follow: bool = True, parent: Folder | None = None
    ) -> None:
        self.path: str = os.fspath(path) if parent is None else f"{parent.path}/{path}"
        """Path of the folder when it was opened."""
        with storage_errors(f"opening the folder {self.path!r}"):
            if parent is None:
                self.fd = os.open(path, _FOLDER if follow else _FOLDER | os.O_NOFOLLOW)
            else:
                name = plain_name(str(path))
                self.fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent.fd)

    def close(self) -> None:
        """Close the folder; a second call does nothing."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def folder(self, name: str) -> Folder:
        """Open a folder in this one."""
        return Folder(name, parent=self)

    def make_folder(self, name: str) -> Folder:
        """Make a folder in this one, and open it."""
        with storage_errors(f"making {self._shown(name)}"):
            os.mkdir(plain_name(name), _FOLDER_MODE, dir_fd=self.fd)
        return Folder(name, parent=self)

    def names(self) -> list[str]:
        """Return the names of everything in the folder, sorted."""
        with storage_errors(f"listing {self.path!r}"):
            return sorted(os.listdir(self.fd))  # noqa: PTH208 - by descriptor

    # -- files

    def open_file(self, name: str, *, follow: bool = False) -> int:
        """Open a file for reading.

        Args:
            name: Plain name.
            follow: Whether a symbolic link is followed. For the user's own folders: download
                caches consist of links.

        Returns:
            A descriptor; the caller closes it.

        Raises:
            StorageError: No such file, or not a file: a link, a folder, a pipe.

        Cost: never waits for another process.
        """
        with storage_errors(f"opening {self._shown(name)}"):
            flags = _READ if follow else _READ | os.O_NOFOLLOW
            fd = os.open(plain_name(name), flags, dir_fd=self.fd)
            mode = os.fstat(fd).st_mode
        if stat.S_ISREG(mode):
            return fd
        os.close(fd)
        raise StorageError(
            f"{self._shown(name)} is no regular file ({stat.filemode(mode)}); only those are read"
        )

    def create_file(self, name: str) -> int:
        """Create a file that must not exist, for reading and writing; the caller closes it."""
        with storage_errors(f"creating {self._shown(name)}"):
            return os.open(plain_name(name), _CREATE, _FILE_MODE, dir_fd=self.fd)

    def read(self, name: str, max_nbytes: int, *, follow: bool = False) -> bytes | None:
        """Return the content of a file; None if there is no such file.

        Args:
            name: Plain name.
            max_nbytes: Most bytes that are read.
            follow: As in `open_file`.

        Raises:
            StorageError: The file is larger than `max_nbytes`, no file, or cannot be read.
        """
        try:
            fd = self.open_file(name, follow=follow)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        with storage_errors(f"reading {self._shown(name)}"), open(fd, "rb") as file:  # noqa: PTH123
            # Its size first: nothing is read of a file that is too large.
            nbytes = os.fstat(fd).st_size
            data = file.read(max_nbytes + 1) if nbytes <= max_nbytes else b""
        if max(nbytes, len(data)) > max_nbytes:
            raise StorageError(f"{self._shown(name)} is larger than {max_nbytes:,} bytes")
        return data

    def replace(self, name: str, data: bytes) -> None:
        """Write a file so that readers see the old one or the new one, also after a crash.

        Raises:
            StorageError: The file could not be written; the old one is as it was.
        """
        temporary = f".{plain_name(name)}.{secrets.token_hex(8)}.tmp"
        try:
            fd = self.create_file(temporary)
            with storage_errors(f"writing {self._shown(name)}"):
                try:
                    write_at(fd, [memoryview(data)], 0)
                    os.fsync(fd)
                finally:
                    os.close(fd)
                os.replace(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=self.fd)
            raise
        self.sync()

    # -- the folder itself

    def rename(self, name: str, new: str) -> None:
        """Rename an entry of the folder; no folder must exist under the new name."""
        with storage_errors(f"renaming {self._shown(name)} to {new!r}"):
            os.rename(plain_name(name), plain_name(new), src_dir_fd=self.fd, dst_dir_fd=self.fd)
        self.sync()

    def sync(self) -> None:
        """Bring the folder's names to the disk."""
        with storage_errors(f"syncing {self.path!r}"):
            try:
                os.fsync(self.fd)
            except OSError as error:
                # File systems that have nothing to sync for a folder return EINVAL.
                if error.errno != errno.EINVAL:
                    raise

    def remove(self, name: str) -> None:
        """Remove a file, a link itself, or a folder with its content; idempotent."""
        with (
            storage_errors(f"removing {self._shown(name)}"),
            contextlib.suppress(FileNotFoundError),
        ):
            mode = os.stat(plain_name(name), dir_fd=self.fd, follow_symlinks=False).st_mode
            if not stat.S_ISDIR(mode):
                os.unlink(name, dir_fd=self.fd)
                return
            with Folder(name, parent=self) as inner:
                for each in inner.names():
                    inner.remove(each)
            os.rmdir(name, dir_fd=self.fd)

    def sweep(self, is_leftover: Callable[[str], bool]) -> list[str]:
        """Remove entries whose name `is_leftover`; return the names that cannot be removed."""
        left = set(filter(is_leftover, self.names()))
        for name in sorted(left):
            with contextlib.suppress(WTransferError):
                self.remove(name)
                left.remove(name)
        return sorted(left)

    def _shown(self, name: str) -> str:
        return repr(f"{self.path}/{name:.300}")


class FolderLock:
    """An exclusive lock among all hosts that share a folder. The kernel frees it at our death.

    Args:
        folder: Folder to lock; stays open for as long as the lock is held.
        patience_s: How long to wait for a holder that is about to end, in seconds.

    Raises:
        StorageInUseError: Another process holds the lock; the text names that process.
        StorageError: The lock's file cannot be made, a file of that name was not written by a
            lock, or this file system has no locks.
    """

    def __init__(self, folder: Folder, patience_s: float = LOCK_PATIENCE_S) -> None:
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
        """True if this process has not released the lock."""
        return self._fd is not None

    @property
    def in_force(self) -> bool:
        """True if the lock keeps others out: not after its file was removed or replaced by hand."""
        with storage_errors(f"looking at the lock of {self._folder.path!r}"):
            return self._fd is not None and self._is_named(self._fd)

    def release(self) -> None:
        """Let others lock the folder; idempotent."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(OSError):
            # Unlinked before the lock is freed: a process that waits for the lock finds its file
            # gone, and opens the next one. Another holder's file stays.
            if self._is_named(fd):
                os.unlink(LOCK_NAME, dir_fd=self._folder.fd)
        os.close(fd)

    def _try(self) -> int | None:
        fd = os.open(LOCK_NAME, _LOCK, 0o644, dir_fd=self._folder.fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Only then: the previous holder may have removed the file after we opened it.
            if self._is_named(fd):
                if os.pread(fd, len(_HOLDER), 0) not in (b"", _HOLDER.encode()):
                    raise StorageError(
                        f"'{self._folder.path}/{LOCK_NAME}' was not written by wtransfer, which "
                        "needs that name: move the file away, or take another folder"
                    )
                os.ftruncate(fd, 0)
                os.pwrite(fd, f"{_HOLDER}{os.getpid()} on {socket.gethostname()}".encode(), 0)
                return fd
        except BlockingIOError:
            pass
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _is_named(self, fd: int) -> bool:
        """Return whether the open file is the one that other processes will try to lock."""
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
        return (holder or b"").decode("utf-8", "replace") or "another process"


_POLL_S = 0.05
_MAX_HOLDER_NBYTES = 1024
_HOLDER = "process "
_held: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _leave_locks_to_parent() -> None:
    """Close a fork's descriptors: else its copies would hold the locks after the parent's death."""
    for lock in list(_held):
        fd, lock._fd = lock._fd, None  # noqa: SLF001 - the other half of the class
        if fd is not None:
            os.close(fd)


os.register_at_fork(after_in_child=_leave_locks_to_parent)


def plain_name(name: str) -> str:
    """Return a name unless it could lead out of its folder.

    Raises:
        StorageError: The name is empty, ``.`` or ``..``, or has a slash, a NUL or too many bytes.
    """
    plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
    if not plain or len(os.fsencode(name)) > MAX_NAME_NBYTES:
        raise StorageError(f"{name!r:.300} is no plain name of a file in one folder")
    return name


def temporary_of(name: str) -> str | None:
    """Return the name that a writer's temporary file was to get; None for any other name."""
    found = _TEMPORARY.fullmatch(name)
    return None if found is None else found[1]


def write_at(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write buffers one after the other, from `offset` on.

    Raises:
        OSError: The system's error; bytes written until then stay.
    """
    nbytes = sum(each.nbytes for each in buffers)
    if _move(os.pwritev, fd, buffers, offset) != nbytes:
        raise OSError(errno.EIO, "the file takes no more bytes")


def read_at(fd: int, buffers: Sequence[memoryview], offset: int) -> int:
    """Fill buffers one after the other from a file; return the bytes read: fewer at its end."""
    return _move(os.preadv, fd, buffers, offset)


def _move(
    move: Callable[[int, list[memoryview], int], int],
    fd: int,
    buffers: Sequence[memoryview],
    offset: int,
) -> int:
    """Repeat a vectored call until all is moved or nothing moves any more."""
    left = [each for each in buffers if each.nbytes]
    first, moved = 0, 0
    while first < len(left):
        count = move(fd, left[first : first + _MAX_BUFFERS], offset + moved)
        if count == 0:
            break
        moved += count
        while first < len(left) and count >= left[first].nbytes:
            count -= left[first].nbytes
            first += 1
        if count:
            left[first] = left[first][count:]
    return moved


@contextlib.contextmanager
def storage_errors(what: str) -> Iterator[None]:
    """Translate the system's errors.

    Args:
        what: The operation, to start the sentence.

    Raises:
        StorageError: Errors of files and disks.
        DescriptorLimitError: No descriptor is left.
        StagingMemoryError: No memory is left.
    """
    try:
        yield
    except WTransferError:
        raise
    except OSError as error:
        text = f"{what} failed: {error.strerror}"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise DescriptorLimitError(
                f"{text}; raise the limit (ulimit -n) or close files"
            ) from error
        if error.errno == errno.ENOMEM:
            raise StagingMemoryError(text) from error
        raise StorageError(text + _ADVICE.get(error.errno or 0, "")) from error


_ADVICE = {
    errno.ENOSPC: "; free some room there, or take another folder",
    errno.EDQUOT: "; free some room there, or take another folder",
    errno.EROFS: "; take a folder that can be written to",
    errno.EACCES: "; ask for permission, or take another folder",
    errno.ELOOP: "; it is a symbolic link, and those are not followed there",
    errno.ENOTDIR: "; it is a file, or a symbolic link where those are not followed",
    errno.ENXIO: "; only regular files are read",
}
