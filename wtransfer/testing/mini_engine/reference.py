"""Reference output: a model's output for one request alone, with nothing loaded or shared."""

from __future__ import annotations

import functools
import random
from typing import TYPE_CHECKING, NamedTuple

import torch

from wtransfer.testing.mini_engine.cache import PagedCache
from wtransfer.testing.mini_engine.config import CacheShape, ModelShape
from wtransfer.testing.mini_engine.contract import Span
from wtransfer.testing.mini_engine.model import PagedTransformer, TensorParallelRank

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
    prompt: Sequence[int],
    num_new: int,
    seed: int = 0,
    shape: ModelShape = ModelShape(),  # noqa: B008  # frozen
) -> Reference:
    """Compute a request with a model that has no connector and serves nothing else.

    Args:
        prompt: Tokens.
        num_new: Number of tokens to generate.
        seed: Seed of the weights.
        shape: Shape of the model.
    """
    return _reference_output(tuple(prompt), num_new, seed, shape)


@functools.cache
def reference_model(seed: int, shape: ModelShape = ModelShape()) -> PagedTransformer:  # noqa: B008  # frozen
    """Return the model with the weights of a seed; it is shared, and must not be changed."""
    return PagedTransformer(shape, seed)


def some_prompts(count: int, *, unit: int = _BLOCK_SIZE, seed: int = 0) -> list[list[int]]:
    """Return prompts that begin alike and part somewhere within the first two units.

    Args:
        count: Number of prompts.
        unit: Each prompt is longer than three and shorter than five times this number of tokens.
        seed: Another seed gives other prompts.
    """
    drawn = random.Random(seed)  # noqa: S311  # no secret

    def text(length: int) -> list[int]:
        return [drawn.randrange(ModelShape().vocabulary) for _ in range(length)]

    common = text(2 * unit)
    return [
        common[: drawn.randrange(unit, 2 * unit)] + text(2 * unit + drawn.randrange(1, unit))
        for _ in range(count)
    ]


@functools.lru_cache(maxsize=512)
def _reference_output(
    prompt: tuple[int, ...], num_new: int, seed: int, shape: ModelShape
) -> Reference:
    model, tokens, start = reference_model(seed, shape), list(prompt), 0
    num_blocks, num_groups = (len(prompt) + num_new) // _BLOCK_SIZE + 1, len(shape.windows)
    cache_shape = CacheShape(_BLOCK_SIZE, num_blocks * num_groups)
    cache, tp = PagedCache(shape, cache_shape, shape.num_kv_heads), TensorParallelRank(shape)
    tables = tuple(list(range(n * num_blocks, (n + 1) * num_blocks)) for n in range(num_groups))
    for _ in range(num_new):
        (token,) = model.forward([Span("reference", tokens[start:], start, tables)], cache, tp)
        start = len(tokens)
        tokens.append(token)
    pages = [
        cache.read(layer, torch.tensor(tables[shape.group_of(layer)]), start, start)
        for layer in range(shape.num_layers)
    ]
    return Reference(tokens[len(prompt) :], pages)
