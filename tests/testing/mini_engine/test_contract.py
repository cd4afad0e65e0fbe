"""Requests, steps and forward passes have vLLM's names; plans and results round-trip."""

from __future__ import annotations

import msgspec
import pytest

from wtransfer.connectors.offloading.metadata import Job, OffloadingMetadata
from wtransfer.specs.interface import GPULoadStoreSpec
from wtransfer.specs.shared_region import ArenaLoadStoreSpec
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.contract import (
    ConnectorOutput,
    KVCacheBlocks,
    Request,
    Span,
    StepPlan,
    StepResult,
)
from wtransfer.testing.mini_engine.serialize import deserialize, serialize
from wtransfer.weight_version import WeightVersion

ABSENT = ("cache_salt", "lora_request", "pooling_params", "prompt_embeds", "sampling_params")


@pytest.fixture
def served(kit, serve, tmp_path):
    """A host that is too small for two requests, and all that its connector has heard."""
    prompts = [[number, *prompt] for number, prompt in enumerate(kit.prompts(16, 2))]
    host = serve(
        EngineConfig(
            cache=CacheShape(16, max(kit.blocks_for(each, 16, 40) for each in prompts) + 3),
            seed=3,
            connector="FolderConnector",
            module_path="folder_connector",
            options={"folder": str(tmp_path)},
        )
    )
    outputs, contexts = [], []
    scheduler, worker = host.scheduler.connector, host.executor.worker.connector
    build, load = scheduler.build_connector_meta, worker.start_load_kv
    scheduler.build_connector_meta = lambda output: outputs.append(output) or build(output)
    worker.start_load_kv = lambda context: contexts.append(context) or load(context)
    requests = [host.submit(each, 40) for each in prompts]
    host.run()
    assert [each.output for each in requests] == kit.references(prompts, 3, 40)
    return host, outputs, contexts


def test_request_has_vllm_names():
    request = Request("r", [1, 2], 3)
    assert [getattr(request, name) for name in ABSENT] == [None] * len(ABSENT)
    request.all_token_ids.append(5)
    assert (request.num_output_tokens, request.output_token_ids) == (1, [5])
    assert request.mm_features == []


def test_blocks_have_vllm_names():
    (blocks,) = KVCacheBlocks([4, 2]).blocks
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
    caches = host.executor.worker.connector.caches
    for context in contexts:
        assert context.no_compile_layers.keys() == caches.keys()
        for name, layer in context.no_compile_layers.items():
            assert layer.kv_cache is caches[name]


VERSIONS = [WeightVersion("A", 1), WeightVersion("B", 2)]


def over_the_wire(message):
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=type(message))


def test_step_plan_round_trips():
    tier = ArenaLoadStoreSpec([3, 1], [b"k", b"\xff\0"])
    blocks = GPULoadStoreSpec([5, 6, 7], [2, 1], [4, 0])
    loads = [Job(1, "r", blocks, tier, tuple(VERSIONS))]
    metadata = OffloadingMetadata(loads=loads, gone={"s": [4]}, preempted=["t"])
    plan = StepPlan(VERSIONS, [Span("r", [1], 4, [5])], serialize(metadata), True, {"u"})
    arrived = over_the_wire(plan)
    assert arrived == plan
    assert all(isinstance(each, WeightVersion) for each in arrived.versions)
    got = deserialize(arrived.connector_metadata)
    (job,) = got.loads
    assert (got.gone, got.preempted, got.stores) == ({"s": [4]}, ["t"], [])
    assert (type(job), job.job_id, job.request_id) == (Job, 1, "r")
    assert vars(job.blocks) == vars(blocks)
    assert job.versions == tuple(VERSIONS)
    assert all(isinstance(each, WeightVersion) for each in job.versions)
    assert (type(job.tier), vars(job.tier)) == (ArenaLoadStoreSpec, vars(tier))


def test_step_result_round_trips():
    output = ConnectorOutput({"r"}, {"s"}, {3, 4}, serialize(b"\xff\0"))
    result = StepResult(WeightVersion("A", 1 << 40), {"r": 7}, output)
    assert over_the_wire(result) == result
    refused = StepResult(None, None)
    assert over_the_wire(refused) == refused
