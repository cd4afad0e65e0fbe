"""The checkpoint that trainer and workers began with: what a trainer does not hold stays."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.checkpoint.source import CheckpointSource
from wtransfer.manifest import KeptPiece, Piece
from wtransfer.transport.digests import digest
from wtransfer.transport.tensors import dtype_name

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Collection

    from wtransfer.manifest import Algorithm


class BaseCheckpoint:
    """A checkpoint as it was when it was read first.

    Args:
        folder: Folder of its safetensors files.

    Raises:
        SourceError: The folder holds no whole checkpoint.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        # Not by its seal: each of these tensors is read, once.
        self._source = CheckpointSource(folder, sealed=False)
        self._digests: dict[tuple[str, Algorithm], str] = {}

    def kept(
        self, sent: Collection[str], algorithm: Algorithm, on_progress: Callable[[], None]
    ) -> tuple[KeptPiece, ...]:
        """Return the tensors that stay, beside those that are sent.

        Args:
            sent: Names of tensors that travel, and further names of the same tensors.
            algorithm: How tensors are digested.
            on_progress: Called after each tensor that was read.

        Raises:
            SourceError: A tensor cannot be read.

        Cost: the first time reads what stays.
        """
        found = []
        for meta in self._source.metadata:
            if meta.name in sent:
                continue
            key = (meta.name, algorithm)
            if key not in self._digests:
                self._digests[key] = digest(self._source.tensor(meta.name), algorithm)
                on_progress()
            piece = Piece(meta.name, dtype_name(meta.dtype), tuple(meta.shape))
            found.append(KeptPiece(piece, self._digests[key]))
        return tuple(found)
