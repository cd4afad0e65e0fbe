"""Servers of SGLang that take no update, each told in a sentence."""

import re
from types import SimpleNamespace as Bag

import pytest

from wtransfer_sglang.refusals import refusal_of


def cache_of(name, module):
    """Return a stand-in for a prefix cache of SGLang, which is known by its class."""
    return type(name, (), {"__module__": module})()


def parts():
    """Return what a server that takes updates has, as SGLang has it."""
    scheduler = Bag(
        spec_algorithm=Bag(is_none=lambda: True),
        draft_worker=None,
        disaggregation_mode=Bag(value="null"),
        model_config=Bag(quantization=None, is_multimodal=False),
        tp_worker=Bag(is_hybrid_swa=False),
        is_hybrid_ssm=False,
        enable_lora=False,
        dllm_config=None,
        enable_hisparse=False,
        enable_lmcache=False,
        enable_pdmux=False,
        enable_unified_cache_external_linker=False,
        tree_cache=cache_of("UnifiedRadixCache", "sglang.srt.mem_cache.unified_radix_cache"),
        server_args=Bag(enable_streaming_session=False),
    )
    return Bag(
        scheduler=scheduler,
        parallel=Bag(pp_size=1, attn_dp_enabled=False),
        experts=Bag(elastic_ep_backend=None),
        derived=None,
    )


def test_plain_server_is_not_refused():
    assert refusal_of(**vars(parts())) is None


@pytest.mark.parametrize(
    ("where", "value", "text"),
    [
        ("scheduler.spec_algorithm", Bag(is_none=lambda: False), "a draft model would keep its"),
        ("scheduler.draft_worker", object(), "a draft model would keep its weights"),
        ("scheduler.disaggregation_mode", Bag(value="prefill"), "a disaggregated prefill and"),
        ("scheduler.model_config.quantization", "fp8", r"serves quantised weights \(fp8\)"),
        ("scheduler.tp_worker.is_hybrid_swa", True, "several groups of KV cache.* sliding windows"),
        ("scheduler.is_hybrid_ssm", True, "several groups of KV cache.* state spaces"),
        ("scheduler.model_config.is_multimodal", True, "its model is multimodal"),
        ("scheduler.enable_lora", True, "it serves adapters"),
        ("scheduler.dllm_config", object(), "a diffusion model"),
        ("scheduler.enable_hisparse", True, "beside its prefix cache"),
        ("scheduler.enable_lmcache", True, "beside its prefix cache"),
        ("scheduler.enable_pdmux", True, "beside its prefix cache"),
        (
            "scheduler.tree_cache",
            cache_of("FlexKVRadixCache", "sglang.srt.mem_cache.storage.flexkv.flexkv_radix_cache"),
            "its prefix cache is a FlexKVRadixCache, and",
        ),
        ("scheduler.tree_cache", cache_of("UnifiedRadixCache", "of.another"), "its prefix cache"),
        ("scheduler.enable_unified_cache_external_linker", True, "blocks of another store"),
        ("scheduler.server_args.enable_streaming_session", True, "its streaming sessions"),
        ("parallel.pp_size", 2, "it has 2 pipeline stages"),
        ("parallel.attn_dp_enabled", True, "its attention is data-parallel"),
        ("experts.elastic_ep_backend", "mooncake", "its experts are elastic"),
        ("derived", "SGLang's own reason", "SGLang's own reason"),
    ],
)
def test_server_that_was_not_proven_right_is_refused_by_name(where, value, text):
    given = parts()
    *path, name = where.split(".")
    owner = given
    for each in path:
        owner = getattr(owner, each)
    setattr(owner, name, value)
    assert re.search(text, refusal_of(**vars(given)))
