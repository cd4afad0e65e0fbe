"""Name the blocks of a request: blocks of equal names have equal keys and values.

A name is a digest of the tokens of the block and of all blocks before it, of the model, the
weights, and everything else of the request that KV depends on. So instances agree on names without
asking each other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import xxhash

from wtransfer.kv.keys import BlockHashes, fence_key, make_offload_key

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.kv.keys import OffloadKey


class BlockNaming:
    """Names the blocks of one model.

    Args:
        block_size: Tokens per block.
        root: Everything that keys and values depend on besides request and weights.
        hash_function: Hash of bytes; a weak one costs only speed, as keys contain a check hash.
    """

    def __init__(
        self,
        block_size: int,
        root: bytes,
        hash_function: Callable[[bytes], bytes] = xxhash.xxh3_128_digest,
    ) -> None:
        self.block_size = block_size
        """Tokens per block."""
        self._root = root
        self._hash = hash_function

    def of(self, request: Any) -> RequestNames:
        """Return the names of a request's blocks, to be extended as it grows.

        Args:
            request: ``all_token_ids``, or ``prompt_token_ids`` if that is missing, and if present
                ``cache_salt``, ``lora_request``, ``mm_features``, ``prompt_embeds``, ``resumable``.
        """
        root = request_root(request, self._root)
        hashes = BlockHashes(self.block_size, root or b"", self._hash)
        return RequestNames(request, hashes, uncacheable=root is None)


class RequestNames:
    """Names of the full blocks of one request, extended as its tokens become known.

    Args:
        request: The request.
        hashes: Hashes of its tokens.
        uncacheable: True if no block of the request gets a name.
    """

    def __init__(self, request: Any, hashes: BlockHashes, *, uncacheable: bool = False) -> None:
        self._request = request
        self._hashes = hashes
        self._uncacheable = uncacheable
        self._named: dict[int, list[OffloadKey]] = {}
        self._fingerprint = ""

    def under(self, fingerprint: str, most: int | None = None, group: int = 0) -> list[OffloadKey]:
        """Return the names of all blocks whose tokens are known, in order.

        Args:
            fingerprint: Fingerprint of the weights that compute them.
            most: Largest number of names; None: all. Later blocks are not hashed yet.
            group: Number of the KV cache group whose blocks are named.
        """
        if self._uncacheable:
            return []
        self._hashes.extend(known_tokens(self._request), most)
        if fingerprint != self._fingerprint:
            self._fingerprint, self._named = fingerprint, {}
        named = self._named.setdefault(group, [])
        for block_hash, check_hash in self._hashes.pairs[len(named) : most]:
            key = make_offload_key(block_hash, group)
            named.append(fence_key(key, fingerprint, check_hash))
        return named[:most]


def known_tokens(request: Any) -> Any:
    """Return the token ids of a request that are known by now; None if it has none."""
    tokens = getattr(request, "all_token_ids", None)
    return request.prompt_token_ids if tokens is None else tokens


def request_root(request: Any, *parts: Any) -> bytes | None:
    """Return everything that a request's KV depends on besides its tokens, encoded after `parts`.

    None: its KV depends on something that no key can contain.
    """
    if getattr(request, "prompt_embeds", None) is not None or known_tokens(request) is None:
        return None
    # An adapter may be trained on under the same name and path.
    if getattr(request, "lora_request", None) is not None:
        return None
    # A session may get further media, which names of its first blocks would not contain.
    if getattr(request, "resumable", False):
        return None
    features = getattr(request, "mm_features", None) or ()
    if any(each.identifier is None for each in features):
        return None
    # All media for every block: a block before the first medium could be shared, and is not.
    media = [[each.identifier, each.mm_position.offset] for each in features]
    try:
        return msgspec.msgpack.encode([*parts, getattr(request, "cache_salt", None), media])
    except UnicodeEncodeError:
        # JSON has texts that cannot be encoded: halves of surrogate pairs.
        return None
