"""The safetensors format: position of each tensor in a file, read and written without a mapping.

The format's own library maps the files that it reads. A mapped file that is cut, or whose share
goes away, ends the process with a signal; here the reader gets an error that names the tensor. So
headers are parsed here, dtypes are looked up in a closed table, and tensors are read by ``pread``
into memory of their own.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
import torch

from wtransfer.dtypes import DTYPES, WIRE_DTYPES
from wtransfer.errors import ManifestError, SourceError, TruncatedError
from wtransfer.manifest import MAX_NBYTES, MAX_RANK, Piece
from wtransfer.transport.files import read_at, storage_errors, write_at
from wtransfer.transport.tensors import byte_view, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from typing_extensions import Self

    from wtransfer.transport.files import Folder

SUFFIX = ".safetensors"
SINGLE_NAME = f"model{SUFFIX}"
"""Name of the file where there is only one."""
INDEX_NAME = f"{SINGLE_NAME}.index.json"
"""File that maps each tensor to one of several files."""
_FORMAT_DTYPES = {name: each.safetensors for name, each in WIRE_DTYPES.items() if each.safetensors}
_FROM_FORMAT = {theirs: name for name, theirs in _FORMAT_DTYPES.items()}
MAX_HEADER_NBYTES = 100_000_000
"""Longest header, by the format."""
MAX_SHARD_PIECES = 100_000
"""Most tensors written to one file: its header stays below the limit, however long their names."""

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    piece: Piece
    """Name, wire dtype and shape."""
    offset: int
    """First byte in the file."""

    @property
    def end(self) -> int:
        """Byte after the last one."""
        return self.offset + self.piece.nbytes

    def check(self) -> None:
        """Raise unless a file could hold the tensor at its offset.

        Raises:
            ManifestError: Bad name, dtype, shape or offset.
        """
        self.piece.check()
        if type(self.offset) is not int or not 0 <= self.offset <= MAX_NBYTES - self.piece.nbytes:
            raise ManifestError(
                f"{self.piece.name!r} cannot begin at byte {self.offset!r}", piece=self.piece.name
            )


def stored_form(piece: Piece) -> tuple[str, tuple[int, ...]]:
    """Return wire dtype and shape of a piece as files hold it.

    The format has no complex numbers of 16 bytes: stored as pairs of numbers of 8. Numbers that are
    packed into one element are counted one by one.
    """
    if piece.dtype == "complex128":
        return "float64", (*piece.shape, 2)
    num_packed = WIRE_DTYPES[piece.dtype].num_packed
    if num_packed > 1:
        return piece.dtype, (*piece.shape[:-1], math.prod(piece.shape[-1:]) * num_packed)
    return piece.dtype, tuple(piece.shape)


# -- reading


class _Entry(msgspec.Struct, frozen=True):
    dtype: str
    # One dimension more than a piece may have: see `stored_form`.
    shape: Annotated[
        tuple[Annotated[int, msgspec.Meta(ge=0)], ...], msgspec.Meta(max_length=MAX_RANK + 1)
    ]
    # From the end of the header.
    data_offsets: tuple[Annotated[int, msgspec.Meta(ge=0)], int]


# Made once: threads that read a struct for the first time at once end the process (msgspec 0.22).
_decode_entry = msgspec.json.Decoder(_Entry).decode


def read_header(fd: int, shown: str) -> dict[str, StoredTensor]:
    """Read and check a file's header: tensors must fill the rest of the file without gaps.

    Args:
        fd: The file.
        shown: Name of the file, for errors.

    Returns:
        The tensors by name, in the order in which they lie in the file.

    Raises:
        SourceError: Not a safetensors file, or cut off: then the first tensor with missing bytes is
            named; or tensors overlap, or leave bytes between them.
    """
    with storage_errors(f"reading {shown}"):
        nbytes = os.fstat(fd).st_size
        raw = bytearray(_LENGTH.size)
        read_at(fd, [memoryview(raw)], 0)
        (length,) = _LENGTH.unpack(raw)
        if length > min(MAX_HEADER_NBYTES, nbytes - _LENGTH.size):
            raise SourceError(
                f"{shown} is no safetensors file, or cut off within its header: the header has "
                f"{length:,} bytes, the file {nbytes:,}"
            )
        text = bytearray(length)
        read_at(fd, [memoryview(text)], _LENGTH.size)
    try:
        rows = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        rows.pop(_METADATA, None)
        entries = {name: _decode_entry(row) for name, row in rows.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"the header of {shown} cannot be read: {error}") from error
    found: dict[str, StoredTensor] = {}
    end = base = _LENGTH.size + length
    for name, entry in sorted(entries.items(), key=lambda each: each[1].data_offsets):
        if entry.dtype not in _FROM_FORMAT:
            raise SourceError(
                f"tensor {name!r} in {shown} has the unsupported dtype {entry.dtype[:80]!r}",
                piece=name,
            )
        first, last = entry.data_offsets
        stored = StoredTensor(_piece(name, entry), base + first)
        is_whole = stored_form(stored.piece) == (stored.piece.dtype, entry.shape)
        if not is_whole or stored.piece.nbytes != last - first:
            raise SourceError(
                f"tensor {name!r} in {shown} lies from byte {first} to {last}, which is not what "
                f"{entry.dtype} {list(entry.shape)} takes",
                piece=name,
            )
        if stored.end > nbytes:
            raise SourceError(_cut_off(shown, stored, nbytes), piece=name)
        if stored.offset != end:
            raise SourceError(
                f"tensor {name!r} in {shown} begins at byte {stored.offset:,}, the one before it "
                f"ends at {end:,}",
                piece=name,
            )
        found[name], end = stored, stored.end
    if end != nbytes:
        raise SourceError(f"{shown} has {nbytes - end:,} bytes that belong to no tensor")
    return found


def _piece(name: str, entry: _Entry) -> Piece:
    dtype, shape = _FROM_FORMAT[entry.dtype], entry.shape
    num_packed = WIRE_DTYPES[dtype].num_packed
    if num_packed > 1 and shape:
        shape = (*shape[:-1], shape[-1] // num_packed)
    return Piece(name, dtype, shape)


def read_bytes(fd: int, stored: StoredTensor, into: memoryview, start: int, shown: str) -> None:
    """Read bytes of a tensor into memory.

    Args:
        fd: The file.
        stored: The tensor.
        into: Memory of as many bytes as are read.
        start: First byte to read, counted from the tensor's first.
        shown: Name of the file, for errors.

    Raises:
        TruncatedError: The file ends before the bytes.
        StorageError: The file cannot be read.
    """
    offset = stored.offset + start
    with storage_errors(f"reading {shown}"):
        count = read_at(fd, [into], offset)
    if count < into.nbytes:
        raise TruncatedError(_cut_off(shown, stored, offset + count), piece=stored.piece.name)


def read_tensor(fd: int, stored: StoredTensor, shown: str) -> torch.Tensor:
    """Read a tensor into memory of its own.

    Args:
        fd: The file.
        stored: The tensor; its dtype may differ from the file's if the size is the same.
        shown: Name of the file, for errors.

    Raises:
        TruncatedError: The file ends before the tensor does; nothing is allocated then.
        StorageError: The file cannot be read.
    """
    piece = stored.piece
    with storage_errors(f"reading {shown}"):
        nbytes = os.fstat(fd).st_size
    if stored.end > nbytes:
        raise TruncatedError(_cut_off(shown, stored, nbytes), piece=piece.name)
    tensor = torch.empty(piece.shape, dtype=torch_dtype(piece.dtype), device="cpu")
    read_bytes(fd, stored, byte_view(tensor).data, 0, shown)
    return tensor


def _cut_off(shown: str, stored: StoredTensor, nbytes: int) -> str:
    return (
        f"{shown} is cut off: tensor {stored.piece.name!r} ends at byte {stored.end:,}, the file "
        f"has {nbytes:,}"
    )


# -- writing


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint to write."""

    name: str
    """Name of the file."""
    header: bytes
    """First bytes of the file."""
    offsets: dict[str, int]
    """Tensor -> its first byte in the file."""


def lay_out(pieces: Iterable[Piece], shard_nbytes: int) -> list[Shard]:
    """Distribute tensors over files, in their order.

    Args:
        pieces: The tensors.
        shard_nbytes: Bytes of a file, unless one tensor is larger.

    Raises:
        SourceError: A tensor has the one name that the format reserves.
    """
    groups: list[list[Piece]] = [[]]
    nbytes = 0
    for piece in pieces:
        full = nbytes + piece.nbytes > shard_nbytes or len(groups[-1]) >= MAX_SHARD_PIECES
        if full and groups[-1]:
            groups.append([])
            nbytes = 0
        groups[-1].append(piece)
        nbytes += piece.nbytes
    shards = []
    for number, group in enumerate(groups, 1):
        rows: dict[str, object] = {_METADATA: {"format": "pt"}}
        starts: dict[str, int] = {}
        end = 0
        # Wide dtypes first, so that every tensor begins at a multiple of its item size.
        for piece in sorted(group, key=lambda piece: -DTYPES[piece.dtype]):
            if piece.name == _METADATA:
                raise SourceError(
                    f"a tensor cannot be named {_METADATA!r} in a safetensors file",
                    piece=piece.name,
                )
            dtype, shape = stored_form(piece)
            starts[piece.name], start, end = end, end, end + piece.nbytes
            row = {"dtype": _FORMAT_DTYPES[dtype], "shape": shape, "data_offsets": (start, end)}
            rows[piece.name] = row
        text = msgspec.json.encode(rows)
        text += b" " * (-len(text) % _LENGTH.size)
        header = _LENGTH.pack(len(text)) + text
        name = f"model-{number:05d}-of-{len(groups):05d}{SUFFIX}"
        offsets = {each: len(header) + start for each, start in starts.items()}
        shards.append(Shard(name if len(groups) > 1 else SINGLE_NAME, header, offsets))
    return shards


class CheckpointWriter:
    """Writes the tensors of a checkpoint to a new folder, in any order. A context manager.

    By system calls, not through a mapping: on a full disk a mapping ends the process.

    Args:
        folder: Empty folder, open for as long as the writer is.
        pieces: The tensors that will be written.
        shard_nbytes: Bytes of a file, unless one tensor is larger.

    Raises:
        SourceError: A tensor has the one name that the format reserves.
    """

    def __init__(self, folder: Folder, pieces: Sequence[Piece], shard_nbytes: int) -> None:
        self._folder = folder
        self._nbytes = sum(piece.nbytes for piece in pieces)
        self._shards = lay_out(pieces, shard_nbytes)
        self._shard_of = {each: shard for shard in self._shards for each in shard.offsets}
        self._fds: dict[str, int] = {}

    def locate(self, tensor: str) -> tuple[str, int]:
        """Return a tensor's file, and its first byte there."""
        shard = self._shard_of[tensor]
        return shard.name, shard.offsets[tensor]

    def write(self, tensor: str, data: memoryview) -> None:
        """Write a tensor's bytes.

        Raises:
            StorageError: No room, a failing disk.
        """
        shard = self._shard_of[tensor]
        with storage_errors(f"writing '{self._folder.path}/{shard.name}'"):
            write_at(self._fd(shard), [data], shard.offsets[tensor])

    def sync(self, file: str) -> None:
        """Flush a file's bytes, so that other hosts read them."""
        with storage_errors(f"writing '{self._folder.path}/{file}'"):
            os.fdatasync(self._fds[file])

    def finish(self) -> None:
        """Bring all files to the disk, and write their index if there are several."""
        for shard in self._shards:
            # Created here if nothing was written to the file: no tensors, or empty ones.
            with storage_errors(f"writing '{self._folder.path}/{shard.name}'"):
                os.fsync(self._fd(shard))
        if len(self._shards) > 1:
            weight_map = {name: shard.name for name, shard in self._shard_of.items()}
            index = {"metadata": {"total_size": self._nbytes}, "weight_map": weight_map}
            self._folder.replace(INDEX_NAME, msgspec.json.encode(index))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        while self._fds:
            # An error of a last write may show here; the data was synced, or is not wanted.
            with contextlib.suppress(OSError):
                os.close(self._fds.popitem()[1])

    def _fd(self, shard: Shard) -> int:
        fd = self._fds.get(shard.name)
        if fd is None:
            fd = self._fds[shard.name] = self._folder.create_file(shard.name)
            write_at(fd, [memoryview(shard.header)], 0)
        return fd
