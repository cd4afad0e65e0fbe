"""Tensors in files, read into fresh memory: never mapped, so a damaged file is only an error."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from wtransfer.checkpoint.shards import SUFFIX, read_header, stored_form
from wtransfer.errors import ManifestError, SourceError, TruncatedError
from wtransfer.manifest import MAX_NBYTES, Piece
from wtransfer.transport.files import read_at, storage_errors
from wtransfer.transport.tensors import byte_view, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wtransfer.checkpoint.manifest_file import ManifestFile
    from wtransfer.transport.files import Folder

BUCKET_NBYTES = 32 << 20
"""Bytes that are read at a time, unless one tensor is larger."""


@dataclass(frozen=True)
class Place:
    """A tensor, and where it begins in its file."""

    piece: Piece
    """The tensor."""
    offset: int
    """Its first byte."""

    @property
    def end(self) -> int:
        """The byte after its last."""
        return self.offset + self.piece.nbytes

    def check(self) -> None:
        """Raise unless the tensor could be there.

        Raises:
            ManifestError: It could be in no file.
        """
        self.piece.check()
        if type(self.offset) is not int or not 0 <= self.offset <= MAX_NBYTES - self.piece.nbytes:
            raise ManifestError(
                f"{self.piece.name!r} cannot begin at byte {self.offset!r}", piece=self.piece.name
            )


def read_tensors(
    folder: Folder, file: str, places: Sequence[Place]
) -> list[tuple[str, torch.Tensor]]:
    """Read tensors of one file, each into memory of its own.

    Args:
        folder: Where the file is.
        file: Its name.
        places: The tensors.

    Returns:
        Name and tensor, in the order of `places`.

    Raises:
        TruncatedError: The file ends before a tensor does, which is named. Seen before anything
            is allocated for it.
        StorageError: It cannot be read.
    """
    fd = folder.open_file(file)
    try:
        return read_open(fd, places, f"{folder.path}/{file}")
    finally:
        os.close(fd)


def read_open(fd: int, places: Sequence[Place], shown: str) -> list[tuple[str, torch.Tensor]]:
    """Read tensors of a file that is open, as `read_tensors` does.

    Args:
        fd: The file.
        places: The tensors.
        shown: Its name, for errors.

    Raises:
        TruncatedError: The file ends before a tensor does, which is named.
        StorageError: It cannot be read.
    """
    with storage_errors(f"reading {shown!r}"):
        _check_size(os.fstat(fd).st_size, places, shown)
        tensors = [_empty(place) for place in places]
        for run in _runs(places):
            _fill(fd, [(places[i], tensors[i]) for i in run], shown)
    return [(place.piece.name, tensor) for place, tensor in zip(places, tensors, strict=True)]


def _empty(place: Place) -> torch.Tensor:
    return torch.empty(place.piece.shape, dtype=torch_dtype(place.piece.dtype), device="cpu")


def _fill(fd: int, rows: list[tuple[Place, torch.Tensor]], shown: str) -> None:
    """Read tensors that lie one after the other, in one call."""
    begin = rows[0][0].offset
    nbytes = read_at(fd, [byte_view(tensor).data for _, tensor in rows], begin)
    # It may have been cut while it was read.
    _check_size(begin + nbytes, [place for place, _ in rows], shown)


def _check_size(nbytes: int, places: Sequence[Place], shown: str) -> None:
    for place in places:
        if place.end > nbytes:
            raise TruncatedError(
                f"{shown!r} is cut off: tensor {place.piece.name!r} ends at byte {place.end:,}, "
                f"the file has {nbytes:,}",
                piece=place.piece.name,
            )


def _runs(places: Sequence[Place]) -> Iterator[list[int]]:
    """Yield indices of tensors that lie one after the other: one call reads them all."""
    run: list[int] = []
    for index in sorted(range(len(places)), key=lambda i: (places[i].offset, places[i].end)):
        if run and places[run[-1]].end != places[index].offset:
            yield run
            run = []
        run.append(index)
    if run:
        yield run


def buckets(folder: Folder, manifest: ManifestFile) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Read a whole version, bucket after bucket.

    Args:
        folder: Where it is.
        manifest: What it must have, in names, dtypes and shapes; bytes are the caller's affair.

    Raises:
        SourceError: A tensor is missing, of another dtype or shape, or cut off; it is named.
        StorageError: A file cannot be read.
    """
    pieces = {piece.name: piece for piece in manifest.manifest.pieces}
    places = {
        file: _places(folder, file, pieces) for file in folder.names() if file.endswith(SUFFIX)
    }
    found = {place.piece.name for each in places.values() for place in each}
    missing = next((name for name in pieces if name not in found), None)
    if missing is not None:
        raise SourceError(
            f"{folder.path!r} lacks tensor {missing!r}, which its manifest has", piece=missing
        )
    for file, each in places.items():
        for part in _parts(each):
            yield read_tensors(folder, file, part)


def _places(folder: Folder, file: str, pieces: dict[str, Piece]) -> list[Place]:
    fd = folder.open_file(file)
    shown = repr(f"{folder.path}/{file}")
    try:
        header = read_header(fd, shown)
    finally:
        os.close(fd)
    places = []
    for name in header.by_place():
        extent, piece = header.extents[name], pieces.get(name)
        got = f"{extent.dtype} {list(extent.shape)}"
        if piece is None:
            raise SourceError(
                f"tensor {name!r} ({got}) in {shown} is not in the manifest", piece=name
            )
        if (extent.dtype, extent.shape) != stored_form(piece.dtype, piece.shape):
            raise SourceError(
                f"tensor {name!r} in {shown} is {got}, its manifest says {piece.dtype} "
                f"{list(piece.shape)}",
                piece=name,
            )
        places.append(Place(piece, header.start(name)))
    return places


def _parts(places: list[Place]) -> Iterator[list[Place]]:
    part: list[Place] = []
    nbytes = 0
    for place in places:
        if part and nbytes + place.piece.nbytes > BUCKET_NBYTES:
            yield part
            part, nbytes = [], 0
        part.append(place)
        nbytes += place.piece.nbytes
    if part:
        yield part
