"""Files that other processes look at while they change: atomic, no-follow, bounded, swept.

A `Folder` is opened once and everything in it is reached by its descriptor and a plain name. So no
name leads out of it, and no symbolic link, pipe or device in it is ever followed or waited for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from typing import TYPE_CHECKING

from wtransfer.errors import (
    DescriptorLimitError,
    StagingMemoryError,
    StorageError,
    WTransferError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from typing_extensions import Self

MAX_NAME_NBYTES = 255
"""Longest name of a file, in bytes."""

# Without O_NONBLOCK, opening a pipe would wait for its other end.
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_MAX_BUFFERS = os.sysconf("SC_IOV_MAX")
_TEMPORARY = re.compile(r"\.(.+)\.[0-9a-f]{16}\.tmp", re.DOTALL)


class Folder:
    """An open folder.

    Args:
        path: Where it is. In the path itself links are followed, if it has no `parent`.
        parent: The folder in which `path` is a plain name.

    Raises:
        StorageError: There is none, it is no folder, or may not be read.
        DescriptorLimitError: No descriptor is left.
    """

    def __init__(self, path: str | os.PathLike[str], *, parent: Folder | None = None) -> None:
        self.path: str = os.fspath(path) if parent is None else f"{parent.path}/{path}"
        """Where it was when it was opened."""
        with storage_errors(f"opening the folder {self.path!r}"):
            if parent is None:
                self.fd = os.open(path, _FOLDER)
            else:
                name = plain_name(str(path))
                self.fd = os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent.fd)

    def close(self) -> None:
        """Close it; a second call does nothing."""
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
            os.mkdir(plain_name(name), dir_fd=self.fd)
        return Folder(name, parent=self)

    def names(self) -> list[str]:
        """Return the names of everything in it, sorted."""
        with storage_errors(f"listing {self.path!r}"):
            return sorted(os.listdir(self.fd))  # noqa: PTH208 - by descriptor

    # -- files

    def open_file(self, name: str, *, follow: bool = False) -> int:
        """Open a file for reading.

        Args:
            name: Plain name.
            follow: Whether a link by that name is followed, wherever it leads. For folders of the
                user's own: download caches consist of links.

        Returns:
            A descriptor; the caller closes it.

        Raises:
            StorageError: No such file, or it is something else: a link, a folder, a pipe.

        Cost: never waits for another process.
        """
        with storage_errors(f"opening {self._shown(name)}"):
            flags = _READ if follow else _READ | os.O_NOFOLLOW
            fd = os.open(plain_name(name), flags, dir_fd=self.fd)
        try:
            self._check_regular(fd, name)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def create_file(self, name: str) -> int:
        """Create a file that must not exist, for reading and writing; the caller closes it."""
        with storage_errors(f"creating {self._shown(name)}"):
            return os.open(plain_name(name), _CREATE, 0o666, dir_fd=self.fd)

    def read(self, name: str, max_nbytes: int, *, follow: bool = False) -> bytes | None:
        """Return what a file holds; None if there is none.

        Args:
            name: Plain name.
            max_nbytes: Most bytes that are read.
            follow: As in `open_file`.

        Raises:
            StorageError: It is larger than `max_nbytes`, no file, or cannot be read.
        """
        try:
            fd = self.open_file(name, follow=follow)
        except StorageError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        with storage_errors(f"reading {self._shown(name)}"), open(fd, "rb") as file:  # noqa: PTH123
            # What it claims first: nothing is read of a file that is too large.
            nbytes = os.fstat(fd).st_size
            data = file.read(max_nbytes + 1) if nbytes <= max_nbytes else b""
        if max(nbytes, len(data)) > max_nbytes:
            raise StorageError(f"{self._shown(name)} is larger than {max_nbytes:,} bytes")
        return data

    def replace(self, name: str, data: bytes) -> None:
        """Write a file so that everybody sees the old one or the new one, also after a crash.

        Raises:
            StorageError: It could not be written; the old one is as it was.
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
        """Rename something in it; a folder must not exist under the new name."""
        with storage_errors(f"renaming {self._shown(name)} to {new!r}"):
            os.rename(plain_name(name), plain_name(new), src_dir_fd=self.fd, dst_dir_fd=self.fd)
        self.sync()

    def sync(self) -> None:
        """Bring its names to the disk."""
        with storage_errors(f"syncing {self.path!r}"):
            try:
                os.fsync(self.fd)
            except OSError as error:
                # Some file systems have nothing to sync for a folder, and say so like this.
                if error.errno != errno.EINVAL:
                    raise

    def remove(self, name: str) -> None:
        """Remove a file, a link itself, or a folder with what is in it. None: does nothing."""
        with storage_errors(f"removing {self._shown(name)}"):
            try:
                mode = os.stat(plain_name(name), dir_fd=self.fd, follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    self._remove_folder(name)
                else:
                    os.unlink(name, dir_fd=self.fd)
            except FileNotFoundError:
                return

    def _remove_folder(self, name: str) -> None:
        with Folder(name, parent=self) as inner:
            for each in inner.names():
                inner.remove(each)
        os.rmdir(name, dir_fd=self.fd)

    def sweep(self, is_leftover: Callable[[str], bool]) -> list[str]:
        """Remove what `is_leftover` says of its name, as far as it can be; return what stays."""
        return [each for each in self.names() if is_leftover(each) and not self._removes(each)]

    def _removes(self, name: str) -> bool:
        with contextlib.suppress(WTransferError):
            self.remove(name)
            return True
        return False

    def _check_regular(self, fd: int, name: str) -> None:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            raise StorageError(
                f"{self._shown(name)} is no regular file ({stat.filemode(mode)}); only those are "
                "read"
            )

    def _shown(self, name: str) -> str:
        return repr(f"{self.path}/{name:.300}")


def plain_name(name: str) -> str:
    """Return a name unless it could lead out of its folder.

    Raises:
        StorageError: It is empty, ``.`` or ``..``, or has a slash, a NUL or too many bytes.
    """
    plain = name not in ("", ".", "..") and "/" not in name and "\0" not in name
    if not plain or len(os.fsencode(name)) > MAX_NAME_NBYTES:
        raise StorageError(f"{name!r:.300} is no plain name of a file in one folder")
    return name


def temporary_of(name: str) -> str | None:
    """Return what a file was to be renamed to when its writer died; None for any other name."""
    found = _TEMPORARY.fullmatch(name)
    return None if found is None else found[1]


def write_at(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write buffers one after the other, from `offset` on.

    Raises:
        OSError: As the system says; what was written until then stays.
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
    """Turn what the system says of files into our errors.

    Args:
        what: What was being done, to start the sentence.

    Raises:
        StorageError: Of files and disks.
        DescriptorLimitError: No descriptor is left.
        StagingMemoryError: No memory is left.
    """
    try:
        yield
    except WTransferError:
        raise
    except OSError as error:
        raise _ours(what, error) from error


def _ours(what: str, error: OSError) -> WTransferError:
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return DescriptorLimitError(
            f"{what} failed: {error.strerror}; raise the limit (ulimit -n) or close files"
        )
    if error.errno == errno.ENOMEM:
        return StagingMemoryError(f"{what} failed: {error.strerror}")
    return StorageError(f"{what} failed: {error.strerror}{_ADVICE.get(error.errno or 0, '')}")


_ADVICE = {
    errno.ENOSPC: "; free some room there, or take another folder",
    errno.EDQUOT: "; free some room there, or take another folder",
    errno.EROFS: "; take a folder that can be written to",
    errno.EACCES: "; ask for permission, or take another folder",
    errno.ELOOP: "; it is a symbolic link, and those are not followed there",
    errno.ENXIO: "; only regular files are read",
}
