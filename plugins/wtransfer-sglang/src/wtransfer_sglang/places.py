"""Places where SGLang keeps results of weights beside the model, and what a commit does to each.

The registered modules are proven (`wtransfer_sglang.proof`), and KV cache is named by its weights
(`wtransfer_sglang.bridge`). The tables below have the other places, and the servers with which no
update has been shown to be right. Each row says what a commit does:

==============  ==================================================================================
named           the weights are part of every name, so that other weights find nothing
reset           emptied at the commit
recomputed      dropped, and computed again by the new weights
not of weights  depends on inputs alone
loaded          memory of the model's parameters: an update writes it, and the proof has compared it
refused         the invitation of a publisher is refused
==============  ==================================================================================

A prefix cache or a storage that a server uses and that has no row refuses as well: its contents
would outlive a commit, and be served under the name of the new weights.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

REFUSED = "refused"


class Row(NamedTuple):
    """A place."""

    place: str
    """Name; where an option turns the place on, the option of SGLang's command line."""
    at_commit: str
    """Effect of a commit, a word of the table above."""
    why: str
    """Reason."""
    off: Any = None
    """Value, beside those that are false, with which nothing is turned on."""


ALWAYS = (
    Row("KV of running requests", "recomputed", "they are retracted; beam searches are ended"),
    Row("KV under a key of a request or session", "named", "the weights stand in front of the key"),
    Row("log probabilities and spans of tokens", "named", "each token by the weights of its step"),
    Row("log probabilities of a prompt", "named", "by the weights of the first token"),
    Row("outputs of a request by embeddings", "reset", "SGLang drops its tokens, too"),
    Row("embeddings and pooled states", "recomputed", "with the last chunk of the prompt"),
    Row("turns of a session", "not of weights", "they are tokens"),
    Row("states of grammars, penalties and watermarks", "not of weights", "they follow the tokens"),
)
"""Places of every server."""

_DRAFTS = Row("--speculative-algorithm", REFUSED, "a draft model would keep its weights")
_STATES = (
    REFUSED,
    "a running request is answered with its prompt's states twice: before a commit, and after",
)
_LEVELS = (
    REFUSED,
    "SGLang finds them by the slots of KV, also of KV that was loaded into slots of another block",
)
_PACKED = (REFUSED, "such kernels keep copies of the weights, which no load renews")
_LMCACHE = Row("--enable-lmcache", REFUSED, "it keeps KV cache in a store of its own")
_FLEXKV = Row("--enable-flexkv", REFUSED, "it finds KV by tokens alone")
OPTIONS: dict[str, Row] = {
    # One side of a pair of servers, or one part of one.
    "options.disaggregation_mode": Row(
        "--disaggregation-mode",
        REFUSED,
        "requests of which the other side holds KV cache are not retracted",
        off="null",
    ),
    "options.language_only": Row(
        "--language-only", REFUSED, "encoders are servers of their own, and commit by themselves"
    ),
    "parallel.attn_dp_enabled": Row(
        "--attn-dp-size and --enable-dp-attention",
        REFUSED,
        "no commit of data-parallel attention was shown right",
    ),
    # The model's weights, and copies of them.
    "options.speculative_algorithm": _DRAFTS,
    "scheduler.draft_worker": _DRAFTS,
    "scheduler.enable_lora": Row(
        "--enable-lora", REFUSED, "no commit beside adapters was shown right"
    ),
    "options.elastic_ep_backend": Row(
        "--elastic-ep-backend", REFUSED, "experts move between ranks while SGLang serves"
    ),
    "options.enable_eplb": Row(
        "--enable-eplb",
        REFUSED,
        "SGLang loads one copy of an expert in each rank, and may have moved two there",
    ),
    "options.init_expert_location": Row(
        "--init-expert-location", "loaded", "by SGLang's map of places", off="trivial"
    ),
    "options.ep_num_redundant_experts": Row(
        "--ep-num-redundant-experts", "loaded", "by SGLang's map of places"
    ),
    "options.dwdp_size": Row(
        "--dwdp-size",
        REFUSED,
        "a rank keeps copies of what other ranks have loaded, which no load renews",
        off=1,
    ),
    "options.kt_weight_path": Row(
        "--kt-weight-path", REFUSED, "the processor computes experts that are read from this folder"
    ),
    "options.enable_nvidia_megakernel": Row("--enable-nvidia-megakernel", *_PACKED),
    "options.enable_amd_monokernel": Row("--enable-amd-monokernel", *_PACKED),
    "options.cpu_offload_gb": Row(
        "--cpu-offload-gb", "loaded", "each step copies the parameters from there"
    ),
    "options.offload_group_size": Row(
        "--offload-group-size",
        REFUSED,
        "the first layers of the next step are on the device before a commit",
        off=-1,
    ),
    "options.ple_offload_backend": Row(
        "--ple-offload-backend file",
        REFUSED,
        "servers of one model share this file, and each commits by itself",
        off="pinned",
    ),
    "options.enable_weights_cpu_backup": Row(
        "--enable-weights-cpu-backup", "reset", "written anew each time that weights are released"
    ),
    "options.weight_cache_mode": Row(
        "--weight-cache-mode",
        REFUSED,
        "other servers compute with the same memory, and each commits by itself",
        off="off",
    ),
    "options.forward_hooks": Row(
        "--forward-hooks",
        REFUSED,
        "what such hooks keep, and whether they forget, is not known",
    ),
    # What is gathered for a request.
    "options.enable_return_hidden_states": Row("--enable-return-hidden-states", *_STATES),
    "options.return_hidden_states_mode": Row(
        "--return-hidden-states-mode full", *_STATES, off="last"
    ),
    "options.enable_return_aux_hidden_states": Row("--enable-return-aux-hidden-states", *_STATES),
    "options.enable_return_routed_experts": Row(
        "--enable-return-routed-experts", "recomputed", "with the KV of each token"
    ),
    "options.enable_return_indexer_topk": Row(
        "--enable-return-indexer-topk", "recomputed", "with the KV of each token"
    ),
    "options.enable_return_routed_experts and options.enable_hierarchical_cache": Row(
        "--enable-return-routed-experts, or without --enable-hierarchical-cache", *_LEVELS
    ),
    "options.enable_return_indexer_topk and options.enable_hierarchical_cache": Row(
        "--enable-return-indexer-topk, or without --enable-hierarchical-cache", *_LEVELS
    ),
    "options.enable_custom_logit_processor": Row(
        "--enable-custom-logit-processor", "not of weights", "called with the logits of each step"
    ),
    "scheduler.dllm_config": Row(
        "--dllm-algorithm", REFUSED, "a block is computed in many steps, and outlives a commit"
    ),
    # KV beside the prefix cache.
    "options.enable_hisparse": Row(
        "--enable-hisparse", REFUSED, "it keeps KV cache beside the prefix cache"
    ),
    "options.enable_lmcache": _LMCACHE,
    "options.enable_flexkv": _FLEXKV,
    "options.enable_pdmux": Row(
        "--enable-pdmux", REFUSED, "it keeps KV cache beside the prefix cache"
    ),
    "options.enable_unified_cache_external_linker": Row(
        "--enable-unified-cache-external-linker",
        REFUSED,
        "the prefix cache links blocks of another store",
    ),
    "options.enable_streaming_session": Row(
        "--enable-streaming-session",
        REFUSED,
        "a session keeps its KV cache beside the prefix cache",
    ),
    "options.enable_session_radix_cache": Row(
        "--enable-session-radix-cache", "named", "it chooses which blocks are evicted, and no more"
    ),
    "options.enable_hierarchical_cache": Row(
        "--enable-hierarchical-cache", "named", "in the memory of the host as on the device"
    ),
    # Models, and how they are split.
    "parallel.pp_size": Row(
        "--pp-size", REFUSED, "no commit of pipeline stages was shown right", off=1
    ),
    "scheduler.model_config.quantization": Row(
        "quantised weights", REFUSED, "SGLang's load of them was not shown right"
    ),
    # Not the scheduler's own: that is about how it allocates, and False for some with windows.
    "scheduler.tp_worker.is_hybrid_swa": Row(
        "a model with several groups of KV cache, one of them for sliding windows",
        REFUSED,
        "no commit of such a model was shown right",
    ),
    "scheduler.is_hybrid_ssm": Row(
        "a model with several groups of KV cache, one of them for state spaces",
        REFUSED,
        "no commit of such a model was shown right",
    ),
    "scheduler.model_config.is_multimodal": Row(
        "a multimodal model", REFUSED, "embeddings of media are not named by weights"
    ),
}
"""Fields of SGLang's, all of them set -> the place that they turn on."""

_CACHES = "sglang.srt.mem_cache"
CACHES: dict[str, Row] = {
    f"{_CACHES}.unified_radix_cache.UnifiedRadixCache": Row(
        "prefix cache", "named", "blocks are found by the key of their request, in every level"
    ),
    f"{_CACHES}.pure_swa_radix_cache.PureSWARadixCache": Row(
        "a model with sliding windows alone", REFUSED, "no commit of such a model was shown right"
    ),
    f"{_CACHES}.storage.flexkv.flexkv_radix_cache.FlexKVRadixCache": _FLEXKV,
    f"{_CACHES}.storage.lmcache.lmcache_unified_radix_cache.LMCacheUnifiedRadixCache": _LMCACHE,
}
"""Class of a prefix cache of SGLang -> the place."""
_BY_DIGEST = ("named", "SGLang names a page by a digest of its tokens and of its request's key")
STORAGES: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        (
            *("aibrix", "eic", "file", "hf3fs", "mooncake", "mori", "nixl", "npu_memcache"),
            *("seaweedfs", "shm", "simm", "tensorcast"),
        ),
        _BY_DIGEST,
    ),
    "sim": ("not of weights", "it gives back no KV that was computed"),
}
"""HiCache's storage in SGLang -> effect of a commit, and reason."""
OTHER_FILES: dict[str, tuple[str, Row]] = {
    "EmbeddingGemmaModel": (
        "projector",
        Row(
            "Dense layers of Sentence Transformers",
            REFUSED,
            "each load reads them from files that no update replaces",
        ),
    ),
    "XLMRobertaModel": (
        "_is_sparse",
        Row(
            "SGLANG_EMBEDDINGS_SPARSE_HEAD",
            REFUSED,
            "each load reads the head from a file that no update replaces",
        ),
    ),
}
"""Class of a model whose load may read other files than its weights -> attribute that says that it
does, and the place."""
OURS = "wtransfer_sglang.storage.TierStorage"
UNKNOWN = (REFUSED, "by which name it finds KV, and whether it forgets, is not known")


def rows_of(scheduler: Any, parallel: Any, options: Any) -> list[Row]:
    """Return the places of a server.

    Args:
        scheduler: SGLang's.
        parallel: SGLang's, of this process.
        options: SGLang's arguments, resolved.
    """
    server = SimpleNamespace(scheduler=scheduler, parallel=parallel, options=options)
    found = [row for paths, row in OPTIONS.items() if _is_set(server, paths, row.off)]
    return [*ALWAYS, *dict.fromkeys([*found, *_files(server), *_caches(server)])]


def refusal_of(scheduler: Any, parallel: Any, options: Any, derived: str | None) -> str | None:
    """Return why a server's model takes no update; None: no place speaks against it.

    Args:
        scheduler: SGLang's.
        parallel: SGLang's, of this process.
        options: SGLang's arguments, resolved.
        derived: Why SGLang itself would not update the model; None: it would.
    """
    rows = rows_of(scheduler, parallel, options)
    refused = [f"start it without {r.place}: {r.why}" for r in rows if r.at_commit == REFUSED]
    return "; ".join([*refused, *([derived] if derived else [])]) or None


def _is_set(server: Any, paths: str, off: Any) -> bool:
    values = (functools.reduce(getattr, path.split("."), server) for path in paths.split(" and "))
    return all(value and value != off for value in values)


def _files(server: Any) -> Iterator[Row]:
    """Return the row of a model whose load reads other files than its weights."""
    model = server.scheduler.tp_worker.model_runner.model
    attribute, row = OTHER_FILES.get(type(model).__qualname__, ("", None))
    if row is not None and getattr(model, attribute, None):
        yield row


def _caches(server: Any) -> Iterator[Row]:
    """Return the rows of the prefix cache, and of the storage below it."""
    cache, options = server.scheduler.tree_cache, server.options
    place = f"{type(cache).__qualname__} as prefix cache"
    if options.radix_cache_backend:
        place = f"--radix-cache-backend {options.radix_cache_backend}"
    yield CACHES.get(_name(cache), Row(place, *UNKNOWN))
    if storage := options.hicache_storage_backend:
        row = STORAGES.get(storage, UNKNOWN)
        if storage == "dynamic" and _name(cache.cache_controller.storage_backend) == OURS:
            row = ("named", "as every KV of a tier")
        yield Row(f"--hicache-storage-backend {storage}", *row)


def _name(thing: object) -> str:
    return f"{type(thing).__module__}.{type(thing).__qualname__}"
