"""Reference output: what a model computes for one request alone, with nothing loaded."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING, NamedTuple

import torch

from wtransfer.testing.mini_engine.cache import PagedCache
from wtransfer.testing.mini_engine.model import PagedTransformer
from wtransfer.testing.mini_engine.shape import CacheShape, ServedShape
from wtransfer.testing.mini_engine.shards import Shards

if TYPE_CHECKING:
    from collections.abc import Sequence

_BLOCK_SIZE = 16


class Reference(NamedTuple):
    """Reference output of one request."""

    output: list[int]
    """The tokens that follow the prompt."""
    pages: list[torch.Tensor]
    """Keys and values of all positions but the last, by layer: ``(key or value, head, position,
    head width)``."""


def reference_output(
    prompt: Sequence[int], num_new: int, seed: int, shape: ServedShape
) -> Reference:
    """Compute a request with a model that has no connector and serves nothing else.

    Args:
        prompt: Tokens.
        num_new: Number of tokens to generate.
        seed: Of the model's weights.
        shape: Of the model.
    """
    return _reference_output(tuple(prompt), num_new, seed, shape)


def some_prompts(count: int, *, unit: int = _BLOCK_SIZE, seed: int = 0) -> list[list[int]]:
    """Return prompts that begin alike and part somewhere within the first two units.

    Args:
        count: How many.
        unit: Each has more than three and less than five of so many tokens.
        seed: Others for another one.
    """
    drawn = random.Random(seed)  # noqa: S311  # no secret

    def text(length: int) -> list[int]:
        return [drawn.randrange(ServedShape().vocabulary) for _ in range(length)]

    common = text(2 * unit)
    return [
        common[: drawn.randrange(unit, 2 * unit)] + text(2 * unit + drawn.randrange(1, unit))
        for _ in range(count)
    ]


@functools.cache
def _model(seed: int, shape: ServedShape) -> PagedTransformer:
    return PagedTransformer(shape, seed)


@functools.lru_cache(maxsize=512)
def _reference_output(
    prompt: tuple[int, ...], num_new: int, seed: int, shape: ServedShape
) -> Reference:
    model, tokens, start = _model(seed, shape), list(prompt), 0
    num_blocks = (len(prompt) + num_new) // _BLOCK_SIZE + 1
    cache = PagedCache(shape, CacheShape(_BLOCK_SIZE, num_blocks), shape.num_kv_heads)
    table, shards = torch.arange(num_blocks), Shards(shape)
    for _ in range(num_new):
        token = model.next_token(tokens[start:], start, cache, table, shards)
        start = len(tokens)
        tokens.append(token)
    pages = [cache.read(layer, table, start, start) for layer in range(shape.num_layers)]
    return Reference(tokens[len(prompt) :], pages)
