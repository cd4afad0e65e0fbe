"""Servers of SGLang that take no update: what was not proven to be right with one, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
"""The prefix cache whose blocks are found by the ``extra_key`` of their request, in every level."""


def refusal_of(scheduler: Any, parallel: Any, experts: Any, derived: str | None) -> str | None:
    """Return why a scheduler's model takes no update; None: nothing known speaks against it.

    Args:
        scheduler: SGLang's.
        parallel: SGLang's, of this process.
        experts: SGLang's settings of experts.
        derived: Why SGLang itself would not update the model; None: it would.
    """
    found = [*_refusals(scheduler, parallel, experts), *([derived] if derived else [])]
    return "; ".join(found) or None


def _refusals(scheduler: Any, parallel: Any, experts: Any) -> Iterator[str]:
    config = scheduler.model_config
    if not scheduler.spec_algorithm.is_none() or scheduler.draft_worker is not None:
        yield "it drafts tokens, and a draft model would keep its weights"
    if scheduler.disaggregation_mode.value != "null":
        yield (
            "it is one side of a disaggregated prefill and decode, and requests of which the other "
            "side holds KV cache are not retracted"
        )
    if config.quantization is not None:
        yield f"it serves quantised weights ({config.quantization})"
    # Not the scheduler's own: that is about how it allocates, and False for some with windows.
    if scheduler.tp_worker.is_hybrid_swa:
        yield "its model has several groups of KV cache, one of them for sliding windows"
    if scheduler.is_hybrid_ssm:
        yield "its model has several groups of KV cache, one of them for state spaces"
    if config.is_multimodal:
        yield "its model is multimodal, and embeddings of media are not named by weights"
    if parallel.pp_size > 1:
        yield f"it has {parallel.pp_size} pipeline stages"
    if parallel.attn_dp_enabled:
        yield "its attention is data-parallel"
    if experts.elastic_ep_backend is not None:
        yield "its experts are elastic"
    if scheduler.enable_lora:
        yield "it serves adapters"
    if scheduler.dllm_config is not None:
        yield "its model is a diffusion model"
    if scheduler.enable_hisparse or scheduler.enable_lmcache or scheduler.enable_pdmux:
        yield "it keeps KV cache beside its prefix cache (hisparse, LMCache or pdmux)"
    cache = type(scheduler.tree_cache)
    if f"{cache.__module__}.{cache.__qualname__}" != CACHE:
        yield (
            f"its prefix cache is a {cache.__qualname__}, and whether that finds blocks by the "
            "name of their weights is not known"
        )
    if scheduler.enable_unified_cache_external_linker:
        yield "its prefix cache links blocks of another store (external linker)"
    if getattr(scheduler.server_args, "enable_streaming_session", False):
        yield "its streaming sessions keep KV cache beside its prefix cache"
