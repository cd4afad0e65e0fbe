"""Name of KV cache: the weights that computed it, and what has computed with them."""

from __future__ import annotations

from typing import Any

import xxhash

UNRELATED = frozenset({"_name_or_path", "transformers_version"})
"""Entries of a model's configuration that say where it was read from, and by what."""


def computing_with(runner: Any, parallel: Any) -> str:
    """Return a digest of what makes KV cache of tokens, beside the weights.

    Two servers that have it in common, and the fingerprint of their weights, compute the same KV
    cache, as wtransfer-vllm takes it: kernels may round differently.

    Args:
        runner: SGLang's model runner, complete.
        parallel: SGLang's, of this process.
    """
    config = runner.model_config
    parts = [
        config.dtype,
        config.quantization,
        runner.kv_cache_dtype,
        runner.server_args.quantization_param_path,
        config.context_len,
        parallel.tp_size,
        parallel.pp_size,
        parallel.attn_cp_size,
        _plain(config.hf_config.to_dict()),
    ]
    # Not as JSON: a model's own code may add objects, and `repr` takes them. A text with an address
    # in it makes a digest that only this process has, which is a miss elsewhere.
    return xxhash.xxh3_128_hexdigest(repr(parts).encode())


def _plain(value: Any) -> Any:
    """Return a configuration without what is unrelated, also within it."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items() if key not in UNRELATED}
    return value
