"""The served model: a decoder-only transformer whose keys and values live in a paged cache.

The model computes the same bits whatever was cached before, and on any number of ranks. A token at
position p is always computed in row ``p % TILE`` of a tile of `TILE` positions, one head at a time,
over all positions up to the end of its tile; rows that are not asked for, and positions that are
not known yet, are zeros. So every product has a shape that depends on the position alone, and a
loaded key can be compared with a computed one, byte by byte.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812  # torch's own name for it
from torch import nn

from wtransfer.weight_version import process_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from wtransfer.testing.mini_engine.cache import PagedCache
    from wtransfer.testing.mini_engine.config import ModelShape
    from wtransfer.testing.mini_engine.contract import Span
    from wtransfer.transport.communicator import Communicator

TILE = 32
"""Positions that are computed at once, by every rank and for every request."""
_ROPE_BASE = 10_000.0
# Random weights of this size attend sharply and answer to the whole prompt: wrong keys show.
_GAIN = 3.0


class TensorParallelRank:
    """One rank's share of the heads, and its collectives.

    Every rank has the whole weights, and computes and caches the keys and values of its own heads.

    Args:
        shape: Shape of the model.
        group: Group of the ranks; None: a single rank.

    Raises:
        ValueError: The key heads cannot be divided evenly.
    """

    def __init__(self, shape: ModelShape, group: Communicator | None = None) -> None:
        self._group = group
        self.rank = group.rank if group else 0
        self.size = group.size if group else 1
        if shape.num_kv_heads % self.size:
            raise ValueError(
                f"{shape.num_kv_heads} key heads cannot be divided among {self.size} ranks"
            )
        count = shape.num_kv_heads // self.size
        self.heads = range(self.rank * count, (self.rank + 1) * count)
        """Key heads of this rank."""

    def all_gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts of all ranks side by side, in order of rank.

        Args:
            part: ``(rows, this rank's columns)``; the same shape on every rank.
        """
        if self._group is None:
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        parts[self.rank] = part.contiguous()
        # Begin every broadcast before the first wait: ranks need not take turns.
        begun = [
            self._group.broadcast(each.view(-1).view(torch.uint8), root)
            for root, each in enumerate(parts)
        ]
        for each in begun:
            each.wait()
        return torch.cat(parts, dim=-1)

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank: the same answer on every rank."""
        return bool(self.all_gather(torch.tensor([flag])).any())

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None


class Layer(nn.Module):
    """Weights of one layer: attention over the paged cache, and feed-forward."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        width, kv_width = shape.width, shape.num_kv_heads * shape.head_width
        self.head_width = shape.head_width
        self.queries_per_kv = shape.queries_per_kv
        self.attention_norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.feed_norm = nn.LayerNorm(width)
        self.feed_in = nn.Linear(width, 2 * width)
        self.feed_out = nn.Linear(2 * width, width)

    def project(
        self, weight: torch.Tensor, normed: torch.Tensor, head: int, num_per_kv: int = 1
    ) -> torch.Tensor:
        """Return one key head's share of a projection of a tile.

        Args:
            weight: Weight of the projection.
            normed: ``(TILE, width)``.
            head: Key head.
            num_per_kv: Heads of this projection for each key head.

        Returns:
            ``(num_per_kv, TILE, head width)``.
        """
        size = num_per_kv * self.head_width
        rows = weight[head * size : (head + 1) * size]
        return F.linear(normed, rows).view(TILE, num_per_kv, -1).transpose(0, 1)

    def finish(self, stream: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after attention and feed-forward."""
        stream = stream + self.attention_out(attended)
        out: torch.Tensor = stream + self.feed_out(F.gelu(self.feed_in(self.feed_norm(stream))))
        return out


def _ignore(layer: int) -> None:
    """Take a layer's number, and do nothing."""


class PagedTransformer(nn.Module):
    """Predicts the next token. Positions are rotations: their number has no bound.

    Args:
        shape: Sizes.
        seed: Equal seeds give equal weights.
    """

    def __init__(self, shape: ModelShape, seed: int) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.draw_weights(seed)

    @torch.no_grad()
    def draw_weights(self, seed: int) -> None:
        """Draw all weights anew; equal seeds give equal weights."""
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
        spans: Sequence[Span],
        cache: PagedCache,
        tp: TensorParallelRank,
        before_layer: Callable[[int], None] = _ignore,
        after_layer: Callable[[int], None] = _ignore,
    ) -> list[int]:
        """Compute consecutive tokens of sequences; return the most likely next token of each.

        Writes their keys and values into the cache.

        Args:
            spans: Each at least one token.
            cache: Cache of this rank.
            tp: This rank.
            before_layer: Called with each layer's number before it is computed; when it returns,
                the keys and values of earlier positions must be in the cache.
            after_layer: Called when the keys and values of the spans are in the cache, too.
        """
        tiles: list[_Tile] = []
        last = []
        for span in spans:
            tiles += _tiles(span, self.shape, cache, tp)
            last.append(len(tiles) - 1)
        streams = [self.embedding(tile.tokens) for tile in tiles]
        for number, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            before_layer(number)
            # In the order of positions: a tile reads keys and values written by earlier tiles.
            streams = [
                layer.finish(stream, tile.attend(number, layer, layer.attention_norm(stream)))
                for tile, stream in zip(tiles, streams, strict=True)
            ]
            after_layer(number)
        logits = [self.head(self.norm(streams[i]))[tiles[i].rows.stop - 1] for i in last]
        return [int(each.argmax()) for each in logits]


class LocalWeights:
    """The weights of models of this process, all drawn from one seed; `change` draws others.

    Args:
        seed: The first seed.
        *models: Models that have the weights of this seed.
    """

    def __init__(self, seed: int, *models: PagedTransformer) -> None:
        self.seed = seed
        """The present seed."""
        self._models = list(models)
        self._held = process_weights.hold(f"drawn from {seed}")

    def new_model(self, shape: ModelShape) -> PagedTransformer:
        """Return one more model with these weights."""
        self._models.append(PagedTransformer(shape, self.seed))
        return self._models[-1]

    def change(self, *seeds: int) -> None:
        """Change the weights between two steps as a commit does, once for each seed."""
        for seed in seeds:
            with self._held.changing(lambda: f"drawn from {self.seed}"):
                for model in self._models:
                    model.draw_weights(seed)
                self.seed = seed

    def close(self) -> None:
        """Withdraw the weights from this process."""
        self._held.close()


def _tiles(
    span: Span, shape: ModelShape, cache: PagedCache, tp: TensorParallelRank
) -> Iterator[_Tile]:
    tables = list(map(torch.tensor, span.block_ids))
    end = span.start + len(span.tokens)
    for start in range(span.start // TILE * TILE, end, TILE):
        first, last = max(span.start, start), min(end, start + TILE)
        tile = _Tile((start, first, last), shape, cache, tables, tp)
        tile.tokens[tile.rows] = torch.tensor(span.tokens[first - span.start : last - span.start])
        yield tile


class _Tile:
    """`TILE` positions of one sequence, some of which are computed.

    Args:
        span: Position of the first row, and the positions that are computed: first, and end.
        shape: Shape of the model.
        cache: Cache of this rank.
        tables: Blocks of the sequence, by KV cache group.
        tp: This rank.
    """

    def __init__(
        self,
        span: tuple[int, int, int],
        shape: ModelShape,
        cache: PagedCache,
        tables: list[torch.Tensor],
        tp: TensorParallelRank,
    ) -> None:
        start, self._first, self._end = span
        self._length = start + TILE
        self._shape, self._cache, self._tables, self._tp = shape, cache, tables, tp
        positions = torch.arange(start, self._length)
        distances = positions[:, None] - torch.arange(self._length)[None, :]
        self._unseen = [
            (distances < 0) | (distances >= (self._length if window is None else window))
            for window in shape.windows
        ]
        rates = _ROPE_BASE ** (-torch.arange(0, shape.head_width, 2) / shape.head_width)
        angles = positions[:, None] * rates
        self._cos, self._sin = angles.cos(), angles.sin()
        self.rows = slice(self._first - start, self._end - start)
        """The rows that are computed."""
        self.tokens = torch.zeros(TILE, dtype=torch.int64)
        """The tokens of all rows; zero in rows that are not computed."""

    def attend(self, number: int, layer: Layer, normed: torch.Tensor) -> torch.Tensor:
        """Write keys and values; return the attention of all heads of all ranks."""
        heads, group = self._tp.heads, self._shape.group_of(number)
        table, unseen = self._tables[group], self._unseen[group]
        keys = [self._rotate(layer.project(layer.key.weight, normed, head)) for head in heads]
        values = [layer.project(layer.value.weight, normed, head) for head in heads]
        self._cache.write(
            number,
            table,
            self._first,
            torch.cat(keys)[:, self.rows],
            torch.cat(values)[:, self.rows],
        )
        known = self._cache.read(number, table, self._end, self._length)
        mixed = []
        for place, head in enumerate(heads):
            queries = layer.project(layer.query.weight, normed, head, layer.queries_per_kv)
            seen_keys, seen_values = known[:, place]
            mixed.append(_mix(self._rotate(queries), seen_keys, seen_values, unseen))
        return self._tp.all_gather(torch.cat(mixed, dim=-1))

    def _rotate(self, heads: torch.Tensor) -> torch.Tensor:
        """Apply the rotary position embedding."""
        left, right = heads.chunk(2, dim=-1)
        turned = (left * self._cos - right * self._sin, left * self._sin + right * self._cos)
        return torch.cat(turned, dim=-1)


def _mix(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, unseen: torch.Tensor
) -> torch.Tensor:
    scores = queries @ keys.T / math.sqrt(keys.shape[-1])
    mixed = scores.masked_fill(unseen, -math.inf).softmax(-1) @ values
    return mixed.transpose(0, 1).reshape(TILE, -1)
