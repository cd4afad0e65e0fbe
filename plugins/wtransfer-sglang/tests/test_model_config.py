"""Configurations of trainers and of checkpoints, as SGLang's classes read them."""

import json
from types import SimpleNamespace as Bag

import pytest
import sglang_models
import transformers
from torch import nn
from wtransfer import CheckpointSource
from wtransfer.checkpoint.model_config import canonical_config
from wtransfer.errors import SchemaError
from wtransfer.weight_sync.trainer.source import as_source

from wtransfer_sglang import target
from wtransfer_sglang.target import SglangTarget

KINDS = ("llama", "latent", "window", "groups", "states", "moe")


@pytest.fixture
def serve(monkeypatch):
    """Makes the target of a server of a checkpoint, which overrides what a test says."""
    monkeypatch.setattr(target, "prove", lambda *_: None)

    def serve(folder, **overrides):
        read = transformers.AutoConfig.from_pretrained(folder)
        read.update(overrides)
        config = Bag(model_path=str(folder), revision=None, hf_config=read)
        load_config = Bag(load_format="auto")
        return SglangTarget(
            Bag(model=nn.Linear(1, 1), model_config=config, load_config=load_config)
        )

    return serve


def sent_by(model):
    return canonical_config(as_source(model).config)


@pytest.mark.parametrize("kind", KINDS)
def test_model_of_the_folder_has_its_configuration(serve, tmp_path, kind):
    sglang_models.make(tmp_path, kind, 1)
    served = serve(tmp_path)
    assert served.refusal is None
    source = CheckpointSource(tmp_path)
    assert served.check_config(canonical_config(source.config)) == []
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    model.config.use_cache = False
    model.config.pad_token_id = 3
    model.gradient_checkpointing_enable()
    assert served.check_config(sent_by(model)) == []
    model.config.num_attention_heads = 2
    with pytest.raises(SchemaError, match="num_attention_heads is 4 here and 2 in the update"):
        served.check_config(sent_by(model))


def test_another_rope_theta_is_refused_whatever_the_server_overrides(serve, tmp_path, monkeypatch):
    sglang_models.make(tmp_path, "llama", 1)
    served = serve(tmp_path, rms_norm_eps=1e-3)
    config = json.loads((tmp_path / "config.json").read_text())
    assert served.check_config(json.dumps(config)) == []
    line = "rope_parameters.rope_theta is 10000.0 here and 500000.0 in the update"
    del config["rope_parameters"]
    text = json.dumps(config | {"rope_theta": 5e5})
    with pytest.raises(SchemaError, match=line):
        served.check_config(text)
    monkeypatch.setenv("WTRANSFER_CONFIG_MAY_DIFFER", "1")
    assert served.check_config(text) == [f"computes by another configuration: {line}"]
