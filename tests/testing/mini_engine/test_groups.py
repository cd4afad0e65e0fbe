"""A model whose layers have windows: tables of blocks by group, and blocks that come back early."""

from __future__ import annotations

import pytest
import torch

from wtransfer.errors import ConnectorOptionError
from wtransfer.testing.mini_engine.cache import PagedCache
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, Limits, ModelShape
from wtransfer.testing.mini_engine.contract import Span
from wtransfer.testing.mini_engine.model import TensorParallelRank
from wtransfer.testing.mini_engine.reference import (
    reference_model,
    reference_output,
    some_prompts,
)

WINDOW = 24
HYBRID = ModelShape(num_layers=3, windows=(None, WINDOW))


def expected(prompts, count, shape=HYBRID):
    return [reference_output(prompt, count, 0, shape).output for prompt in prompts]


@pytest.mark.parametrize("windows", [(None, WINDOW), (WINDOW,), (WINDOW, 9, None)])
def test_output_equals_reference_where_requests_share_a_small_cache(serve, windows):
    shape = ModelShape(num_layers=3, windows=windows)
    limits = Limits(max_num_batched_tokens=24)
    host = serve(EngineConfig(shape, CacheShape(16, 1 + 9 * len(windows)), limits))
    prompts = some_prompts(6)
    for _ in range(2):
        assert host.generate(prompts, 20) == expected(prompts, 20, shape)
    assert host.counts["preemptions"] > 0
    assert host.counts["tokens_cached"] > 0
    assert host.scheduler.pool.num_free == host.scheduler.pool.num_blocks


def test_blocks_that_the_window_has_passed_are_free_while_the_request_runs(serve):
    host = serve(EngineConfig(HYBRID))
    pool, most = host.scheduler.pool, []
    request = host.submit(some_prompts(1)[0], 150)
    while not request.is_done:
        host.step()
        most.append(pool.num_blocks - pool.num_free)
    # All blocks of the one group, of the other three at most: 24 tokens and the next one.
    num_blocks = (request.num_tokens - 1) // 16 + 1
    assert max(most) <= num_blocks + 3
    assert request.output == expected([request.prompt_token_ids], 150)[0]


@pytest.mark.parametrize("distance", [WINDOW - 1, WINDOW])
def test_token_attends_to_as_many_tokens_as_the_window_has(distance):
    shape = ModelShape(num_layers=2, windows=(WINDOW,))
    model, tp = reference_model(0, shape), TensorParallelRank(shape)
    tokens, table, pages = some_prompts(1, unit=32)[0][:60], (list(range(60)),), []
    for factor in (1, 50):
        cache = PagedCache(shape, CacheShape(1, 60), shape.num_kv_heads)
        model.forward([Span("r", tokens[:-1], 0, table)], cache, tp)
        cache.layers[0][59 - distance] *= factor
        model.forward([Span("r", tokens[-1:], 59, table)], cache, tp)
        # The second layer's keys of the last token follow from the attention of the first.
        pages.append(cache.layers[1][59])
    assert torch.equal(*pages) == (distance == WINDOW)


def test_connector_for_one_group_is_refused(serve):
    text = (
        r"has 2 groups, with the windows \[None, 24\]; SharedMemoryConnector moves one group "
        "without a window: choose a connector that says supports_hma"
    )
    with pytest.raises(ConnectorOptionError, match=text):
        serve(EngineConfig(HYBRID, connector="SharedMemoryConnector"))
