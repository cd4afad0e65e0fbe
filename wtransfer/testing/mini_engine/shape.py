"""How big the served model is, and how its KV cache is cut."""

from __future__ import annotations

import msgspec

TILE = 32
"""Positions that are computed at once, by every rank and for every request."""


class ServedShape(msgspec.Struct, frozen=True):
    """Sizes of the transformer."""

    num_layers: int = 2
    """Number of layers."""
    width: int = 64
    """Size of the residual stream."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 2
    """Key and value heads; each serves as many query heads."""
    vocabulary: int = 256
    """Number of different tokens."""

    @property
    def head_width(self) -> int:
        """Size of one head."""
        return self.width // self.num_heads

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share a key head."""
        return self.num_heads // self.num_kv_heads


class CacheShape(msgspec.Struct, frozen=True):
    """Sizes of a paged KV cache."""

    block_size: int = 16
    """Tokens per block."""
    num_blocks: int = 256
    """Number of blocks."""


class Limits(msgspec.Struct, frozen=True):
    """How much is served at once."""

    max_num_seqs: int = 8
    """Most requests that run side by side."""
    max_num_batched_tokens: int = 2048
    """Most tokens that one step computes: longer prompts are computed in several."""
