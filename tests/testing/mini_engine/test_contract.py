"""Requests, steps and forward passes have vLLM's names."""

from __future__ import annotations

import pytest

from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.contract import KVCacheBlocks, Request
from wtransfer.testing.mini_engine.reference import some_prompts

ABSENT = ("cache_salt", "lora_request", "pooling_params", "prompt_embeds", "sampling_params")


@pytest.fixture
def served(kit, serve, tmp_path):
    """A host that is too small for two requests, and all that its connector was given."""
    prompts = [[number, *prompt] for number, prompt in enumerate(some_prompts(2))]
    num_blocks = (max(map(len, prompts)) + 40) // 16 + 3
    host = serve(
        EngineConfig(
            cache=CacheShape(16, num_blocks),
            connector="MemoryConnector",
            module_path="wtransfer.testing.fakes",
            options={"shelf": str(tmp_path)},
        )
    )
    outputs, contexts = [], []
    scheduler, worker = host.scheduler.connector, host.executor.worker.connector
    build, load = scheduler.build_connector_meta, worker.start_load_kv
    scheduler.build_connector_meta = lambda output: outputs.append(output) or build(output)
    worker.start_load_kv = lambda context: contexts.append(context) or load(context)
    assert host.generate(prompts, 40) == kit.references(prompts, count=40)
    return host, outputs, contexts


def test_request_has_vllm_names():
    request = Request("r", [1, 2], 3)
    assert [getattr(request, name) for name in ABSENT] == [None] * len(ABSENT)
    request.all_token_ids.append(5)
    assert (request.num_output_tokens, request.output_token_ids) == (1, [5])
    assert request.mm_features == []


def test_blocks_have_vllm_names():
    (blocks,) = KVCacheBlocks(([4, 2],)).blocks
    assert [each.block_id for each in blocks] == [4, 2]


def test_scheduler_output_has_vllm_names(served):
    _, outputs, _ = served
    new = [each for output in outputs for each in output.scheduled_new_reqs]
    assert len(new) == 2
    for each in new:
        assert [getattr(each, name) for name in ABSENT if name != "cache_salt"] == [None] * 4
        assert each.mm_features == []
    resumed = 0
    for output in outputs:
        cached = output.scheduled_cached_reqs
        assert len(cached.num_output_tokens) == len(cached.req_ids)
        assert cached.all_token_ids.keys() == cached.resumed_req_ids
        assert cached.new_token_ids == []
        for request_id, count in zip(cached.req_ids, cached.num_output_tokens, strict=True):
            if request_id in cached.resumed_req_ids:
                (prompt,) = [e.prompt_token_ids for e in new if e.req_id == request_id]
                assert cached.all_token_ids[request_id][: len(prompt)] == prompt
                assert len(cached.all_token_ids[request_id]) == len(prompt) + count
                resumed += 1
    assert resumed > 0


def test_forward_context_has_vllm_names(served):
    host, _, contexts = served
    caches = host.executor.worker.connector.side.caches
    for context in contexts:
        assert context.no_compile_layers.keys() == caches.keys()
        for name, layer in context.no_compile_layers.items():
            assert layer.kv_cache is caches[name]
