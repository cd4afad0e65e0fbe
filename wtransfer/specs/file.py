"""Tier ``file``: blocks as files in a folder that instances may share.

Everything is in one folder of its own, which belongs to this user alone::

    <shared_storage_path>/wtransfer-kv-2/
        blocks/<key in hexadecimal>    whole blocks, never written to again
        incoming/<random name>         blocks that are being written, each locked by its writer

A block gets its name when it is whole, so a reader sees all of it or nothing. No name contains
anything that a user or a peer chose. Only plain files with one name are read: a link, a pipe, a
folder or a second name of a file is a miss, and the next `put` replaces it.

Bytes in ``blocks`` are bounded; the file that was not used for longest is evicted first. Processes
that share the folder bound it together: a process lists it again before it has written a
sixty-fourth of the bound, so each may be above it by that much, or by one block where that is more.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import msgspec

from wtransfer.deadline import Deadline
from wtransfer.errors import StorageError, WTransferError
from wtransfer.specs.interface import Tier
from wtransfer.transport.files import Folder, read_at, storage_errors, write_at

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

FORMAT = "wtransfer-kv-2"
"""Name of the folder within the shared one; another format of files gets another name."""

_SLACK = 64
_FREED = 8
_ABANDONED_S = 3600.0
SWEEP_S = 0.2
"""Longest sweep of leftovers at a start, and then with each block that is put, in seconds."""
_PRIVATE = 0o077
_WRITE = os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NOCTTY
_PLANTED = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV})
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


class FileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options in ``kv_connector_extra_config``."""

    shared_storage_path: Annotated[str, msgspec.Meta(min_length=1, pattern="^[^\0]*$")]
    """The folder; made where there is none. Other things may be in it as well."""
    max_bytes: Annotated[int, msgspec.Meta(ge=1)] = 16 << 30
    """Bytes of blocks that are kept, of all models, weights and instances together. Where instances
    that share the folder set different bounds, the smallest one holds."""


class FileTier(Tier):
    """Keeps blocks as files.

    Args:
        options: The options.

    Raises:
        StorageError: The folder cannot be made or read, or others may write there.
    """

    example_options: ClassVar[Mapping[str, Any]] = {"shared_storage_path": "/mnt/kv"}
    options_cls = FileOptions
    writes_after_get = False

    def __init__(self, options: FileOptions) -> None:
        self._options = options
        self._open_lock = threading.Lock()
        self._replaced: list[_Folders] = []
        self._folders = _Folders(self._options.shared_storage_path)
        self._room = _Room(self._options.max_bytes)

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether there is a plain file for each key; nothing is opened."""
        blocks = self._current().blocks

        def is_there(key: bytes) -> bool:
            try:
                return _is_plain(os.stat(key.hex(), dir_fd=blocks.fd, follow_symlinks=False))
            except FileNotFoundError:
                return False

        with storage_errors(f"looking at {blocks.path!r}"):
            return [is_there(key) for key in keys]

    def get(self, key: bytes, into: memoryview) -> bool:
        """Read a file of exactly this length, and set its time of use to now."""
        return _read(self._current().blocks, key, into)

    def get_many(self, items: Sequence[tuple[bytes, memoryview]]) -> list[bool]:
        """Read several files; the folder is looked up once."""
        blocks = self._current().blocks
        # From the end of a prefix to its head, which is thus used last and evicted last.
        return [_read(blocks, key, into) for key, into in reversed(items)][::-1]

    def put(self, key: bytes, data: memoryview) -> None:
        """Write a file and give it its name. No sync: a torn block is found by checksum.

        Raises:
            StorageError: The disk fails or is full, or ``max_bytes`` is too small for the block.
        """
        try:
            self._write(self._current(), key.hex(), data)
        except StorageError as error:
            if not isinstance(error.__cause__, (FileNotFoundError, BlockingIOError)):
                raise
            # A sweep came before the file's lock, or the folder was just removed.
            self._write(self._current(), key.hex(), data)

    def _current(self) -> _Folders:
        """Return the folders; make new ones if they were removed by hand."""
        folders = self._folders
        if not folders.are_removed():
            return folders
        with self._open_lock:
            if self._folders is folders:
                # Kept open: other threads may still use them.
                self._replaced.append(folders)
                self._folders = _Folders(self._options.shared_storage_path)
            return self._folders

    def _write(self, folders: _Folders, name: str, data: memoryview) -> None:
        blocks, incoming = folders.blocks, folders.incoming
        folders.sweep()
        self._room.make(blocks, data.nbytes)
        try:
            with folders.temporary() as (temporary, fd), storage_errors(f"writing {name!r}"):
                write_at(fd, [data], 0)
                _note_use(fd)
                try:
                    os.replace(temporary, name, src_dir_fd=incoming.fd, dst_dir_fd=blocks.fd)
                except IsADirectoryError:
                    # Planted: everything else would have been replaced.
                    aside = f"{secrets.token_hex(8)}.planted"
                    os.rename(name, aside, src_dir_fd=blocks.fd, dst_dir_fd=incoming.fd)
                    os.replace(temporary, name, src_dir_fd=incoming.fd, dst_dir_fd=blocks.fd)
        except StorageError as error:
            if getattr(error.__cause__, "errno", None) in _FULL:
                self._room.evict_for_full_disk(blocks)
            raise

    def remove(self, keys: Sequence[bytes]) -> None:
        """Remove files."""
        for key in keys:
            self._folders.blocks.remove(key.hex())

    def get_stats(self) -> Mapping[str, float]:
        """Return how many files this process has evicted."""
        return {"files_evicted_total": self._room.num_evicted}

    def close(self) -> None:
        """Close the folder; a second call does nothing."""
        for folders in (*self._replaced, self._folders):
            folders.close()


class _Folders:
    """The folders, open. Leftovers of writers that have died are swept, some at a time.

    A writer locks the file that it writes, and the kernel frees the lock at the writer's death. A
    sweep removes the files that it can lock. Where it comes between a file's creation and its lock,
    the writer finds the file locked or without a name, and writes another one.
    """

    def __init__(self, path: str) -> None:
        with contextlib.ExitStack() as on_error:
            with storage_errors(f"making the folder {path!r}"):
                os.makedirs(path, exist_ok=True)  # noqa: PTH103  # as everything here, by os
            with Folder(path) as shared, _private(shared, FORMAT) as base:
                self.blocks = on_error.enter_context(_private(base, "blocks"))
                """Whole blocks."""
                self.incoming = on_error.enter_context(_private(base, "incoming"))
                """Files that are being written."""
            # A start does not wait for those of a hundred crashes, which `put` comes back to.
            self._unswept = deque[str]()
            with contextlib.suppress(WTransferError):
                self._unswept.extend(self.incoming.names())
            self.sweep()
            on_error.pop_all()

    def are_removed(self) -> bool:
        """Return whether the folders have lost their names; not known of remote file systems."""
        with storage_errors(f"looking at {self.blocks.path!r}"):
            return not all(os.fstat(each.fd).st_nlink for each in (self.blocks, self.incoming))

    def close(self) -> None:
        self.blocks.close()
        self.incoming.close()

    @contextlib.contextmanager
    def temporary(self) -> Iterator[tuple[str, int]]:
        """Create a file that no sweep takes away; yield name and descriptor, leave nothing."""
        name = secrets.token_hex(8)
        fd = self.incoming.create_file(name)
        try:
            with storage_errors(f"locking {name!r}"):
                os.fchmod(fd, 0o600)
                if _locks(fd) is False:
                    raise BlockingIOError(errno.EWOULDBLOCK, "another process holds its lock")
            yield name, fd
        finally:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=self.incoming.fd)
            os.close(fd)

    def sweep(self) -> None:
        """Remove leftovers for `SWEEP_S`; any thread may call it.

        Files that cannot be removed, or are being removed by another sweep, stay.
        """
        deadline = Deadline(SWEEP_S)
        while self._unswept and not deadline.expired:
            with (
                contextlib.suppress(WTransferError, OSError, IndexError),
                contextlib.ExitStack() as closing,
            ):
                name = self._unswept.popleft()
                found = os.stat(name, dir_fd=self.incoming.fd, follow_symlinks=False)
                is_left = time.time() - found.st_mtime > _ABANDONED_S
                if stat.S_ISREG(found.st_mode):
                    # Some file systems lock only what may be written to.
                    fd = os.open(name, _WRITE, dir_fd=self.incoming.fd)
                    closing.callback(os.close, fd)
                    is_locked = _locks(fd)
                    is_left = is_left if is_locked is None else is_locked
                if is_left:
                    self.incoming.remove(name)


def _locks(fd: int) -> bool | None:
    """Lock a file until it is closed.

    Returns:
        True if nothing else holds the lock; None where the file system has no locks: an old file
        was left behind then.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return True


def _note_use(fd: int) -> None:
    # The system's own clock of files is too coarse to order the blocks of a prefix.
    now = time.time_ns()
    os.utime(fd, ns=(now, now))


def _is_plain(entry: os.stat_result) -> bool:
    # Without a name: removed, or replaced, since it was opened.
    return stat.S_ISREG(entry.st_mode) and entry.st_nlink <= 1


def _read(blocks: Folder, key: bytes, into: memoryview) -> bool:
    """Fill memory from a file of exactly its length, and set the file's time of use to now."""
    name = key.hex()
    with storage_errors(f"reading '{blocks.path}/{name}'"):
        try:
            fd = os.open(name, _READ, dir_fd=blocks.fd)
        except OSError as error:
            if error.errno in _PLANTED | {errno.ENOENT}:
                return False
            raise
        try:
            entry = os.fstat(fd)
            if not _is_plain(entry) or entry.st_size != into.nbytes:
                return False
            if read_at(fd, [into], 0) != into.nbytes:
                return False
            # Not on a read-only disk.
            with contextlib.suppress(OSError):
                _note_use(fd)
        finally:
            os.close(fd)
    return True


class _Kept(NamedTuple):
    used_ns: int
    nbytes: int
    name: str


class _Room:
    """Bounds the bytes of a folder that other processes write to as well. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max = max_bytes
        self._lock = threading.Lock()
        self._listed: int | None = None
        self._written = 0
        self.num_evicted = 0

    def make(self, blocks: Folder, nbytes: int) -> None:
        """Make room for a block that is then written."""
        if nbytes > self._max:
            raise StorageError(f"max_bytes={self._max:,} is less than a block of {nbytes:,} bytes")
        with self._lock:
            listed, written = self._listed, self._written + nbytes
            if listed is None or written > self._max // _SLACK or listed + written > self._max:
                # Some more than needed: else the next block would list the folder again.
                most = self._max - nbytes
                self._listed = self._shrink(blocks, most, most - self._max // _FREED)
                written = nbytes
            self._written = written

    def evict_for_full_disk(self, blocks: Folder) -> None:
        """Evict an eighth: the disk is full."""
        with self._lock, contextlib.suppress(WTransferError):
            total = sum(each.nbytes for each in _kept(blocks))
            self._listed = self._shrink(blocks, 0, total - total // _FREED)
            self._written = 0

    def _shrink(self, blocks: Folder, most: int, enough: int) -> int:
        """Evict down to `enough` bytes if there are more than `most`; return the bytes left."""
        kept = sorted(_kept(blocks))
        total = sum(each.nbytes for each in kept)
        if total <= most:
            return total
        for each in kept:
            if total <= max(0, enough):
                break
            with contextlib.suppress(WTransferError):
                blocks.remove(each.name)
                self.num_evicted += 1
                total -= each.nbytes
        return total


def _kept(blocks: Folder) -> list[_Kept]:
    kept = []
    with storage_errors(f"listing {blocks.path!r}"), os.scandir(blocks.fd) as entries:
        for entry in entries:
            # Other processes evict as well.
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                nbytes = found.st_size if stat.S_ISREG(found.st_mode) else 0
                kept.append(_Kept(found.st_mtime_ns, nbytes, entry.name))
    return kept


def _private(parent: Folder, name: str) -> Folder:
    """Open a folder that only this user may write to; make it where there is none.

    Raises:
        StorageError: The folder is another user's, or others may write there, or it is no folder.
    """
    with storage_errors(f"making '{parent.path}/{name}'"):
        try:
            os.mkdir(name, 0o700, dir_fd=parent.fd)
        except OSError as error:
            # On a read-only disk the folder may be there all the same.
            if error.errno not in (errno.EEXIST, errno.EROFS):
                raise
    folder = parent.folder(name)
    try:
        with storage_errors(f"looking at {folder.path!r}"):
            found = os.fstat(folder.fd)
        if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & _PRIVATE:
            raise StorageError(
                f"{folder.path!r} is not this user's alone (owner {found.st_uid}, "
                f"{stat.filemode(found.st_mode)}); KV cache holds what users wrote: remove it, or "
                "take another shared_storage_path"
            )
    except BaseException:
        folder.close()
        raise
    return folder
