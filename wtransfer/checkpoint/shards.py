"""Safetensors files: where each tensor lies in one, and how several make a checkpoint.

The format's own library maps files, and a mapped file that somebody cuts, or a share that goes
away, ends the process; and it tells nothing of a file that is cut off. So headers are read here.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated

import msgspec

from wtransfer.errors import SourceError
from wtransfer.manifest import DTYPES, MAX_RANK, Piece
from wtransfer.transport.files import read_at, storage_errors

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

SUFFIX = ".safetensors"
SINGLE_NAME = f"model{SUFFIX}"
"""Name of the file where there is only one."""
INDEX_NAME = f"{SINGLE_NAME}.index.json"
"""File that says which of several files has which tensor."""
WIRE_DTYPES: Mapping[str, str] = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "I16": "int16",
    "U16": "uint16",
    "I32": "int32",
    "U32": "uint32",
    "I64": "int64",
    "U64": "uint64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
"""The format's names of dtypes -> those of the wire."""
MAX_HEADER_NBYTES = 100_000_000
"""Longest header, by the format."""
MAX_SHARD_PIECES = 100_000
"""Most tensors that are written to one file: whatever their names are, its header is read."""

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"
_FORMAT_NAMES = {wire: name for name, wire in WIRE_DTYPES.items()}


class Extent(msgspec.Struct, frozen=True):
    """One entry of a header."""

    dtype: str
    """The format's name."""
    # One more than a piece may have: see `stored_form`.
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_RANK + 1)]
    """Dimensions."""
    data_offsets: tuple[int, int]
    """First byte and the one after the last, from the end of the header."""


@dataclass(frozen=True)
class Header:
    """What a file says it has."""

    extents: dict[str, Extent]
    """By name."""
    base: int
    """Byte at which the data begins."""

    def start(self, name: str) -> int:
        """Return the first byte of a tensor in the file."""
        return self.base + self.extents[name].data_offsets[0]

    def by_place(self) -> list[str]:
        """Return the names in the order in which the tensors lie in the file."""
        return sorted(self.extents, key=lambda name: self.extents[name].data_offsets)


def stored_form(dtype: str, shape: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Return a piece's dtype and shape as they stand in a file.

    The format has no complex numbers of 16 bytes; they are stored as pairs of numbers of 8.
    """
    if dtype == "complex128":
        return "F64", (*shape, 2)
    return _FORMAT_NAMES[dtype], tuple(shape)


# -- reading


def read_header(fd: int, shown: str) -> Header:
    """Read and judge a file's header; the data must be there to the last byte, and no more.

    Args:
        fd: The file.
        shown: Its name, for errors.

    Raises:
        SourceError: It is no safetensors file, or cut off: then the first tensor is named of which
            bytes are missing; or tensors overlap, or leave bytes between them.
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
    header = Header(_decode(text, shown), _LENGTH.size + length)
    _check_size(header, nbytes, shown)
    _check_layout(header, nbytes, shown)
    return header


def _decode(text: bytearray, shown: str) -> dict[str, Extent]:
    try:
        rows = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        rows.pop(_METADATA, None)
        extents = {name: _decode_extent(row) for name, row in rows.items()}
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SourceError(f"the header of {shown} cannot be read: {error}") from error
    for name, extent in extents.items():
        _check_extent(name, extent, shown)
    return extents


_decode_extent = msgspec.json.Decoder(Extent).decode


def _check_extent(name: str, extent: Extent, shown: str) -> None:
    dtype = WIRE_DTYPES.get(extent.dtype)
    if dtype is None:
        raise SourceError(
            f"tensor {name!r} in {shown} has the unsupported dtype {extent.dtype[:80]!r}",
            piece=name,
        )
    start, end = extent.data_offsets
    nbytes = math.prod(extent.shape) * DTYPES[dtype]
    if any(size < 0 for size in extent.shape) or start < 0 or end - start != nbytes:
        raise SourceError(
            f"tensor {name!r} in {shown} lies from byte {start} to {end}, which is not what "
            f"{extent.dtype} {list(extent.shape)} takes",
            piece=name,
        )


def _check_size(header: Header, nbytes: int, shown: str) -> None:
    for name in header.by_place():
        end = header.base + header.extents[name].data_offsets[1]
        if end > nbytes:
            raise SourceError(
                f"{shown} is cut off: tensor {name!r} ends at byte {end:,}, the file has "
                f"{nbytes:,}",
                piece=name,
            )


def _check_layout(header: Header, nbytes: int, shown: str) -> None:
    """Raise unless tensors lie one after the other to the file's end, as the format demands."""
    end = header.base
    for name in header.by_place():
        if header.start(name) != end:
            raise SourceError(
                f"tensor {name!r} in {shown} begins at byte {header.start(name):,}, the one before "
                f"it ends at {end:,}",
                piece=name,
            )
        end = header.base + header.extents[name].data_offsets[1]
    if end != nbytes:
        raise SourceError(f"{shown} has {nbytes - end:,} bytes that belong to no tensor")


# -- writing


@dataclass
class Shard:
    """One file to be: what lies where in it."""

    name: str
    """Name of the file."""
    header: bytes
    """Its beginning."""
    offsets: dict[str, int] = field(default_factory=dict)
    """Tensor -> its first byte in the file."""


def lay_out(pieces: Iterable[Piece], shard_nbytes: int) -> list[Shard]:
    """Distribute tensors over files, in their order.

    Args:
        pieces: The tensors.
        shard_nbytes: Bytes of a file, unless one tensor is larger.

    Raises:
        SourceError: A tensor has the one name that the format has for itself.
    """
    groups = _group(pieces, shard_nbytes)
    return [
        _shard(shard_name(number, len(groups)), group) for number, group in enumerate(groups, 1)
    ]


def shard_name(number: int, num_shards: int) -> str:
    """Return the usual name of a checkpoint's file; numbers begin at 1."""
    if num_shards == 1:
        return SINGLE_NAME
    return f"model-{number:05d}-of-{num_shards:05d}{SUFFIX}"


def index_of(shards: Iterable[Shard], nbytes: int) -> bytes:
    """Return the index file of several shards."""
    weight_map = {name: shard.name for shard in shards for name in shard.offsets}
    return msgspec.json.encode({"metadata": {"total_size": nbytes}, "weight_map": weight_map})


def _group(pieces: Iterable[Piece], shard_nbytes: int) -> list[list[Piece]]:
    groups: list[list[Piece]] = [[]]
    nbytes = 0
    for piece in pieces:
        full = nbytes + piece.nbytes > shard_nbytes or len(groups[-1]) >= MAX_SHARD_PIECES
        if full and groups[-1]:
            groups.append([])
            nbytes = 0
        groups[-1].append(piece)
        nbytes += piece.nbytes
    return groups


def _shard(name: str, pieces: list[Piece]) -> Shard:
    # Wide numbers first, so that every tensor begins at a multiple of what its numbers take.
    ordered = sorted(pieces, key=lambda piece: -DTYPES[piece.dtype])
    rows: dict[str, object] = {_METADATA: {"format": "pt"}}
    offsets: dict[str, int] = {}
    end = 0
    for piece in ordered:
        if piece.name == _METADATA:
            raise SourceError(
                f"a tensor cannot be named {_METADATA!r} in a safetensors file", piece=piece.name
            )
        dtype, shape = stored_form(piece.dtype, piece.shape)
        offsets[piece.name], start, end = end, end, end + piece.nbytes
        rows[piece.name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = msgspec.json.encode(rows)
    text += b" " * (-len(text) % _LENGTH.size)
    header = _LENGTH.pack(len(text)) + text
    return Shard(name, header, {each: len(header) + at for each, at in offsets.items()})
