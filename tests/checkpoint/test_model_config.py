"""The configuration of a model: as text, and by entry."""

import dataclasses
import json
import math

import pytest
import torch

from wtransfer.checkpoint.model_config import (
    canonical_config,
    differences,
    parse_config,
    read_config,
)
from wtransfer.errors import SourceError
from wtransfer.transport.files import Folder

NOT_COMPARED = {
    "_name_or_path": "/a",
    "_attn_implementation": "sdpa",
    "transformers_version": "5.0",
    "architectures": ["A"],
    "auto_map": {"AutoConfig": "code.Config"},
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "attn_implementation": "eager",
    "use_cache": False,
    "output_hidden_states": True,
    "output_router_logits": True,
    "return_dict": False,
    "attention_dropout": 0.1,
    "hidden_dropout_prob": 0.1,
    "resid_pdrop": 0.1,
    "initializer_range": 0.5,
    "id2label": {"0": "A"},
    "label2id": {"A": 0},
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 4,
    "router_aux_loss_coef": 0.1,
    "gradient_checkpointing": True,
    "quantization_config": {"quant_method": "fp8"},
    "tie_word_embeddings": True,
    "max_length": 20,
}
COMPARED = (
    *("rms_norm_eps", "layer_norm_epsilon", "sliding_window", "hidden_act", "num_experts_per_tok"),
    *("norm_topk_prob", "routed_scaling_factor", "attention_bias", "max_position_embeddings"),
    *("image_token_id", "query_pre_attn_scalar", "final_logit_softcapping", "layer_types"),
    *("num_hidden_layers", "partial_rotary_factor", "scale_factor", "router_jitter_noise"),
    # Names that are like those of training, or of what a model tells.
    *("output_multiplier", "output_gate_type", "output_stride", "sparse_init_block", "init_blocks"),
    *("index_init_tokens", "token_dropout", "moe_token_dropout", "_rope_scaling", "problem_type"),
    *("moe_topk", "top_k_experts"),
)


@pytest.mark.parametrize("name", NOT_COMPARED)
def test_entry_that_decides_nothing_is_not_compared_at_any_depth(name):
    set_, other = ({"text_config": {name: value}} for value in (NOT_COMPARED[name], "other"))
    for found in (set_["text_config"], set_, {"parts": [set_]}):
        assert name not in canonical_config(found)
    assert differences(set_, other) == differences(set_, {}) == []


@pytest.mark.parametrize("name", COMPARED)
def test_entry_that_decides_what_is_computed_is_compared_by_its_path(name):
    assert differences({"text_config": {name: 1}}, {"text_config": {name: 2}}) == [
        f"text_config.{name} is 1 here and 2 in the update"
    ]
    assert differences({}, {name: "x"}) == [f"{name} is not set here and 'x' in the update"]


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("roberta", "pad_token_id"),
        ("bert", "cls_token_id"),
        ("hrm_text", "initializer_range"),
        ("longcat_flash_ngram", "eos_token_id"),
    ],
)
def test_entry_with_which_some_models_compute_is_compared_for_those(model_type, name):
    for kind, lines in (
        (model_type, [f"text_config.{name} is 1 here and 2 in the update"]),
        ("llama", []),
    ):
        own, received = ({"text_config": {"model_type": kind, name: value}} for value in (1, 2))
        assert differences(own, received) == lines


def test_entries_that_older_releases_wrote_into_every_part_are_false():
    older = {"add_cross_attention": False, "is_decoder": False, "is_encoder_decoder": False}
    assert differences({"text_config": older}, {"text_config": {}}) == []
    assert differences({}, {"is_decoder": True}) == [
        "is_decoder is not set here and True in the update"
    ]
    assert differences({"attention_bias": False}, {}) != []


class Number:
    """A number of another library."""

    def __init__(self, value):
        self.value = value

    def item(self):
        return self.value


def test_numbers_of_other_libraries_are_numbers():
    assert canonical_config({"a": Number(2), "b": Number(object())}) == '{"a":2,"b":null}'
    assert canonical_config({"a": torch.tensor(0.5), "b": torch.ones(2)}) == '{"a":0.5,"b":null}'


def test_text_is_the_same_for_equal_configurations():
    made = {"b": (1, 2), "a": {2: "x", "c": None}, "use_cache": True}
    text = '{"a":{"2":"x","c":null},"b":[1,2]}'
    assert canonical_config(made) == canonical_config(dict(reversed(made.items()))) == text


def test_what_json_does_not_have_is_null_and_infinity_stays():
    @dataclasses.dataclass
    class Kernel:
        size: int = 1

    text = canonical_config({"kernel": Kernel(), "limit": [0.0, math.inf], "nan": math.nan})
    found = parse_config(text)
    assert found["kernel"] is None
    assert found["limit"] == [0.0, math.inf]
    assert differences(found, found) == []
    # As transformers writes it.
    assert parse_config('{"limit": [0.0, {"__float__": "Infinity"}]}')["limit"] == found["limit"]


def test_configuration_that_contains_itself_is_an_error():
    made = {}
    made["self"] = made
    with pytest.raises(ValueError, match="recursion"):
        canonical_config(made)


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"rope_theta": 1e4}, {"rope_type": "default", "rope_theta": 1e4}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "yarn", "factor": 4.0}},
            {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4},
        ),
        (
            {"rope_theta": 1e4, "rope_scaling": {"rope_type": "llama3"}},
            {"rope_type": "llama3", "rope_theta": 1e4},
        ),
    ],
)
def test_positions_are_one_entry_however_a_release_writes_them(older, newer):
    newer = {"rope_parameters": newer}
    assert differences(older, newer) == differences({"part": newer}, {"part": older}) == []
    # An entry that is there as well is a class's default.
    assert differences(newer, newer | {"rope_theta": 7.0}) == []
    assert differences(older | {"rope_theta": 5e5}, newer) == [
        "rope_parameters.rope_theta is 500000.0 here and 10000.0 in the update"
    ]


@pytest.mark.parametrize(
    ("own", "received"),
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, {}),
        ({"rope_scaling": [4]}, {"rope_scaling": [8]}),
        ({"rope_theta": 1e4, "rope_scaling": [4]}, {"rope_theta": 1e4}),
        ({"parts": [{"rope_theta": 1e4}]}, {"parts": [{"rope_theta": 5e5}]}),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e4},
            {"rope_parameters": {"rope_type": "default"}, "rope_theta": 5e5},
        ),
    ],
)
def test_positions_in_a_form_of_their_own_are_compared_as_they_are(own, received):
    assert differences(own, received) != []
    assert differences(own, own) == differences(received, received) == []


def test_numbers_are_compared_and_not_how_they_are_written():
    assert differences({"a": 10000}, {"a": 10000.0}) == []


def test_file_is_read_or_refused(tmp_path):
    with Folder(tmp_path) as folder:
        assert read_config(folder) is None
        (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
        assert read_config(folder) == {"a": 1}
        for text in ("{", "[]", "[" * 100_000, "\xff"):
            (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
            with pytest.raises(SourceError, match=r"config\.json' cannot be read"):
                read_config(folder)
