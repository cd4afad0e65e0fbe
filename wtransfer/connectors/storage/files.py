"""The files of one rank: a header, then the bytes of a block.

A file gets its name when it is whole, and is never written to again. So whoever has it open reads
the same bytes to its end, also when it is replaced or removed meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from typing import TYPE_CHECKING, Literal

from wtransfer.blocks import HEADER_NBYTES, BlockHeader, Mismatch, checksum
from wtransfer.connectors.storage.store import file_name
from wtransfer.errors import StorageError, WTransferError
from wtransfer.transport.files import read_at, storage_errors, write_at

if TYPE_CHECKING:
    from wtransfer.blocks import BlockGeometry
    from wtransfer.connectors.storage.store import Store
    from wtransfer.transport.files import Folder

Reason = Mismatch | Literal["planted", "unreadable", "broken"]
"""Why a block was not loaded. *planted*: something of its name is no plain file of ours: a link, a
pipe, a folder, a second name of another file. *unreadable*: the system could not read it, which may
pass. *broken*: the disk could not, and it would be promised for ever."""

_NOBODYS_FAULT = frozenset({"absent", "unreadable"})
_PLANTED = frozenset({errno.ELOOP, errno.ENXIO, errno.ENOTDIR, errno.ENODEV})


class BlockFiles:
    """Reads and writes the files of one rank.

    Args:
        store: Where they are.
        geometry: Of a block.
        rank: The rank.
    """

    def __init__(self, store: Store, geometry: BlockGeometry, rank: int) -> None:
        self._store = store
        self._geometry = geometry.digest
        self._rank = rank
        self.nbytes = geometry.nbytes
        """Bytes of a block."""
        self.file_nbytes = HEADER_NBYTES + geometry.nbytes
        """Bytes of a file."""

    def has(self, shelf: Folder, name: bytes) -> bool:
        """Return whether there is a file of the right kind and size; its bytes are not read."""
        found = look(shelf, file_name(name, self._rank))
        return found is not None and found.st_size == self.file_nbytes

    # -- reading

    def read(
        self, shelf: Folder, name: bytes, into: memoryview, used_ns: int | None = None
    ) -> Reason | None:
        """Read a block, and prove that it is that one.

        Args:
            shelf: Where.
            name: Its name.
            into: Memory of the caller's own, `nbytes` long. Only if None is returned it is the
                block; else it is of no use.
            used_ns: When it was used, as is noted for `Room`; None: now.

        Returns:
            Why it is not the block; None if it is. What is damaged has been set aside.

        Cost: never waits for another process.
        """
        try:
            fd = shelf.open_file(file_name(name, self._rank))
        except WTransferError as error:
            return self._refused(shelf, name, _why_not_opened(error))
        try:
            reason = self._read(fd, name, into)
            if reason is None:
                with contextlib.suppress(OSError):
                    _note_use(fd, used_ns)
            return self._refused(shelf, name, reason)
        finally:
            os.close(fd)

    def _read(self, fd: int, name: bytes, into: memoryview) -> Reason | None:
        try:
            found = os.fstat(fd)
            if found.st_nlink > 1:
                return "planted"
            if found.st_size != self.file_nbytes:
                return "length"
            packed = bytearray(HEADER_NBYTES)
            nbytes = read_at(fd, [memoryview(packed), into], 0)
        except OSError as error:
            return "broken" if error.errno == errno.EIO else "unreadable"
        if nbytes != self.file_nbytes:
            return "length"
        header = BlockHeader.unpack(bytes(packed))
        if not isinstance(header, BlockHeader):
            return "torn" if header == "absent" else header
        reason = header.mismatch(name, self._geometry, self.nbytes, self._rank)
        if reason is None and checksum(into) != header.checksum:
            reason = "checksum"
        return reason

    def _refused(self, shelf: Folder, name: bytes, reason: Reason | None) -> Reason | None:
        if reason is not None and reason not in _NOBODYS_FAULT:
            self._store.set_aside(shelf, file_name(name, self._rank))
        return reason

    # -- writing

    def write(
        self, shelf: Folder, name: bytes, payload: memoryview, used_ns: int | None = None
    ) -> None:
        """Write a block; everybody sees all of it or nothing.

        It is not brought to the disk: after a power failure the checksum tells what is whole.

        Args:
            shelf: Where.
            name: Its name.
            payload: Its bytes.
            used_ns: As for `read`.

        Raises:
            WTransferError: It could not be written, and nothing is left of it.
        """
        header = BlockHeader(name, self._geometry, self.nbytes, checksum(payload), self._rank)
        final = file_name(name, self._rank)
        with (
            self._store.incoming.file() as (temporary, fd),
            storage_errors(f"writing '{shelf.path}/{final}'"),
        ):
            os.fchmod(fd, 0o600)
            write_at(fd, [memoryview(header.pack()), payload], 0)
            _note_use(fd, used_ns)
            self._give_name(temporary, shelf, final)

    def _give_name(self, temporary: str, shelf: Folder, final: str) -> None:
        source = self._store.incoming.folder.fd
        try:
            os.replace(temporary, final, src_dir_fd=source, dst_dir_fd=shelf.fd)
        except IsADirectoryError:
            # Planted: all else would have been replaced.
            self._store.set_aside(shelf, final)
            os.replace(temporary, final, src_dir_fd=source, dst_dir_fd=shelf.fd)


def look(shelf: Folder, name: str) -> os.stat_result | None:
    """Return what there is of a plain file; None if there is none, or something else.

    Raises:
        StorageError: The disk fails.

    Cost: one system call; opens nothing, so nothing is waited for.
    """
    try:
        found = os.stat(name, dir_fd=shelf.fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    except OSError:
        with storage_errors(f"looking for '{shelf.path}/{name}'"):
            raise
    return found if stat.S_ISREG(found.st_mode) else None


def _note_use(fd: int, used_ns: int | None) -> None:
    when = time.time_ns() if used_ns is None else used_ns
    os.utime(fd, ns=(when, when))


def _why_not_opened(error: WTransferError) -> Reason:
    cause = error.__cause__
    if isinstance(cause, FileNotFoundError):
        return "absent"
    # Without a cause: it was opened, and is no regular file.
    if getattr(cause, "errno", None) == errno.EIO:
        return "broken"
    planted = isinstance(error, StorageError) and (
        cause is None or getattr(cause, "errno", None) in _PLANTED
    )
    return "planted" if planted else "unreadable"
