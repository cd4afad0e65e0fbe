"""Configurations of trainers and of checkpoints, as vLLM's classes read them; no engine starts."""

import json
import types
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

pytest.importorskip("vllm", reason="vLLM is not installed: tests/make_env.py ENV")

import architectures
import tiny_models
import transformers
from transformers import AutoConfig
from wtransfer import CheckpointSource
from wtransfer.checkpoint.model_config import canonical_config
from wtransfer.errors import SchemaError
from wtransfer.weight_sync.trainer.digesting import DigestingSource
from wtransfer.weight_sync.trainer.publisher import BaseCheckpoint
from wtransfer.weight_sync.trainer.source import as_source

from wtransfer_vllm.target import VllmTarget

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of what vLLM imports
    from vllm.transformers_utils.config import get_config

FAMILIES = {
    "dense": tiny_models.config(2, 128, tied=False),
    "tied": tiny_models.config(2, 128, tied=True),
    "experts": tiny_models.EXPERTS,
    **tiny_models.HYBRID,
    **{
        name: architectures.SIZES | {"model_type": kind, "architectures": [architecture]} | more
        for name, (kind, architecture, more) in architectures.CASES.items()
    },
}


def write(folder, config):
    """Write a checkpoint of a configuration, whose tensors are those of no model."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"w": torch.ones(2, 2)}, folder / "model.safetensors")
    return folder


def serve(folder, **overrides):
    """Return the target of a server of a checkpoint."""
    read = get_config(folder, trust_remote_code=False, hf_overrides_kw=overrides or None)
    bag = types.SimpleNamespace
    model_config = bag(model=str(folder), hf_config=read, dtype=torch.float32)
    return VllmTarget(
        nn.Linear(2, 2), bag(model_config=model_config, load_config=bag(load_format="auto"))
    )


def train(folder):
    """Return a model of transformers that a trainer has loaded from a checkpoint."""
    config = AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        # Training is in floats.
        del config.quantization_config
    of_kind = getattr(transformers, config.architectures[0])
    with torch.device("meta"):
        return of_kind._from_config(config, dtype=torch.bfloat16)


def sent_by(model):
    return canonical_config(as_source(model).config)


def check_same(folder, tmp_path):
    """Check a checkpoint against a model that was loaded from it, trained, and saved."""
    target, model = serve(folder), train(folder)
    assert target.check_config(sent_by(model)) == []
    # As trainers do.
    model.config.use_cache = False
    model.config.pad_token_id = 3
    model.config.output_router_logits = True
    model.gradient_checkpointing_enable()
    assert target.check_config(sent_by(model)) == []
    model.config.save_pretrained(tmp_path / "saved")
    save_file({"w": torch.ones(2, 2)}, tmp_path / "saved" / "model.safetensors")
    for each in (folder, tmp_path / "saved"):
        source = CheckpointSource(each)
        assert target.check_config(canonical_config(source.config)) == []
        assert serve(tmp_path / "saved").check_config(canonical_config(source.config)) == []
    return target, model


@pytest.mark.parametrize("name", FAMILIES)
def test_model_that_was_loaded_from_the_folder_has_its_configuration(tmp_path, name):
    _, model = check_same(write(tmp_path / "model", FAMILIES[name]), tmp_path)
    assert len(sent_by(model)) < 4000


@pytest.mark.parametrize("name", architectures.CASES)
def test_folder_that_transformers_has_written_has_it_too(tmp_path, name):
    folder = architectures.write_model(tmp_path / "model", *architectures.CASES[name])
    check_same(write(folder, json.loads((folder / "config.json").read_text())), tmp_path)


CHANGES = {
    "rms_norm_eps": (1e-6, "rms_norm_eps is 1e-05 here and 1e-06 in the update"),
    "rope_theta": (5e5, "rope_parameters.rope_theta is 10000.0 here and 500000.0 in the update"),
    "hidden_act": ("gelu", "hidden_act is 'silu' here and 'gelu' in the update"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_trainer_of_another_configuration_is_refused_by_name(tmp_path, monkeypatch, name):
    value, line = CHANGES[name]
    config = FAMILIES["dense"]
    target = serve(write(tmp_path / "model", config))
    text = sent_by(train(write(tmp_path / "other", config | {name: value})))
    with pytest.raises(SchemaError) as refused:
        target.check_config(text)
    assert refused.value.mismatches == [line]
    monkeypatch.setenv("WTRANSFER_CONFIG_MAY_DIFFER", "1")
    assert target.check_config(text) == [f"computes by another configuration: {line}"]


def test_part_of_a_model_is_compared_by_its_path(tmp_path):
    config = FAMILIES["Idefics3 (vision), by text"]
    base = write(tmp_path / "model", config)
    target = serve(base)
    other = config | {"text_config": config["text_config"] | {"rope_theta": 5e5}}
    lines = [
        "text_config.rope_parameters.rope_theta is 10000.0 here and 500000.0 in the update",
    ]
    whole = sent_by(train(write(tmp_path / "other", other)))
    # A trainer of the language part alone, with the checkpoint of the whole.
    part = train(write(tmp_path / "part", other["text_config"] | {"architectures": ["LlamaModel"]}))
    told = BaseCheckpoint(base).config(as_source(part).config)
    for text in (whole, canonical_config(told)):
        with pytest.raises(SchemaError) as refused:
            target.check_config(text)
        assert refused.value.mismatches == lines
    part = train(
        write(tmp_path / "same", config["text_config"] | {"architectures": ["LlamaModel"]})
    )
    told = BaseCheckpoint(base).config(as_source(part).config)
    assert target.check_config(canonical_config(told)) == []


def test_what_the_server_overrides_is_not_compared(tmp_path):
    folder = write(tmp_path / "model", FAMILIES["dense"])
    target = serve(folder, rms_norm_eps=1e-3, rope_parameters={"rope_theta": 7.0})
    assert target.check_config(sent_by(train(folder))) == []


def test_model_of_another_kind_is_refused_by_its_type_alone(tmp_path):
    target = serve(write(tmp_path / "model", FAMILIES["dense"]))
    with pytest.raises(SchemaError) as refused:
        target.check_config(sent_by(train(write(tmp_path / "other", FAMILIES["mistral"]))))
    assert refused.value.mismatches == ["model_type is 'llama' here and 'mistral' in the update"]


@pytest.mark.parametrize(
    "entries",
    [
        {"num_hidden_layers": "two"},
        {"num_hidden_layers": 10**12},
        {"num_attention_heads": {"a": 1}},
        {"rope_parameters": [1, 2]},
        {"rope_scaling": {"rope_type": {}}},
        {"hidden_size": None},
        {"text_config": 7, "sub_configs": 3, "attribute_map": "x", "from_dict": 1},
    ],
)
def test_entries_that_the_class_does_not_expect_are_a_refusal(tmp_path, entries):
    target = serve(write(tmp_path / "model", FAMILIES["dense"]))
    with pytest.raises(SchemaError):
        target.check_config(json.dumps(FAMILIES["dense"] | entries))


def test_names_of_code_are_never_followed(tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise AssertionError("code of a configuration was looked for")

    target = serve(write(tmp_path / "model", FAMILIES["dense"]))
    monkeypatch.setattr("transformers.dynamic_module_utils.get_class_from_dynamic_module", fail)
    config = FAMILIES["dense"] | {"auto_map": {"AutoConfig": "evil--code.Config"}}
    assert target.check_config(json.dumps(config)) == []


@pytest.mark.parametrize("name", ["dense", "experts", "gemma3"])
def test_plan_of_a_trained_model_has_its_configuration(tmp_path, name):
    folder = write(tmp_path / "model", FAMILIES[name])
    model = train(folder).to_empty(device="cpu")
    plan = DigestingSource(as_source(model)).plan()
    assert serve(folder).check_config(plan.manifest.config) == []
    assert '"model_type"' in plan.manifest.config
