"""The served model computes the same bits, however it comes to its keys and values."""

from __future__ import annotations

import threading

import pytest
import torch

from wtransfer.testing.communicator import memory_group
from wtransfer.testing.mini_engine.cache import PagedCache
from wtransfer.testing.mini_engine.config import CacheShape
from wtransfer.testing.mini_engine.contract import Span
from wtransfer.testing.mini_engine.model import TILE, TensorParallelRank
from wtransfer.testing.mini_engine.reference import reference_model, some_prompts

LENGTH = 3 * TILE + 3


@pytest.fixture
def tokens():
    return some_prompts(1, unit=128)[0][:LENGTH]


@pytest.fixture
def model():
    return reference_model(0)


def compute(model, tokens, block_size, cuts=(), *, tp=None, garbage=0.0):
    """Compute tokens in pieces; return what follows, and keys and values without the blocks."""
    tp = tp or TensorParallelRank(model.shape)
    num_blocks = 2 * (LENGTH // block_size + 1)
    cache = PagedCache(model.shape, CacheShape(block_size, num_blocks), len(tp.heads))
    for layer in cache.layers:
        layer.fill_(garbage)
    # Blocks lie in the cache in any order.
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(block_size))
    table = order[: -(-LENGTH // block_size)]
    for start, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        span = Span("r", tokens[start:end], start, (table.tolist(),))
        (token,) = model.forward([span], cache, tp)
    layers = range(model.shape.num_layers)
    return token, torch.stack([cache.read(layer, table, LENGTH, LENGTH) for layer in layers])


@pytest.mark.parametrize("block_size", [1, 16, 128])
@pytest.mark.parametrize("cuts", [(), (TILE,), (1, TILE + 5, TILE + 6, LENGTH - 1)])
def test_output_does_not_depend_on_block_size_or_chunks(model, tokens, block_size, cuts):
    token, known = compute(model, tokens, 16)
    other_token, other_known = compute(model, tokens, block_size, cuts, garbage=3.0)
    assert token == other_token
    assert torch.equal(known, other_known)


def test_changed_key_changes_the_output(model, tokens):
    """The witness of all comparisons of tokens: attention looks at the cache, all of it."""
    shape = CacheShape(16, 8)
    tp = TensorParallelRank(model.shape)
    answers = set()
    for spoiled in (None, 0, 2, 4):
        cache, table = PagedCache(model.shape, shape, 2), list(range(8))
        model.forward([Span("r", tokens[:-1], 0, (table,))], cache, tp)
        if spoiled is not None:
            cache.layers[0][spoiled] *= -1
        following, last = [], tokens[-1]
        for position in range(len(tokens) - 1, len(tokens) + 5):
            (last,) = model.forward([Span("r", [last], position, (table,))], cache, tp)
            following.append(last)
        answers.add(tuple(following))
    assert len(answers) == 4


def test_two_ranks_compute_the_same_bits_as_one(model, tokens):
    token, known = compute(model, tokens, 16)
    found = {}

    def be(group):
        found[group.rank] = compute(model, tokens, 16, tp=TensorParallelRank(model.shape, group))

    threads = [threading.Thread(target=be, args=(group,)) for group in memory_group(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert [found[rank][0] for rank in range(2)] == [token, token]
    assert torch.equal(known, torch.cat([found[rank][1] for rank in range(2)], dim=2))
