"""Write down what a checkpoint is, and find what has changed since."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.checkpoint.manifest_file import MANIFEST_NAME, ManifestFile, read_manifest
from wtransfer.checkpoint.source import CheckpointSource, differences
from wtransfer.errors import ManifestError
from wtransfer.manifest import Algorithm, Manifest, Piece
from wtransfer.transport.digests import digest
from wtransfer.transport.files import Folder
from wtransfer.transport.tensors import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def seal(checkpoint: Path, version: str | None = None) -> ManifestFile:
    """Write ``wtransfer.json`` beside a checkpoint; one that is there is replaced at once.

    Args:
        checkpoint: Folder.
        version: Label, for people.

    Returns:
        What was written.

    Raises:
        SourceError: It is no whole checkpoint.
        StorageError: The file could not be written.

    Cost: reads everything once.
    """
    written = describe(CheckpointSource(checkpoint, sealed=False), version)
    with Folder(checkpoint) as folder:
        folder.replace(MANIFEST_NAME, written.encode())
    return written


def describe(source: CheckpointSource, version: str | None = None) -> ManifestFile:
    """Return what a checkpoint is.

    Args:
        source: Reads it.
        version: Label, for people.

    Raises:
        SourceError: It cannot be read.
        ManifestError: It names something that no update can hold.

    Cost: reads everything once.
    """
    pieces = tuple(Piece(m.name, dtype_name(m.dtype), m.shape) for m in source.metadata)
    manifest = Manifest(pieces)
    manifest.check()
    digests = [found for _, found in _digests(source, manifest.algorithm)]
    return ManifestFile.of(version, manifest, digests)


def check(checkpoint: Path) -> tuple[ManifestFile, dict[str, str]]:
    """Hold a checkpoint against its ``wtransfer.json``.

    Returns:
        The manifest; and for every tensor that differs, by its name, how.

    Raises:
        SourceError: It is no whole checkpoint.
        ManifestError: It has no manifest, or none that can be read.

    Cost: reads everything once.
    """
    with Folder(checkpoint) as folder:
        manifest = read_manifest(folder, follow=True)
    if manifest is None:
        raise ManifestError(
            f"{str(checkpoint)!r} has no {MANIFEST_NAME}: `wtransfer seal` writes one"
        )
    source = CheckpointSource(checkpoint, sealed=False)
    sealed = {piece.name: piece for piece in manifest.pieces}
    wrong = differences({meta.name: meta for meta in source.metadata}, sealed)
    for name, found in _digests(source, manifest.algorithm):
        if name not in wrong and found != sealed[name].digest:
            wrong[name] = f"has other bytes: digest {found}, sealed was {sealed[name].digest}"
    return manifest, wrong


def _digests(source: CheckpointSource, algorithm: Algorithm) -> Iterator[tuple[str, str]]:
    for name, tensor in source.iter_full():
        yield name, digest(tensor, algorithm)
