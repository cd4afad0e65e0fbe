"""Header of a KV block: describes the bytes, and lies beside them wherever they are kept.

A load compares the header, and so trusts neither a table nor a disk.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import Literal

import xxhash

from wtransfer.errors import KVLayoutError
from wtransfer.kv.keys import FENCE_NBYTES, MAX_KEY_NBYTES

HEADER_NBYTES = 128
"""Bytes that a packed header takes."""
CHECKSUM_NBYTES = 16
"""Bytes of a checksum: xxh3-128."""

_MAGIC = b"wtkv"
_FORMAT = 1
# magic, format, rank, key length, payload bytes, geometry, payload checksum, key, header checksum
_LAYOUT = struct.Struct("<4sBxHIQ16s16s64s4xQ")
assert _LAYOUT.size == HEADER_NBYTES


def check_key_nbytes(nbytes: int) -> None:
    """Raise unless a fenced key of this length fits into a header.

    Raises:
        ValueError: The key is too long.
    """
    most = FENCE_NBYTES + MAX_KEY_NBYTES
    if nbytes > most:
        raise ValueError(
            f"a block key of {nbytes} bytes; at most {most} fit into a header: let the host hash "
            "what it is made of"
        )


Mismatch = Literal["absent", "torn", "format", "key", "geometry", "rank", "length", "checksum"]
"""Why a block is not the one that was asked for. *absent*: nothing was ever stored there, or it was
taken back. *torn*: the header itself is damaged or half written."""


def checksum(payload: object) -> bytes:
    """Return the checksum of a block's bytes.

    Args:
        payload: Anything with the buffer protocol, contiguous.
    """
    return xxhash.xxh3_128_digest(payload)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Description of the bytes of one block, of one rank."""

    key: bytes
    """Fenced key."""
    geometry: bytes
    """`BlockGeometry.digest` of the writer."""
    nbytes: int
    """Payload bytes."""
    checksum: bytes
    """Checksum of the payload."""
    rank: int = 0
    """Rank that this part of the block belongs to."""

    def pack(self) -> bytes:
        """Return the header as `HEADER_NBYTES` bytes.

        Raises:
            ValueError: The key is longer than `MAX_KEY_NBYTES` and the fence's part.
        """
        check_key_nbytes(len(self.key))
        fields = (_MAGIC, _FORMAT, self.rank, len(self.key), self.nbytes)
        packed = _LAYOUT.pack(*fields, self.geometry, self.checksum, self.key, 0)
        return packed[:-8] + xxhash.xxh3_64_digest(packed[:-8])

    @classmethod
    def unpack(cls, packed: bytes) -> BlockHeader | Mismatch:
        """Return the header that was packed, or why there is none.

        Args:
            packed: `HEADER_NBYTES` bytes, or fewer where a file is cut short.
        """
        if len(packed) != HEADER_NBYTES:
            return "torn"
        if not any(packed):
            return "absent"
        if xxhash.xxh3_64_digest(packed[:-8]) != packed[-8:]:
            return "torn"
        magic, number, rank, key_nbytes, nbytes, geometry, total, key, _ = _LAYOUT.unpack(packed)
        if (magic, number) != (_MAGIC, _FORMAT) or key_nbytes > len(key):
            return "format"
        return cls(key[:key_nbytes], geometry, nbytes, total, rank)

    def mismatch(self, key: bytes, geometry: bytes, nbytes: int, rank: int = 0) -> Mismatch | None:
        """Return the first mismatching field; None: the block is the wanted one.

        The bytes themselves are not looked at: compare `checksum`.
        """
        if self.key != key:
            return "key"
        if self.geometry != geometry:
            return "geometry"
        if self.rank != rank:
            return "rank"
        return None if self.nbytes == nbytes else "length"


@dataclass(frozen=True)
class BlockGeometry:
    """Layout of a rank's part of a block, which two sides must have in common."""

    block_size: int
    """Tokens per block."""
    pages: tuple[tuple[str, int], ...]
    """Dtype and bytes of each page of a block, in the order in which they are laid out: one per
    layer, or per key and value of a layer."""
    num_ranks: int = 1
    """Number of ranks among which the heads are divided."""
    model: str = ""
    """Model that the KV belongs to, as its users name it."""

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's part of a block."""
        return sum(nbytes for _, nbytes in self.pages)

    def check_fits(self, other: BlockGeometry, whose: str) -> None:
        """Raise unless blocks of the other side are blocks here.

        Args:
            other: Layout of the other side's blocks.
            whose: The other side's name.

        Raises:
            KVLayoutError: The layouts differ; the error names the first field that does.
        """
        for each in fields(self):
            ours, theirs = getattr(self, each.name), getattr(other, each.name)
            if ours != theirs:
                raise KVLayoutError(
                    f"KV blocks of {whose} do not fit: {each.name} is {_shown(theirs)} there and "
                    f"{_shown(ours)} here",
                    field=each.name,
                )

    @property
    def digest(self) -> bytes:
        """16 bytes that are equal where all fields are."""
        pages = "".join(f"{dtype}:{nbytes}," for dtype, nbytes in self.pages)
        text = f"{self.block_size}|{self.num_ranks}|{self.model}|{pages}"
        return xxhash.xxh3_128_digest(text.encode())


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


_MAX_SHOWN = 120
