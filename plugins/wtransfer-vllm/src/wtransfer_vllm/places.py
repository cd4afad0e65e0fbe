"""Places where vLLM keeps results of weights beside the model, and the effect of a commit on each.

The registered modules are proven (`wtransfer_vllm.proof`), and the paged KV cache is forgotten
(`wtransfer_vllm.caches`). The tables below have the other places. Each row says what a commit does:

==============  ==================================================================================
named           the weights are part of every name, so that other weights find nothing
reset           emptied at the commit; not read until it says that it is empty
recomputed      dropped, and computed again by the new weights
not of weights  depends on inputs alone
verified        proposes tokens, which the model accepts or rejects
by request      handed from instance to instance with one request; not read after a commit
refused         the invitation of a publisher is refused
==============  ==================================================================================

A place that a configuration uses and that has no row refuses as well: its contents would outlive a
commit, and be served under the name of the new weights.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from wtransfer_vllm.names import is_ours

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

REFUSED = "refused"


class Row(NamedTuple):
    """A place."""

    place: str
    """Name; where an option turns the place on, the option of vLLM's command line."""
    at_commit: str
    """Effect of a commit, a word of the table above."""
    why: str
    """Reason."""


ALWAYS = (
    Row("prefix cache", "reset", "no block is found by its hash any more"),
    Row("KV of running requests", "recomputed", "they are preempted; `keep` marks it instead"),
    Row("encoder cache of the engine", "reset", "with the prefix cache"),
    Row(
        "log probabilities of a prompt",
        "recomputed",
        "with the KV of the request; where the prompt's last step is in flight, vLLM loses them",
    ),
    Row("rows that a pooling request has gathered", "recomputed", "dropped as it is preempted"),
    Row("log probabilities and spans of tokens", "named", "each token by the weights of its step"),
    Row("inputs of the multi-modal processor", "not of weights", "found by a hash of the input"),
)
"""Places of every engine."""

OPTIONS: dict[str, Row] = {
    "ec_transfer_config": Row(
        "--ec-transfer-config",
        REFUSED,
        "encoder outputs outside of the engine are found by a hash of the input, so new weights "
        "would be given those of old ones",
    ),
    "ec_manager_config.encoder_cache_manager_cls": Row(
        "--ec-manager-config", REFUSED, "whether such a manager forgets is not known"
    ),
    "scheduler_config.scheduler_cls": Row(
        "--scheduler-cls", REFUSED, "what a scheduler of this class keeps of a request is not known"
    ),
    "parallel_config.enable_eplb": Row(
        "--enable-eplb",
        REFUSED,
        "vLLM loads experts by their first places, and has moved them to others since",
    ),
    "parallel_config.enable_elastic_ep": Row(
        "--enable-elastic-ep", REFUSED, "experts move between ranks while vLLM serves"
    ),
    "aux_output_config.enable_return_routed_experts": Row(
        "--enable-return-routed-experts",
        REFUSED,
        "the experts of a token are kept under its block's hash, and vLLM cannot forget them while "
        "batches are in flight",
    ),
    "offload_config.prefetch.offload_group_size": Row(
        "--offload-group-size",
        REFUSED,
        "a reload writes into the device's slot of a layer, and the next step copies the old "
        "weights over it",
    ),
    "offload_config.uva.cpu_offload_gb": Row(
        "--cpu-offload-gb", "recomputed", "the parameters are views of this memory, and proven"
    ),
    "engram_config.dp_shared_memory": Row(
        "--engram-config '{\"dp_shared_memory\": true}'",
        REFUSED,
        "replicas share these tables, and each commits by itself",
    ),
    "diffusion_config": Row(
        "--diffusion-config", REFUSED, "a canvas is computed in many steps, and outlives a commit"
    ),
    "cache_config.use_kda_recoverssm": Row(
        "--speculative-config of a model with KDA layers",
        REFUSED,
        "what accepts a draft has copies of these layers' weights, made once",
    ),
    "model_config.multimodal_config.mm_encoder_attn_dtype": Row(
        "--mm-encoder-attn-dtype", REFUSED, "its scales follow what the old tower computed"
    ),
    "model_config.multimodal_config.video_pruning_rate": Row(
        "--video-pruning-rate",
        REFUSED,
        "the positions of a video's tokens are those that the old tower has left of it, also for a "
        "request that is computed anew",
    ),
    "lora_config": Row(
        "--enable-lora",
        "not of weights",
        "vLLM drops adapters, and loads each from its folder again for its next request",
    ),
    "speculative_config": Row(
        "--speculative-config", "verified", "a draft keeps its weights and proposes less well"
    ),
}
"""Field of vLLM's configuration -> the place that it turns on, if it is set."""
LATE_INTERACTION = Row(
    "flash late interaction (--no-enable-flash-late-interaction)",
    REFUSED,
    "a query's embeddings wait in the worker for its documents, which new weights would embed",
)
"""Scores of a model that embeds tokens, computed in the worker."""
FREEZING = Row(
    "max_autotune in --compilation-config",
    REFUSED,
    "on a CPU weights become constants of the compiled code",
)

_SHARED = (
    "other engines read its store, whose names say nothing of the weights, as those of "
    "wtransfer-OffloadingConnector and SharedStorageConnector do"
)
_HANDED = ("by request", "the KV goes with one request")
_OUTSIDE = (REFUSED, _SHARED)
CONNECTORS: dict[str, tuple[str, str]] = {
    "DecodeBenchConnector": ("not of weights", "it fills the cache with numbers of its own"),
    "ExampleConnector": _OUTSIDE,
    "ExampleHiddenStatesConnector": (
        REFUSED,
        "a request that runs at a commit would be written with states of two sets of weights",
    ),
    "FlexKVConnectorV1": _OUTSIDE,
    "HF3FSKVConnector": _OUTSIDE,
    "HiSparseConnector": (REFUSED, "whether its second pool of blocks forgets is not known"),
    "LMCacheConnectorV1": _OUTSIDE,
    "LMCacheMPConnector": _OUTSIDE,
    "MoRIIOConnector": _HANDED,
    "MooncakeConnector": _HANDED,
    "MooncakeStoreConnector": (
        REFUSED,
        f"its reset wipes the blocks of every engine and model, and {_SHARED}",
    ),
    "NixlConnector": _HANDED,
    "NixlPullConnector": _HANDED,
    "NixlPushConnector": _HANDED,
    "SimpleCPUOffloadConnector": ("reset", "its blocks are in this engine's memory"),
}
"""KV connector of vLLM -> effect of a commit, and reason."""
SPECS: dict[str, tuple[str, str]] = {
    "CPUOffloadingSpec": ("reset", "its blocks are in this engine's memory"),
    "TieringOffloadingSpec": ("reset", "its first tier is in this engine's memory"),
}
"""Spec under vLLM's OffloadingConnector -> effect of a commit, and reason; without lower tiers."""
LOWER_TIERS = ("named", "the weights are part of every block's hash")
"""Effect of a commit on such a spec with lower tiers, and reason."""
NAMED_TIERS = ("fs", "obj")
"""Kinds of vLLM's lower tiers that keep blocks by their hash, and know nothing else of them."""
OTHER_TIERS = (REFUSED, "by which name a lower tier of this kind keeps blocks is not known")
UNKNOWN = (REFUSED, "what it keeps, and whether it forgets, is not known")


def rows_of(vllm_config: Any) -> list[Row]:
    """Return the places of a configuration.

    Args:
        vllm_config: vLLM's own. Fields that a release does not have turn nothing on.
    """
    found = [row for path, row in OPTIONS.items() if _is_set(vllm_config, path)]
    found += [LATE_INTERACTION] * _scores_tokens(vllm_config)
    found += [FREEZING] * _freezes(vllm_config)
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is not None:
        found += _connectors(vars(transfer))
    return [*ALWAYS, *found]


def check_places(vllm_config: Any) -> None:
    """Raise if a place of a configuration would keep what other weights computed.

    Raises:
        ValueError: The text names each place, why, and the option to leave out.
    """
    refused = [row for row in rows_of(vllm_config) if row.at_commit == REFUSED]
    if refused:
        each = "; ".join(f"start it without {row.place}: {row.why}" for row in refused)
        raise ValueError(f"this vLLM takes no update. To update it, {each}")


def _is_set(vllm_config: Any, path: str) -> bool:
    value = _value(vllm_config, path)
    # vLLM enters its own scheduler by name.
    is_vllms = path.endswith("_cls") and isinstance(value, str) and value.startswith("vllm.")
    return bool(value) and not is_vllms


def _value(vllm_config: Any, path: str) -> Any:
    """Return a field of a configuration; None if a release, or a section, does not have it."""
    return functools.reduce(
        lambda found, name: getattr(found, name, None), path.split("."), vllm_config
    )


def _scores_tokens(vllm_config: Any) -> bool:
    if not _value(vllm_config, "model_config.pooler_config.enable_flash_late_interaction"):
        return False
    asked = _value(vllm_config, "model_config.pooler_config.task")
    kind = _value(vllm_config, "model_config.score_type")
    return asked == "token_embed" or (asked is None and kind == "late-interaction")


def _freezes(vllm_config: Any) -> bool:
    options = _value(vllm_config, "compilation_config.inductor_compile_config") or {}
    is_cpu = _value(vllm_config, "device_config.device_type") == "cpu"
    return is_cpu and bool(options.get("max_autotune"))


def _connectors(transfer: Mapping[str, Any]) -> Iterator[Row]:
    """Return the rows of a KV connector, or of those under vLLM's MultiConnector."""
    name, options = transfer.get("kv_connector"), transfer.get("kv_connector_extra_config") or {}
    if name is None:
        return
    is_foreign = bool(transfer.get("kv_connector_module_path"))
    if name == "MultiConnector" and not is_foreign and not is_ours("connectors", name):
        for each in options.get("connectors", ()):
            yield from _connectors(each)
        return
    place = f"{name} in --kv-transfer-config"
    if is_foreign:
        yield Row(place, *UNKNOWN)
    elif is_ours("connectors", name):
        yield Row(place, "named", "KV is named by its weights")
    elif name == "OffloadingConnector":
        spec = options.get("spec_name", "CPUOffloadingSpec")
        row = SPECS.get(spec, UNKNOWN)
        if (tiers := options.get("secondary_tiers")) and row is not UNKNOWN:
            is_named = all(tier.get("type") in NAMED_TIERS for tier in tiers)
            row = LOWER_TIERS if is_named else OTHER_TIERS
        yield Row(place, *row)
    else:
        yield Row(place, *CONNECTORS.get(name, UNKNOWN))
