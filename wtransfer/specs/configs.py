"""From a host's configs of one era to those of the other: what a spec's constructor is given.

In the seed a spec got the serving engine's whole config and that of its KV cache; today it gets an
`OffloadingConfig`, in which both are boiled down. Either may be our own dataclasses or the serving
engine's objects: attributes are read, classes are not asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wtransfer.config import (
    KVCacheConfig,
    KVTransferConfig,
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
    ParallelConfig,
    ServingConfig,
    blocks_per_chunk,
    tokens_per_block,
)
from wtransfer.errors import KVTransferConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


def is_serving_config(config: Any) -> bool:
    """Whether this is a serving engine's whole config, as in the seed.

    Raises:
        KVTransferConfigError: It is one without ``kv_transfer_config``, or nothing of either kind;
            an `AssertionError`, too.
    """
    if getattr(config, "kv_transfer_config", None) is not None:
        return True
    if hasattr(config, "extra_config"):
        return False
    raise KVTransferConfigError(
        f"A {type(config).__name__} without kv_transfer_config: no offloading spec can be made of "
        "it. Give a ServingConfig(kv_transfer_config=KVTransferConfig(...)), or an "
        "OffloadingConfig, which has extra_config."
    )


def extra_config_of(config: Any) -> Mapping[str, Any]:
    """Return the options that stand in a config of either kind."""
    holder = config.kv_transfer_config if is_serving_config(config) else config
    name = "kv_connector_extra_config" if holder is not config else "extra_config"
    extra: Mapping[str, Any] = getattr(holder, name) or {}
    return extra


def to_offloading_config(config: Any, kv_cache_config: Any = None) -> OffloadingConfig:
    """Boil a serving engine's configs down.

    Args:
        config: Has ``kv_transfer_config``; more is read where it is there.
        kv_cache_config: Our `KVCacheConfig`, or vLLM's; None where the host has none.

    Raises:
        OffloadingOptionError: The option ``block_size`` is no multiple of the cache's.
    """
    extra = extra_config_of(config)
    groups = _groups(config, kv_cache_config)
    parallel = getattr(config, "parallel_config", None) or ParallelConfig()
    model = getattr(config, "model_config", None)
    events = getattr(config, "kv_events_config", None)
    return OffloadingConfig(
        extra_config=extra,
        engine_id=config.kv_transfer_config.engine_id or "",
        worker_kv_bytes_per_block=_bytes_per_block(kv_cache_config),
        groups=groups,
        model=OffloadingModelConfig(
            name=getattr(model, "model", ""),
            dtype=str(getattr(model, "dtype", None) or "bfloat16").removeprefix("torch."),
        ),
        cache=OffloadingCacheConfig(
            tokens_per_hash=groups[0].tokens_per_block,
            blocks_per_chunk=blocks_per_chunk(extra, groups[0].tokens_per_block),
        ),
        parallel=OffloadingParallelConfig(
            rank=parallel.rank,
            world_size=parallel.world_size,
            tp_size=parallel.tensor_parallel_size,
            pp_size=parallel.pipeline_parallel_size,
            data_parallel_index=parallel.data_parallel_index,
            data_parallel_size=parallel.data_parallel_size,
        ),
        enable_kv_cache_events=bool(getattr(events, "enable_kv_cache_events", False)),
    )


def to_serving_config(config: Any) -> tuple[ServingConfig, KVCacheConfig]:
    """Return what a spec of the seed's era is made with, from an `OffloadingConfig`.

    The number of blocks of the model's own cache is not known today, and is 0.
    """
    block_size = config.groups[0].tokens_per_block if config.groups else tokens_per_block(None)
    extra = {"block_size": block_size * config.cache.blocks_per_chunk, **config.extra_config}
    parallel = config.parallel
    kv_cache_config = KVCacheConfig(
        block_size=block_size, bytes_per_block=config.worker_kv_bytes_per_block
    )
    serving_config = ServingConfig(
        parallel_config=ParallelConfig(
            rank=parallel.rank,
            world_size=parallel.world_size,
            tensor_parallel_size=parallel.tp_size,
            pipeline_parallel_size=parallel.pp_size,
            data_parallel_size=parallel.data_parallel_size,
            data_parallel_index=parallel.data_parallel_index,
        ),
        kv_transfer_config=KVTransferConfig(
            kv_connector="OffloadingConnector",
            engine_id=config.engine_id,
            kv_role="kv_both",
            kv_connector_extra_config=extra,
        ),
        cache_config=kv_cache_config,
    )
    return serving_config, kv_cache_config


def _groups(config: Any, kv_cache_config: Any) -> tuple[OffloadingGroupConfig, ...]:
    groups = getattr(kv_cache_config, "kv_cache_groups", None)
    if groups:
        return tuple(
            OffloadingGroupConfig(group.kv_cache_spec.block_size, tuple(group.layer_names), number)
            for number, group in enumerate(groups)
        )
    return (OffloadingGroupConfig(tokens_per_block(config, kv_cache_config)),)


def _bytes_per_block(kv_cache_config: Any) -> int:
    tensors = getattr(kv_cache_config, "kv_cache_tensors", None)
    if tensors and kv_cache_config.num_blocks:
        return int(sum(tensor.size for tensor in tensors) // kv_cache_config.num_blocks)
    return int(getattr(kv_cache_config, "bytes_per_block", 0))
