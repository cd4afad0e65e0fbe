"""What a connector reads of a serving engine's configuration."""

from __future__ import annotations

from dataclasses import fields, replace
from types import SimpleNamespace

import msgspec
import pytest

from wtransfer import ServingConfig
from wtransfer.config import KVCacheConfig, KVTransferConfig, ModelConfig, ParallelConfig
from wtransfer.connectors.serving_config import Instance, read_options
from wtransfer.errors import ConnectorOptionError

CONFIG = ServingConfig(
    parallel_config=ParallelConfig(rank=1, world_size=2),
    kv_transfer_config=KVTransferConfig("c", "e-1", "kv_both"),
    cache_config=KVCacheConfig(block_size=16),
    model_config=ModelConfig("a model", "bfloat16"),
)


def test_configuration_is_read():
    instance = Instance.of(CONFIG)
    assert instance == Instance("e-1", "a model", "bfloat16", 16, 1, 2, sends=True, receives=True)


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        ("kv_both", (True, True)),
        ("kv_producer", (True, False)),
        ("kv_consumer", (False, True)),
        (None, (True, True)),
    ],
)
def test_role_decides_what_is_sent_and_received(role, expected):
    transfer = KVTransferConfig("c", kv_role=role)
    instance = Instance.of(replace(CONFIG, kv_transfer_config=transfer))
    assert (instance.sends, instance.receives, instance.engine_id) == (*expected, "")


def test_unknown_role_is_refused():
    transfer = KVTransferConfig("c", kv_role="producer")
    with pytest.raises(ConnectorOptionError, match=r"kv_role='producer': expected one of \['kv_b"):
        Instance.of(replace(CONFIG, kv_transfer_config=transfer))


@pytest.mark.parametrize("cache", [None, KVCacheConfig(block_size=0)])
def test_missing_block_size_is_refused(cache):
    with pytest.raises(ConnectorOptionError, match=r"cache_config\.block_size is not set"):
        Instance.of(replace(CONFIG, cache_config=cache))


def test_root_depends_on_model_dtype_and_number_of_ranks_only():
    root = Instance.of(CONFIG).root
    others = [
        replace(CONFIG, model_config=ModelConfig("b", "bfloat16")),
        replace(CONFIG, model_config=ModelConfig("a model", "float16")),
        replace(CONFIG, parallel_config=ParallelConfig(rank=1, world_size=3)),
    ]
    assert root not in {Instance.of(each).root for each in others}
    same = replace(
        CONFIG,
        parallel_config=ParallelConfig(rank=0, world_size=2),
        kv_transfer_config=KVTransferConfig("c", "e-2", "kv_both"),
    )
    assert Instance.of(same).root == root


@pytest.mark.parametrize("same", ["auto", None])
def test_root_depends_on_cache_dtype(same):
    def root(cache_dtype):
        cache = SimpleNamespace(block_size=16, cache_dtype=cache_dtype)
        return Instance.of(replace(CONFIG, cache_config=cache)).root

    assert len({root("auto"), root("fp8_e4m3"), root("fp8_e5m2")}) == 3
    assert root(same) == Instance.of(CONFIG).root, "a missing field is the default"


class HfConfig:
    def __init__(self, **values):
        self._values = values

    def to_dict(self):
        return self._values


@pytest.mark.parametrize("what", ["model", "parallel"])
def test_root_depends_on_optional_fields_that_kv_depends_on(what):
    def root(**said):
        config = {"model": CONFIG.model_config, "parallel": CONFIG.parallel_config}
        own = config[what]
        more = SimpleNamespace(**{f.name: getattr(own, f.name) for f in fields(own)} | said)
        config[what] = more
        made = replace(CONFIG, model_config=config["model"], parallel_config=config["parallel"])
        return Instance.of(made).root

    hf_config = HfConfig(rope={"theta": 1e4, "factor": 8}, dtype=object())
    said = {
        "model": [
            {"quantization": "fp8"},
            {"quantization": "awq"},
            {"max_model_len": 4096},
            {"max_model_len": 8192},
            {"hf_config": hf_config},
            {"hf_config": HfConfig(rope={"theta": 1e4, "factor": 4})},
        ],
        "parallel": [
            {"tensor_parallel_size": 2},
            {"pipeline_parallel_size": 2},
            {"prefill_context_parallel_size": 2},
            {"decode_context_parallel_size": 2},
            {"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 16},
        ],
    }[what]
    roots = [root(**each) for each in said]
    assert len({*roots, root()}) == len(said) + 1
    assert roots == [root(**each) for each in said]
    assert root() == Instance.of(CONFIG).root, "a missing field is the default"


def test_missing_hugging_face_configuration_is_no_difference():
    model = SimpleNamespace(model="a model", dtype="bfloat16", quantization=None, hf_config=None)
    assert Instance.of(replace(CONFIG, model_config=model)) == Instance.of(CONFIG)


class Options(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    number: int = 3


def test_options_are_read():
    assert read_options(Options, {"path": "p"}) == Options("p", 3)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "missing required field `path`"),
        ({"path": 1}, r"Expected `str`, got `int` - at `\$\.path`"),
        (
            {"path": "p", "nubmer": 1},
            r"unknown field `nubmer`; the options are path \(str\), number \(int\)",
        ),
        ({"path": "p", "number": True}, "Expected `int`, got `bool`"),
    ],
)
def test_malformed_option_is_refused_and_options_are_listed(given, text):
    with pytest.raises(ConnectorOptionError, match=text):
        read_options(Options, given)
