"""KV blocks: the keys they are asked for by, and the header they are kept with.

A key says what a block is: which tokens, which position, which weights. A header stands beside the
bytes of a block wherever they rest and says what they are, so that whoever loads them needs to
trust neither a table nor a disk.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal, NewType

import xxhash

from wtransfer.errors import KVLayoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

# -- keys -------------------------------------------------------------------------------------

OffloadKey = NewType("OffloadKey", bytes)
"""A block's hash, then the number of its KV cache group in four bytes (as in vLLM)."""

GROUP_NBYTES = 4
"""Bytes of a group number at the end of a key."""
FENCE_NBYTES = 16
"""Bytes that `fence_key` puts before a key."""
MAX_KEY_NBYTES = 48
"""Longest key of a host, before it is fenced."""


def make_offload_key(block_hash: bytes, group_index: int = 0) -> OffloadKey:
    """Return the key of a block: its hash and its group."""
    return OffloadKey(block_hash + group_index.to_bytes(GROUP_NBYTES, "big"))


def hash_blocks(
    tokens: Sequence[int],
    block_size: int,
    root: bytes = b"",
    hash_function: Callable[[bytes], bytes] = xxhash.xxh3_128_digest,
) -> Iterator[bytes]:
    """Yield the hash of every whole block of a sequence; each contains all that is before it.

    Args:
        tokens: Token ids, non-negative.
        block_size: Tokens per block.
        root: What else the KV depends on: model, adapter, salt of a tenant.
        hash_function: Hash of bytes. Where tenants must not be able to find each other's blocks,
            give a cryptographic one.
    """
    return _chain(hash_function(root), _words(tokens, block_size), hash_function)


class BlockHashes:
    """Hash and check hash of every whole block of a sequence that grows.

    The check hash is the same chain under a function that no caller chooses. `fence_key` adds it to
    a key, and two sequences that a weak hash confuses have different keys again.

    Args:
        block_size: Tokens per block.
        root: As for `hash_blocks`.
        hash_function: As for `hash_blocks`.
    """

    def __init__(
        self,
        block_size: int,
        root: bytes = b"",
        hash_function: Callable[[bytes], bytes] = xxhash.xxh3_128_digest,
    ) -> None:
        self.pairs: list[tuple[bytes, bytes]] = []
        """For each block its hash, as `hash_blocks` yields it, and its check hash."""
        self._block_size = block_size
        self._hash = hash_function
        self._last = hash_function(root), _check_hash(root)

    def extend(self, tokens: Sequence[int]) -> None:
        """Take the whole sequence as it is known now; it begins with what was known before."""
        words = list(_words(tokens[len(self.pairs) * self._block_size :], self._block_size))
        parent, check_hash = self._last
        hashes = _chain(parent, words, self._hash)
        checks = _chain(check_hash, words, _check_hash)
        # All or nothing: what fails half-way must not leave blocks without what they follow.
        added = list(zip(hashes, checks, strict=True))
        if added:
            self.pairs += added
            self._last = added[-1]


_CHECK_SEED = 0x57495430


def _check_hash(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data, seed=_CHECK_SEED)


def _words(tokens: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Yield the bytes of every whole block."""
    pack = struct.Struct(f"<{block_size}I").pack
    for start in range(0, len(tokens) - block_size + 1, block_size):
        yield pack(*tokens[start : start + block_size])


def _chain(
    parent: bytes, blocks: Iterable[bytes], hash_function: Callable[[bytes], bytes]
) -> Iterator[bytes]:
    """Yield the hash of every block, each over the one before it."""
    for words in blocks:
        parent = hash_function(parent + words)
        yield parent


def fence_key(key: bytes, fingerprint: str, check_hash: bytes = b"") -> OffloadKey:
    """Return the key under which a block of these weights is kept.

    Args:
        key: The host's key.
        fingerprint: Identity of the weights that computed the block.
        check_hash: Tells it from other blocks with this key; empty if the host has none.
    """
    mark = xxhash.xxh3_128_digest(fingerprint.encode() + b"\0" + check_hash)
    return OffloadKey(mark + key)


# -- headers ----------------------------------------------------------------------------------

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
        ValueError: It does not.
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
    """What the bytes of one block, of one rank, are."""

    key: bytes
    """Fenced key."""
    geometry: bytes
    """`BlockGeometry.digest` of what stored it."""
    nbytes: int
    """Payload bytes."""
    checksum: bytes
    """Of the payload."""
    rank: int = 0
    """Whose part of the block it is."""

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
        """Return in what the block differs from the one that is wanted; None if it is that one.

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
    """How a rank's part of a block is laid out: what two sides must have in common."""

    block_size: int
    """Tokens per block."""
    pages: tuple[tuple[str, int], ...]
    """Dtype and bytes of each page of a block, in the order in which they are laid out: one per
    layer, or per key and value of a layer."""
    num_ranks: int = 1
    """Among how many ranks the heads are divided."""
    model: str = ""
    """Model that the KV belongs to, as its users name it."""

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's part of a block."""
        return sum(nbytes for _, nbytes in self.pages)

    def check_fits(self, other: BlockGeometry, whose: str) -> None:
        """Raise unless blocks of the other side are blocks here.

        Args:
            other: How the other side lays its blocks out.
            whose: The other side's name.

        Raises:
            KVLayoutError: They are not; it names the first field in which they differ.
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
        """16 bytes that are equal where everything here is."""
        pages = "".join(f"{dtype}:{nbytes}," for dtype, nbytes in self.pages)
        text = f"{self.block_size}|{self.num_ranks}|{self.model}|{pages}"
        return xxhash.xxh3_128_digest(text.encode())


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


_MAX_SHOWN = 120
