"""The one process that writes to a folder of versions."""

from __future__ import annotations

import logging
import re
import secrets
import threading
from typing import TYPE_CHECKING

import msgspec

from wtransfer.checkpoint.versions import (
    CURRENT_NAME,
    folder_name,
    number_of,
    read_listing,
    write_listing,
)
from wtransfer.errors import ClosedError, WTransferError
from wtransfer.transport.files import Folder, storage_errors, temporary_of
from wtransfer.transport.folder_lock import FolderLock

if TYPE_CHECKING:
    from pathlib import Path

    from wtransfer.checkpoint.versions import Version

logger = logging.getLogger(__name__)

REMOVAL_GRACE_S = 5.0
"""How long closing waits for old versions to be removed; what stays, the next keeper removes."""

_INCOMING = re.compile(r"\.incoming-[0-9a-f]{16}")


class Keeper:
    """Has a folder of versions to itself: publishes, commits, and removes what is not kept.

    A version goes through three steps, and its publisher may die between any two:

    1. It is written to a folder of a passing name (`begin`). Dead: the next keeper removes it.
    2. That folder gets its name (`publish`). Dead: nothing lists it, the next keeper removes it.
    3. ``current.json`` lists it (`commit`), and versions beyond the kept ones are removed. Dead:
       the next keeper removes what is not listed any more.

    Args:
        root: The folder; it is made if it is not there.
        keep: How many versions to keep.

    Raises:
        StorageInUseError: Another process publishes there.
        StorageError: The folder cannot be made, or not be written to.
        ManifestError: Its ``current.json`` is damaged. Nothing is removed then.
    """

    def __init__(self, root: Path, keep: int) -> None:
        self._keep = keep
        # Whoever lets go of the folder waits for a commit that is under way, and nobody starts one
        # afterwards: the folder may have another keeper by then.
        self._lock = threading.Lock()
        self._removing: threading.Thread | None = None
        with storage_errors(f"making the folder {str(root)!r}"):
            root.mkdir(parents=True, exist_ok=True)
        self.folder = Folder(root)
        """The folder of versions."""
        try:
            self._claim = FolderLock(self.folder)
        except BaseException:
            self.folder.close()
            raise
        try:
            self._versions = read_listing(self.folder)
            self._sweep()
        except BaseException:
            self.close()
            raise

    def begin(self) -> tuple[str, Folder]:
        """Make a folder to write a version to; return its name, and the folder, open."""
        self._check_open()
        name = f".incoming-{secrets.token_hex(8)}"
        return name, self.folder.make_folder(name)

    def publish(self, name: str, fingerprint: str) -> str:
        """Give a folder that has been written and synced its name, and return it."""
        with self._lock:
            self._check_open()
            numbers = [n for each in self.folder.names() if (n := number_of(each)) is not None]
            new = folder_name(max(numbers, default=0) + 1, fingerprint)
            self.folder.rename(name, new)
            return new

    def commit(self, version: Version) -> None:
        """Make a published version the current one, and remove versions beyond the kept ones.

        What has been written just now replaces an older copy of the same weights: one is enough,
        and this one is known to be whole.
        """
        with self._lock:
            self._check_open()
            self._versions = _with(self._versions, version)[-self._keep :]
            write_listing(self.folder, self._versions)
            known = {each.folder for each in self._versions}
            gone = [n for n in self.folder.names() if number_of(n) is not None and n not in known]
        self._remove_later(gone)

    def discard(self, name: str) -> None:
        """Remove a folder that was not committed."""
        with self._lock:
            if self._claim.held and name not in {each.folder for each in self._versions}:
                self.folder.remove(name)

    def close(self) -> None:
        """Let others publish there; a second call does nothing."""
        if self._removing is not None:
            self._removing.join(REMOVAL_GRACE_S)
        with self._lock:
            self._claim.release()
            self.folder.close()

    def _remove_later(self, names: list[str]) -> None:
        """Remove on another thread: gigabytes take longer than the round's end may wait."""
        self._removing = threading.Thread(
            target=self._remove, args=(names,), name="wtransfer-remove", daemon=True
        )
        self._removing.start()

    def _remove(self, names: list[str]) -> None:
        try:
            # Opened anew: the keeper may close its own meanwhile.
            with Folder(self.folder.path) as folder:
                left = folder.sweep(names.__contains__)
        except WTransferError as error:
            logger.warning("old versions cannot be removed now: %s", error)
        else:
            for name in left:
                logger.warning("%s/%s cannot be removed", self.folder.path, name)

    def _sweep(self) -> None:
        """Remove what publishers have left that died here; only names of ours."""
        known = {each.folder for each in self._versions}
        names = [name for name in self.folder.names() if name not in known and _is_ours(name)]
        self._remove(names)

    def _check_open(self) -> None:
        if not self._claim.held:
            raise ClosedError(f"{self.folder.path!r} was given up; make another engine")


def _with(versions: list[Version], new: Version) -> list[Version]:
    """Return the listing with one more, and with one copy of each set of weights."""
    others = [v for v in versions if (v.version, v.fingerprint) != (new.version, new.fingerprint)]
    return [*(_moved(v, new) for v in others), new]


def _moved(version: Version, new: Version) -> Version:
    if version.fingerprint != new.fingerprint:
        return version
    return msgspec.structs.replace(version, folder=new.folder)


def _is_ours(name: str) -> bool:
    if number_of(name) is not None or temporary_of(name) == CURRENT_NAME:
        return True
    return _INCOMING.fullmatch(name) is not None
