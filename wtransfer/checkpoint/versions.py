"""A folder of committed versions, which any process may read and one at a time may write.

``current.json`` is the truth: the index of the versions that are retained; the last one is current.
The index is replaced atomically when a version has been committed. ::

    current.json                   the index, oldest version first
    00000012-3f2a9c1b7d04/         one version: a checkpoint in the usual layout, and its manifest
        model.safetensors
        wtransfer.json
    .wtransfer-lock                while a process writes there: its name
    .incoming-8d0c5f6a1b2c3d4e/    a version while it is being written

Folders are named by a number and the fingerprint; labels, which may be any text, stand in files.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from wtransfer.checkpoint.source import CheckpointSource, Digest
from wtransfer.errors import (
    ClosedError,
    ManifestError,
    StorageError,
    StorageInUseError,
    VersionNotKeptError,
    WTransferError,
)
from wtransfer.transport.files import Folder, FolderLock, storage_errors, temporary_of

if TYPE_CHECKING:
    from collections.abc import Collection

logger = logging.getLogger(__name__)

CURRENT_NAME = "current.json"
"""File that lists the versions."""
MAX_RETAINED = 1000
"""Most versions in an index."""
REMOVAL_GRACE_S = 5.0
"""Longest wait of closing for old versions to be removed, in seconds; the next writer removes the
rest."""
_MAX_INDEX_NBYTES = 4 << 20
_FOLDER_PATTERN = r"[0-9]{8,18}-[0-9a-f]{12}"
_FOLDER = re.compile(_FOLDER_PATTERN, re.ASCII)
_INCOMING = re.compile(r"\.incoming-[0-9a-f]{16}")


class Version(msgspec.Struct, frozen=True):
    """A committed version."""

    version: str
    """Label."""
    fingerprint: Digest
    """Identity."""
    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    """Bytes of its tensors."""
    committed_at: float
    """Time of the commit, in seconds since the epoch."""
    folder: Annotated[str, msgspec.Meta(pattern=rf"^{_FOLDER_PATTERN}\Z")]
    """Its folder, in the store."""


class Index(msgspec.Struct, frozen=True):
    """Content of ``current.json``."""

    format: Literal["wtransfer-versions/1"]
    """Name and version of this format."""
    versions: Annotated[list[Version], msgspec.Meta(max_length=MAX_RETAINED)]
    """Oldest first; the last one is current."""


class VersionStore:
    """Reads a folder of versions.

    Args:
        root: The folder.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def versions(self) -> list[Version]:
        """Return the versions that are retained, oldest first; the last one is current.

        Raises:
            StorageError: There is no such folder, or it cannot be read.
            ManifestError: ``current.json`` is damaged.
        """
        with Folder(self.root) as folder:
            return _read_index(folder)

    def find(self, fingerprint: str) -> Version:
        """Return the latest version of that identity.

        Raises:
            VersionNotKeptError: The version is not retained, or not any more.
        """
        found = [each for each in self.versions() if each.fingerprint == fingerprint]
        if not found:
            raise VersionNotKeptError(
                f"{str(self.root)!r} does not keep a version with the fingerprint {fingerprint}"
            )
        return found[-1]

    def folder_of(self, version: Version) -> Path:
        """Return the path of a version's folder."""
        return self.root / version.folder

    def source(self, version: Version) -> CheckpointSource:
        """Return a version's weights, with the digests of their commit.

        Raises:
            SourceError: A file is missing or damaged, or a symbolic link.
            ManifestError: The manifest is missing, damaged, or that of another version.
        """
        source = CheckpointSource(self.folder_of(version), follow_links=False)
        found = None if source.manifest is None else source.manifest.fingerprint
        if found != version.fingerprint:
            raise ManifestError(
                f"{str(self.folder_of(version))!r} should hold the weights with the fingerprint "
                f"{version.fingerprint}; its manifest "
                f"{'is missing' if found is None else f'says {found}'}"
            )
        return source


class VersionWriter:
    """Writes to a folder of versions, as the only process that does.

    A version is added in three steps, and its writer may die between any two:

    1. The version is written to a folder with a temporary name (`begin`). Dead: the next writer
       removes it.
    2. That folder gets its name (`publish`). Dead: no index has it, the next writer removes it.
    3. The index gets the version (`commit`), and versions beyond the retained ones are removed.
       Dead: the next writer removes folders that no index has.

    Args:
        root: The folder; made if it is not there.
        num_retained: Versions to retain, the current one among them.

    Raises:
        StorageInUseError: Another process writes there.
        StorageError: The folder cannot be made, or not be written to.
        ManifestError: The folder's ``current.json`` is damaged. Nothing is removed then.
    """

    def __init__(self, root: Path, num_retained: int) -> None:
        self._num_retained = num_retained
        # Closing waits for a commit, and none begins afterwards: another process may write then.
        self._writing = threading.Lock()
        self._removal: threading.Thread | None = None
        with storage_errors(f"making the folder {str(root)!r}"):
            root.mkdir(mode=0o775, parents=True, exist_ok=True)
        self._folder = Folder(root)
        try:
            self._lock = FolderLock(self._folder)
        except BaseException:
            self._folder.close()
            raise
        try:
            # Leftovers of dead writers; only names of ours.
            known = {CURRENT_NAME, *(each.folder for each in _read_index(self._folder))}
            left = [each for each in self._folder.names() if each not in known and _is_ours(each)]
            self._remove(left)
        except BaseException:
            self.close()
            raise

    def begin(self) -> tuple[str, Folder]:
        """Make a folder to write a version to; return its name, and the folder, open."""
        with self._writing:
            if self._lock.held and not self._lock.in_force:
                # The lock's file was removed by hand. Another process may hold the folder now.
                lost, self._lock = self._lock, FolderLock(self._folder)
                lost.release()
            self._check_locked()
            name = f".incoming-{secrets.token_hex(8)}"
            return name, self._folder.make_folder(name)

    def publish(self, name: str, fingerprint: str) -> str:
        """Give a folder that has been written and synced its name, and return it."""
        with self._writing:
            self._check_locked()
            numbers = [int(each.partition("-")[0]) for each in self._numbered()]
            new = f"{max(numbers, default=0) + 1:08d}-{fingerprint[:12]}"
            self._folder.rename(name, new)
            return new

    def commit(self, version: Version) -> None:
        """Make a published version the current one, and remove versions beyond the retained ones.

        The copy written just now replaces an older one of the same weights: one copy is enough, and
        the new one is known to be whole.
        """
        with self._writing:
            self._check_locked()
            versions = [
                msgspec.structs.replace(each, folder=version.folder)
                if each.fingerprint == version.fingerprint
                else each
                # Read again: the index may have changed while the lock was not in force.
                for each in _read_index(self._folder)
                if (each.version, each.fingerprint) != (version.version, version.fingerprint)
            ]
            index = Index("wtransfer-versions/1", [*versions, version][-self._num_retained :])
            self._folder.replace(CURRENT_NAME, msgspec.json.format(msgspec.json.encode(index)))
            retained = {each.folder for each in index.versions}
            superseded = [each for each in self._numbered() if each not in retained]
            # On another thread: gigabytes take longer than the round's end may wait.
            removal = threading.Thread(
                target=self._remove,
                args=(superseded, self._removal),
                name="wtransfer-remove",
                daemon=True,
            )
            removal.start()
            # Not before: a thread that was not started cannot be joined.
            self._removal = removal

    def discard(self, name: str) -> None:
        """Remove a folder that was not committed."""
        with self._writing:
            if self._lock.in_force and name not in {e.folder for e in _read_index(self._folder)}:
                self._folder.remove(name)

    def close(self) -> None:
        """Let other processes write there; idempotent."""
        with self._writing:
            # Under the lock, which no removal takes: a commit that goes on elsewhere comes first.
            if self._removal is not None:
                # The last removal, which waits for those before it.
                self._removal.join(REMOVAL_GRACE_S)
            self._lock.release()
            self._folder.close()

    def _check_locked(self) -> None:
        if not self._lock.held:
            raise ClosedError(f"{self._folder.path!r} was given up; make another engine")
        if not self._lock.in_force:
            raise StorageInUseError(
                f"the lock of {self._folder.path!r} was removed or replaced by hand: another "
                "publisher may be writing there, so nothing is written; publish again"
            )

    def _numbered(self) -> list[str]:
        return [each for each in self._folder.names() if _FOLDER.fullmatch(each)]

    def _remove(self, names: Collection[str], after: threading.Thread | None = None) -> None:
        if after is not None:
            after.join()
        try:
            # Opened anew: the writer may close its own meanwhile.
            with Folder(self._folder.path) as folder:
                left = folder.sweep(names.__contains__)
        except WTransferError as error:
            logger.warning("old versions cannot be removed now: %s", error)
        else:
            for name in left:
                logger.warning("%s/%s cannot be removed", self._folder.path, name)


def _is_ours(name: str) -> bool:
    ours = _FOLDER.fullmatch(name) or _INCOMING.fullmatch(name)
    return ours is not None or temporary_of(name) == CURRENT_NAME


# Made once: threads that read a struct for the first time at once end the process (msgspec 0.22).
_decode_index = msgspec.json.Decoder(Index).decode


def _read_index(root: Folder) -> list[Version]:
    try:
        raw = root.read(CURRENT_NAME, _MAX_INDEX_NBYTES)
        return [] if raw is None else _decode_index(raw).versions
    except (StorageError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(
            f"'{root.path}/{CURRENT_NAME}' cannot be read: {error}; it lists the versions there, "
            "so nothing is done with them until it is repaired, or moved away with them"
        ) from error
