"""``wtransfer.json``: what the weights beside it must be, down to the digest of every tensor."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec

from wtransfer.errors import ManifestError, StorageError
from wtransfer.manifest import (
    DIGEST_LENGTH,
    MAX_PIECES,
    MAX_RANK,
    Algorithm,
    Manifest,
    Piece,
    fingerprint,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.transport.files import Folder

MANIFEST_NAME = "wtransfer.json"
"""Name of the file, beside the checkpoint's."""
MAX_NBYTES = 256 << 20
"""Largest file: the most pieces with the longest names, and some."""

Digest = Annotated[str, msgspec.Meta(pattern=rf"^[0-9a-f]{{{DIGEST_LENGTH}}}\Z")]
"""A digest or a fingerprint."""


class SealedPiece(msgspec.Struct, frozen=True):
    """One tensor and its proof."""

    name: str
    """Name."""
    dtype: str
    """Wire dtype."""
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_RANK)]
    """Dimensions."""
    digest: Digest
    """Of its bytes."""


class ManifestFile(msgspec.Struct, frozen=True):
    """The file's content."""

    format: Literal["wtransfer/1"]
    """Says what this is, and how to read it."""
    version: str | None
    """Label, where it had one when it was written."""
    fingerprint: Digest
    """Identity of the whole."""
    created_at: float
    """When it was written, in seconds since the epoch."""
    algorithm: Algorithm
    """How the digests were made."""
    pieces: Annotated[tuple[SealedPiece, ...], msgspec.Meta(max_length=MAX_PIECES)]
    """Every tensor."""

    @classmethod
    def of(cls, version: str | None, manifest: Manifest, digests: Sequence[str]) -> ManifestFile:
        """Describe an update.

        Args:
            version: Label.
            manifest: Its pieces, all of them whole.
            digests: In the manifest's order.
        """
        rows = zip(manifest.pieces, digests, strict=True)
        return cls(
            format="wtransfer/1",
            version=version,
            fingerprint=fingerprint(manifest, digests),
            created_at=time.time(),
            algorithm=manifest.algorithm,
            pieces=tuple(SealedPiece(p.name, p.dtype, p.shape, digest) for p, digest in rows),
        )

    @property
    def manifest(self) -> Manifest:
        """The pieces, as a round has them."""
        pieces = tuple(Piece(each.name, each.dtype, each.shape) for each in self.pieces)
        return Manifest(pieces, algorithm=self.algorithm)

    @property
    def digests(self) -> list[str]:
        """The digests, in the manifest's order."""
        return [each.digest for each in self.pieces]

    def encode(self) -> bytes:
        """Return the file's bytes."""
        return msgspec.json.encode(self)


def read_manifest(folder: Folder, *, follow: bool = False) -> ManifestFile | None:
    """Read the manifest of a folder; None if there is none.

    Args:
        folder: Where it is.
        follow: Whether it may be a link.

    Raises:
        ManifestError: It is too large, malformed, names what cannot be, or contradicts itself.
    """
    shown = repr(f"{folder.path}/{MANIFEST_NAME}")
    try:
        raw = folder.read(MANIFEST_NAME, MAX_NBYTES, follow=follow)
    except StorageError as error:
        raise ManifestError(f"the manifest {shown} cannot be read: {error.message}") from error
    return None if raw is None else _decoded(raw, shown)


def _decoded(raw: bytes, shown: str) -> ManifestFile:
    try:
        found = msgspec.json.decode(raw, type=ManifestFile)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ManifestError(f"{shown} is no manifest that can be read: {error}") from error
    manifest = found.manifest
    try:
        manifest.check()
    except ManifestError as error:
        raise ManifestError(f"{shown}: {error.message}", piece=error.piece) from error
    identity = fingerprint(manifest, found.digests)
    if identity != found.fingerprint:
        raise ManifestError(
            f"{shown} was changed after it was written: its pieces have the fingerprint "
            f"{identity}, it says {found.fingerprint}"
        )
    return found
