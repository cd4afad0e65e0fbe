"""A folder of committed versions, as everybody may read it.

``current.json`` is the truth: it lists the versions that are kept, and the last one is current. It
is replaced as a whole when a version has been committed, so nobody ever sees another one there. ::

    current.json                   the versions, oldest first
    00000012-3f2a9c1b7d04/         one version: a checkpoint in the usual layout, and its manifest
        model.safetensors
        wtransfer.json
    .wtransfer-lock                while somebody publishes there: who that is
    .incoming-8d0c5f6a1b2c3d4e/    what that publisher is writing

Folders are named by a number and the fingerprint; labels, which may be any text, stand in files.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from wtransfer.checkpoint.manifest_file import Digest, ManifestFile, read_manifest
from wtransfer.errors import ManifestError, StorageError, VersionNotKeptError
from wtransfer.transport.files import Folder

if TYPE_CHECKING:
    from collections.abc import Sequence

CURRENT_NAME = "current.json"
"""File that lists the versions."""
MAX_KEPT = 1000
"""Most versions that are kept."""
_MAX_NBYTES = 4 << 20
_FOLDER_PATTERN = r"[0-9]{8,18}-[0-9a-f]{12}"
_FOLDER = re.compile(_FOLDER_PATTERN, re.ASCII)


class Version(msgspec.Struct, frozen=True):
    """One committed version."""

    version: str
    """Label."""
    fingerprint: Digest
    """Identity."""
    nbytes: Annotated[int, msgspec.Meta(ge=0)]
    """Bytes of its tensors."""
    committed_at: float
    """When, in seconds since the epoch."""
    folder: Annotated[str, msgspec.Meta(pattern=rf"^{_FOLDER_PATTERN}\Z")]
    """Where it is, in the store."""


class Listing(msgspec.Struct, frozen=True):
    """Content of ``current.json``."""

    format: Literal["wtransfer-versions/1"]
    """Says what this is, and how to read it."""
    versions: Annotated[list[Version], msgspec.Meta(max_length=MAX_KEPT)]
    """Oldest first; the last one is current."""

    def encode(self) -> bytes:
        """Return the file's bytes."""
        return msgspec.json.format(msgspec.json.encode(self), indent=1)


class VersionStore:
    """Reads a folder of versions; writing is `Keeper`'s.

    Args:
        root: The folder.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def versions(self) -> list[Version]:
        """Return what is kept, oldest first; the last one is current.

        Raises:
            StorageError: There is no such folder, or it cannot be read.
            ManifestError: ``current.json`` is damaged.
        """
        with Folder(self.root) as folder:
            return read_listing(folder)

    def find(self, fingerprint: str) -> Version:
        """Return the latest version of that identity.

        Raises:
            VersionNotKeptError: It is not kept, or not any more.
        """
        found = [each for each in self.versions() if each.fingerprint == fingerprint]
        if not found:
            raise VersionNotKeptError(
                f"{str(self.root)!r} does not keep a version with the fingerprint {fingerprint}"
            )
        return found[-1]

    def folder_of(self, version: Version) -> Path:
        """Return where a version is."""
        return self.root / version.folder


def read_listing(root: Folder) -> list[Version]:
    """Return the versions of an open store.

    Raises:
        ManifestError: ``current.json`` is damaged.
    """
    shown = repr(f"{root.path}/{CURRENT_NAME}")
    try:
        raw = root.read(CURRENT_NAME, _MAX_NBYTES)
        return [] if raw is None else msgspec.json.decode(raw, type=Listing).versions
    except (StorageError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(
            f"{shown} cannot be read: {error}; it lists the versions there, so nothing is done "
            "with them until it is repaired, or moved away with them"
        ) from error


def write_listing(root: Folder, versions: Sequence[Version]) -> None:
    """Replace the listing of a store, for all to see at once."""
    root.replace(CURRENT_NAME, Listing("wtransfer-versions/1", list(versions)).encode())


def open_version(root: Folder, version: Version) -> tuple[Folder, ManifestFile]:
    """Open a version's folder and read its manifest.

    Returns:
        The folder, which the caller closes, and the manifest.

    Raises:
        StorageError: The folder is gone.
        ManifestError: The manifest is missing, damaged, or that of another version.
    """
    folder = root.folder(version.folder)
    try:
        manifest = read_manifest(folder)
        check_identity(manifest, version.fingerprint, folder.path)
    except BaseException:
        folder.close()
        raise
    assert manifest is not None
    return folder, manifest


def check_identity(manifest: ManifestFile | None, fingerprint: str, shown: str) -> None:
    """Raise unless a manifest is there and states this identity.

    Raises:
        ManifestError: There is none, or it states another one.
    """
    found = None if manifest is None else manifest.fingerprint
    if found != fingerprint:
        raise ManifestError(
            f"{shown!r} should hold the weights with the fingerprint {fingerprint}; its manifest "
            f"{'is missing' if found is None else f'says {found}'}"
        )


def folder_name(number: int, fingerprint: str) -> str:
    """Return the name of a version's folder."""
    return f"{number:08d}-{fingerprint[:12]}"


def number_of(name: str) -> int | None:
    """Return the number in the name of a version's folder; None for any other name."""
    return int(name.partition("-")[0]) if _FOLDER.fullmatch(name) else None
