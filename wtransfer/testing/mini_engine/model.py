"""The served model: a decoder-only transformer whose keys and values live in a paged cache.

It computes the same bits whatever was cached before, and on however many ranks. A token at position
p is always computed in row ``p % TILE`` of a tile of `TILE` positions, one head at a time, over as
many positions as end with its tile; rows that are not asked for, and positions that are not known
yet, are zeros. So every product has a shape that depends on the position alone, and a key that was
loaded can be compared with one that is computed afresh, byte by byte.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from wtransfer.testing.mini_engine.shape import TILE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wtransfer.testing.mini_engine.cache import PagedCache
    from wtransfer.testing.mini_engine.shape import ServedShape
    from wtransfer.testing.mini_engine.shards import Shards

_ROPE_BASE = 10_000.0
# Random weights of this size attend sharply and answer to the whole prompt: wrong keys show.
_GAIN = 3.0


class TokenSpan(NamedTuple):
    """Consecutive tokens of one sequence."""

    tokens: list[int]
    """The tokens."""
    start: int
    """Position of the first."""
    table: torch.Tensor
    """The blocks of the sequence, in order: int64."""


class LayerLink(Protocol):
    """Hears of every layer of a forward pass."""

    def before_layer(self, number: int) -> None:
        """Return once its keys and values of earlier positions are there."""

    def after_layer(self, number: int) -> None:
        """Hear that those of this pass are there, too."""


class Layer(nn.Module):
    """Attention over the paged cache, and feed-forward.

    Args:
        shape: Of the model.
    """

    def __init__(self, shape: ServedShape) -> None:
        super().__init__()
        width, kv_width = shape.width, shape.num_kv_heads * shape.head_width
        self.shape = shape
        self.attention_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 2 * width)
        self.feed_out = nn.Linear(2 * width, width)

    def project(
        self, weight: torch.Tensor, normed: torch.Tensor, head: int, num_per_kv: int
    ) -> torch.Tensor:
        """Return what one key head, or the query heads that share it, make of a tile.

        Args:
            weight: Of the projection.
            normed: ``(TILE, width)``.
            head: Key head.
            num_per_kv: Heads of this projection for each key head.

        Returns:
            ``(num_per_kv, TILE, head width)``.
        """
        size = num_per_kv * self.shape.head_width
        rows = weight[head * size : (head + 1) * size]
        return F.linear(normed, rows).view(TILE, num_per_kv, -1).transpose(0, 1)

    def feed(self, stream: torch.Tensor) -> torch.Tensor:
        """Return the stream after the feed-forward part."""
        hidden = F.gelu(self.feed_in(self.feed_norm(stream)))
        out: torch.Tensor = stream + self.feed_out(hidden)
        return out


class PagedTransformer(nn.Module):
    """Predicts the next token. Positions are rotations: nothing bounds their number.

    Args:
        shape: Sizes.
        seed: Equal seeds give equal weights.
    """

    def __init__(self, shape: ServedShape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.draw_weights(seed)

    @torch.no_grad()
    def draw_weights(self, seed: int) -> None:
        """Draw all weights anew.

        Args:
            seed: Equal seeds give equal weights.
        """
        random = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                std = 1.0 if name.startswith("embedding") else _GAIN / math.sqrt(parameter.shape[1])
                parameter.normal_(std=std, generator=random)
            elif name.endswith("bias"):
                parameter.zero_()

    @torch.inference_mode()
    def forward(
        self,
        spans: Sequence[TokenSpan],
        cache: PagedCache,
        shards: Shards,
        link: LayerLink | None = None,
    ) -> list[int]:
        """Compute consecutive tokens of sequences, and return the most likely one to follow each.

        Their keys and values are written into the cache; those before them must be there, at least
        once `link` has returned from ``before_layer``.

        Args:
            spans: Each at least one token.
            cache: Of this rank.
            shards: The heads of this rank, and the other ranks.
            link: Hears of every layer.
        """
        tiles: list[_Tile] = []
        last = []
        for span in spans:
            tiles += _tiles(span, self.shape.head_width, cache, shards)
            last.append(len(tiles) - 1)
        streams = [self.embedding(tile.tokens) for tile in tiles]
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            if link is not None:
                link.before_layer(number)
            # In the order of positions: a tile looks at what those before it have written.
            streams = [
                self._compute(number, layer, tile, stream)
                for tile, stream in zip(tiles, streams, strict=True)
            ]
            if link is not None:
                link.after_layer(number)
        return [self._following(tiles[place], streams[place]) for place in last]

    def next_token(
        self, tokens: list[int], start: int, cache: PagedCache, table: torch.Tensor, shards: Shards
    ) -> int:
        """Compute consecutive tokens of one sequence, and return the most likely one to follow.

        Args:
            tokens: At least one.
            start: Position of the first.
            cache: Of this rank.
            table: The blocks of the sequence: int64.
            shards: The heads of this rank, and the other ranks.
        """
        return self.forward([TokenSpan(tokens, start, table)], cache, shards)[0]

    def _compute(
        self, number: int, layer: Layer, tile: _Tile, stream: torch.Tensor
    ) -> torch.Tensor:
        normed = layer.attention_norm(stream)
        stream = stream + layer.attention_out(tile.attend(number, layer, normed))
        return layer.feed(stream)

    def _following(self, tile: _Tile, stream: torch.Tensor) -> int:
        logits: torch.Tensor = self.head(self.norm(stream))
        return int(logits[tile.rows.stop - 1].argmax())


def _tiles(span: TokenSpan, head_width: int, cache: PagedCache, shards: Shards) -> Iterator[_Tile]:
    end = span.start + len(span.tokens)
    for start in range(span.start // TILE * TILE, end, TILE):
        first, last = max(span.start, start), min(end, start + TILE)
        tile = _Tile((start, first, last), head_width, cache, span.table, shards)
        tile.tokens[tile.rows] = torch.tensor(span.tokens[first - span.start : last - span.start])
        yield tile


class _Tile:
    """`TILE` positions of one sequence, of which some are computed.

    Args:
        span: Position of the first row, and the positions that are computed: first, and end.
        head_width: Of the model.
        cache: Of this rank.
        table: The blocks of the sequence.
        shards: The heads of this rank, and the other ranks.
    """

    def __init__(
        self,
        span: tuple[int, int, int],
        head_width: int,
        cache: PagedCache,
        table: torch.Tensor,
        shards: Shards,
    ) -> None:
        start, self._first, self._end = span
        self._length = start + TILE
        self._cache, self._table, self._shards = cache, table, shards
        positions = torch.arange(start, self._length)
        self._future = torch.arange(self._length)[None, :] > positions[:, None]
        self._rotate = _Rotation(positions, head_width)
        self.rows = slice(self._first - start, self._end - start)
        """The rows that are computed."""
        self.tokens = torch.zeros(TILE, dtype=torch.int64)
        """The tokens of all rows; zero where none is computed."""

    def attend(self, number: int, layer: Layer, normed: torch.Tensor) -> torch.Tensor:
        """Write keys and values, and return what all heads of all ranks attend to."""
        heads = self._shards.heads
        rotate = self._rotate
        keys = [rotate(layer.project(layer.key.weight, normed, head, 1)) for head in heads]
        values = [layer.project(layer.value.weight, normed, head, 1) for head in heads]
        self._cache.write(
            number,
            self._table,
            self._first,
            torch.cat(keys)[:, self.rows],
            torch.cat(values)[:, self.rows],
        )
        known = self._cache.read(number, self._table, self._end, self._length)
        mixed = [
            self._mix(
                rotate(layer.project(layer.query.weight, normed, head, layer.shape.queries_per_kv)),
                *known[:, place],
            )
            for place, head in enumerate(heads)
        ]
        return self._shards.join(torch.cat(mixed, dim=-1))

    def _mix(self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        scores = queries @ keys.T / math.sqrt(keys.shape[-1])
        mixed = scores.masked_fill(self._future, -math.inf).softmax(-1) @ values
        return mixed.transpose(0, 1).reshape(TILE, -1)


class _Rotation:
    """Rotary position embedding of a tile."""

    def __init__(self, positions: torch.Tensor, head_width: int) -> None:
        rates = _ROPE_BASE ** (-torch.arange(0, head_width, 2) / head_width)
        angles = positions[:, None] * rates
        self._cos, self._sin = angles.cos(), angles.sin()

    def __call__(self, heads: torch.Tensor) -> torch.Tensor:
        left, right = heads.chunk(2, dim=-1)
        turned = (left * self._cos - right * self._sin, left * self._sin + right * self._cos)
        return torch.cat(turned, dim=-1)
