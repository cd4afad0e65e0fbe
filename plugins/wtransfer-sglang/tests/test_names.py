"""Name of KV cache: equal where the same tokens give the same KV cache."""

from types import SimpleNamespace as Bag

import pytest
import torch

from wtransfer_sglang.bridge import Bridge
from wtransfer_sglang.names import computing_with


class Configuration:
    """Stands in for a model's configuration of transformers."""

    def __init__(self, folder, **more):
        self._entries = {"_name_or_path": folder, "transformers_version": "5", "heads": 4, **more}

    def to_dict(self):
        return self._entries


def parts(folder="/models/A"):
    """Return the parts of a server that compute, as SGLang has them."""
    config = Bag(dtype=torch.bfloat16, quantization=None, context_len=1024)
    config.hf_config = Configuration(folder, rope={"theta": 1e4, "_name_or_path": folder})
    server_args = Bag(quantization_param_path=None)
    runner = Bag(model_config=config, kv_cache_dtype=torch.bfloat16, server_args=server_args)
    return Bag(runner=runner, parallel=Bag(tp_size=1, pp_size=1, attn_cp_size=1))


def test_equal_servers_have_one_name_wherever_their_files_are():
    assert computing_with(**vars(parts())) == computing_with(**vars(parts("/models/B")))


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ("runner.model_config.dtype", torch.float16),
        ("runner.model_config.quantization", "fp8"),
        ("runner.model_config.context_len", 2048),
        ("runner.model_config.hf_config", Configuration("/models/A", rope={"theta": 1e6})),
        ("runner.kv_cache_dtype", torch.float16),
        ("runner.server_args.quantization_param_path", "scales.json"),
        ("parallel.tp_size", 2),
        ("parallel.pp_size", 2),
        ("parallel.attn_cp_size", 2),
    ],
)
def test_what_computes_enters_the_name(where, value):
    given = parts()
    *path, name = where.split(".")
    owner = given
    for each in path:
        owner = getattr(owner, each)
    setattr(owner, name, value)
    assert computing_with(**vars(given)) != computing_with(**vars(parts()))


@pytest.mark.parametrize(
    ("session", "has_storage", "expected"),
    [
        (None, False, "tenant"),
        (None, True, "wt=w c|tenant"),
        (object(), False, "wt=w c|tenant"),
    ],
)
def test_key_of_a_request_is_left_alone_where_kv_cache_needs_no_name(
    session, has_storage, expected
):
    scheduler = Bag(enable_hicache_storage=has_storage)
    bridge = Bag(session=session, _scheduler=scheduler, fingerprint="w", _computing="c")
    request = Bag(extra_key="tenant")
    Bridge.name(bridge, request)
    assert request.extra_key == expected
