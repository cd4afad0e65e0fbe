"""Keys of KV blocks, which identify a block by its tokens, position and weights."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, NewType

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

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
        root: Everything else that the KV depends on: model, adapter, salt of a tenant.
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

    def extend(self, tokens: Sequence[int], most: int | None = None) -> None:
        """Take the whole sequence as known now; its beginning is the sequence known before.

        Args:
            tokens: The sequence.
            most: Block up to which it is hashed; None: to its end.
        """
        size = self._block_size
        end = None if most is None else most * size
        words = list(_words(tokens[len(self.pairs) * size : end], size))
        parent, check_hash = self._last
        hashes = _chain(parent, words, self._hash)
        checks = _chain(check_hash, words, _check_hash)
        # All or nothing: a failure half-way must not leave blocks without their predecessors.
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
        check_hash: Distinguishes the block from others with this key; empty if the host has none.
    """
    mark = xxhash.xxh3_128_digest(fingerprint.encode() + b"\0" + check_hash)
    return OffloadKey(mark + key)
