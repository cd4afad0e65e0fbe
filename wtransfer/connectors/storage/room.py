"""Keeps the folder within its bound: what was not used for longest goes first."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from wtransfer.errors import StorageError, WTransferError
from wtransfer.transport.files import storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer.connectors.storage.counts import Counts
    from wtransfer.connectors.storage.store import Store
    from wtransfer.transport.files import Folder

_SLACK = 64
_FREED = 8
# A file, a pipe, a link; or a folder that is not ours to read.
_PLANTED = frozenset({errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM})


class _Kept(NamedTuple):
    used_ns: int
    nbytes: int
    shelf: str
    name: str


class Room:
    """Room for blocks. Several processes may keep the same folder within the same bound.

    None of them knows what the others write until it looks again. It does so before it has written
    a `portion`. Whoever makes room for no more than that at once, or for one block where that is
    more, is above the bound by no more than that, and they all together by that much each.

    Args:
        store: The folder.
        max_bytes: The bound.
        counts: Gets ``evicted``.
    """

    def __init__(self, store: Store, max_bytes: int, counts: Counts) -> None:
        self._store = store
        self._max = max_bytes
        self._counts = counts
        self._seen: int | None = None
        self._written = 0

    @property
    def portion(self) -> int:
        """Bytes that are written at most between two looks: a sixty-fourth of the bound."""
        return self._max // _SLACK

    def make(self, nbytes: int) -> bool:
        """Make room for so many bytes, which are then written.

        Returns:
            Whether there is any; False for what is larger than the bound.

        Raises:
            StorageError: The disk fails.
        """
        if nbytes > self._max:
            return False
        seen, written = self._seen, self._written + nbytes
        if seen is None or written > self.portion or seen + written > self._max:
            # Some more, so that it need not be done again for the next block.
            most = self._max - nbytes
            self._seen = self._shrink(most, most - self._max // _FREED)
            written = nbytes
        self._written = written
        return True

    def fill_up(self, error: BaseException) -> None:
        """Hear that a write has failed; where the disk is full, the oldest blocks make room."""
        if getattr(error.__cause__, "errno", None) not in (errno.ENOSPC, errno.EDQUOT):
            return
        with contextlib.suppress(WTransferError):
            total = sum(each.nbytes for each in self._kept())
            self._seen = self._shrink(0, total - total // _FREED)
            self._written = 0

    def _shrink(self, most: int, enough: int) -> int:
        """Remove the oldest blocks if there is more than `most`, until there is `enough`.

        Returns:
            The bytes that stay.
        """
        kept = sorted(self._kept())
        total = sum(each.nbytes for each in kept)
        if total <= most:
            return total
        for each in kept:
            if total <= max(0, enough):
                break
            if self._removes(each):
                total -= each.nbytes
        for shelf in {each.shelf for each in kept}:
            self._store.drop_if_empty(shelf)
        return total

    def _kept(self) -> Iterator[_Kept]:
        for name in self._store.shelves():
            shelf = self._shelf(name)
            if shelf is not None:
                with shelf, storage_errors(f"listing {shelf.path!r}"):
                    yield from _files(name, shelf)

    def _shelf(self, name: str) -> Folder | None:
        """Open a shelf; None if there is none any more, or something that we have not made."""
        try:
            return self._store.shelf(name)
        except StorageError as error:
            if getattr(error.__cause__, "errno", None) not in _PLANTED:
                raise
            self._counts.fail("shelves_skipped", "planted", error)
            return None

    def _removes(self, kept: _Kept) -> bool:
        with contextlib.suppress(WTransferError):
            shelf = self._store.shelf(kept.shelf)
            if shelf is not None:
                with shelf:
                    shelf.remove(kept.name)
            self._counts.add("evicted")
            return True
        return False


def _files(shelf_name: str, shelf: Folder) -> Iterator[_Kept]:
    with os.scandir(shelf.fd) as entries:
        for entry in entries:
            # Others remove files, too.
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                nbytes = found.st_size if stat.S_ISREG(found.st_mode) else 0
                yield _Kept(found.st_mtime_ns, nbytes, shelf_name, entry.name)
