"""Models that transformers holds in another form than their checkpoints, which vLLM loads."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from wtransfer import ParamMeta, Publisher, WorkerSession
from wtransfer.checkpoint.source import CheckpointSource
from wtransfer.errors import SchemaError, SourceError
from wtransfer.weight_sync.checkpoint_form import ModuleForm, StreamForm
from wtransfer.weight_sync.trainer.source import as_source

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="transformers comes with vLLM")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
CONFIGS = {
    "llama": SIZES,
    "qwen3": SIZES | {"tie_word_embeddings": True},
    "gemma3_text": SIZES,
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
    | {"bos_token_id": 1, "eos_token_id": 2},
    "gpt_neox": {name: SIZES[name] for name in SIZES if name != "head_dim"},
    "qwen3_moe": SIZES | EXPERTS,
    "mixtral": SIZES | {"num_local_experts": 4},
    "gpt_oss": SIZES | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_next": SIZES
    | EXPERTS
    | {
        "shared_expert_intermediate_size": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "deepseek_v3": {name: SIZES[name] for name in SIZES if name != "head_dim"}
    | {
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def make(model_type, seed=0):
    torch.manual_seed(seed)
    config = transformers.AutoConfig.for_model(model_type, **CONFIGS[model_type])
    return transformers.AutoModelForCausalLM.from_config(config)


def saved(model, folder):
    """Return what transformers writes of a model."""
    model.save_pretrained(folder)
    (file,) = Path(folder).glob("*.safetensors")
    return load_file(file)


def storages(tensors):
    return {each.untyped_storage().data_ptr() for each in tensors}


@pytest.mark.parametrize("model_type", CONFIGS)
def test_form_of_a_model_is_its_checkpoint_by_views(model_type, tmp_path):
    model = make(model_type)
    sent = dict(as_source(model).iter_full())
    expected = saved(model, tmp_path)
    assert sent.keys() == expected.keys()
    assert all(torch.equal(sent[name], expected[name]) for name in expected)
    assert storages(sent.values()) <= storages(model.state_dict().values())


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_neox", "qwen3"])
def test_checkpoint_reaches_a_worker_that_holds_the_model_otherwise(model_type, tmp_path):
    expected = make(model_type, seed=1)
    saved(expected, tmp_path)
    model = make(model_type, seed=2)
    token = "of this test"
    with (
        Publisher(CheckpointSource(tmp_path), token=token) as publisher,
        WorkerSession(model, join=publisher.address, token=token) as session,
    ):
        publisher.wait_for_workers(1)
        round_ = publisher.publish("v1", wait=False)
        session.wait_for("v1", timeout_s=30)
        assert round_.result().ok
    own, wanted = model.state_dict(), expected.state_dict()
    assert all(torch.equal(own[name], wanted[name]) for name in wanted)


def test_other_names_of_a_tensor_are_in_the_form_too():
    # A worker takes its weights under any of them.
    assert list(ModuleForm(make("qwen3")).formed().tensors)[-1] == "lm_head.weight"


def test_tensors_that_transformers_does_not_save_are_not_sent(tmp_path):
    model = make("llama")
    model._keys_to_ignore_on_save = ["lm_head.weight"]
    sent = dict(as_source(model).iter_full())
    assert sent.keys() == saved(model, tmp_path).keys()
    assert "lm_head.weight" not in sent


def test_own_names_are_sent_where_that_is_asked_for():
    model = make("qwen3_moe")
    assert {meta.name for meta in as_source(model, dict).metadata} == set(model.state_dict())


def test_model_of_another_release_that_cannot_be_converted_is_refused(monkeypatch):
    def changed(*_):
        raise TypeError("revert_weight_conversion() takes no state dict")

    model = make("qwen3_moe")
    monkeypatch.setattr(transformers.modeling_utils, "revert_weight_conversion", changed)
    with pytest.raises(SourceError, match=r"Qwen3MoeForCausalLM: .*takes no state dict.*form=dict"):
        _ = as_source(model).metadata
    with pytest.raises(SchemaError, match="takes no state dict"):
        WorkerSession(model)


def test_model_that_was_dequantised_as_it_was_loaded_is_its_own_form(tmp_path):
    # transformers would write it quantised again.
    config = transformers.Qwen3Config(
        **SIZES | {"hidden_size": 128, "intermediate_size": 128, "head_dim": 128}
    )
    tensors = saved(transformers.Qwen3ForCausalLM(config), tmp_path)
    for name in [each for each in tensors if each.endswith("_proj.weight")]:
        rows, columns = tensors[name].shape
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = torch.ones(rows // 128, columns // 128)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    blocks = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
    told = json.loads((tmp_path / "config.json").read_text())
    told["quantization_config"] = blocks | {"activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(json.dumps(told))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=transformers.FineGrainedFP8Config(dequantize=True),
        dtype=torch.bfloat16,
    )
    own = {name: each.shape for name, each in model.state_dict().items()}
    whole = [ParamMeta(name, torch.bfloat16, tuple(shape)) for name, shape in own.items()]
    assert StreamForm(model).announce(whole) == whole
    assert {meta.name: meta.shape for meta in as_source(model).metadata} == own


def adapted(model, **options):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], r=2, **options)
    found = peft.get_peft_model(model, config)
    with torch.no_grad():
        for name, each in found.named_parameters():
            if "lora_B" in name:
                each.normal_()
    return found


def test_adapters_travel_merged(tmp_path):
    base = make("llama")
    plain = saved(base, tmp_path)
    model = adapted(
        base, modules_to_save=["lm_head"], trainable_token_indices={"embed_tokens": [1, 2]}
    )
    with torch.no_grad():
        model.base_model.model.lm_head.modules_to_save["default"].weight.add_(1.0)
        model.get_input_embeddings().token_adapter.trainable_tokens_delta["default"].add_(1.0)

    def sent():
        return {name: each.clone() for name, each in as_source(model).iter_full()}

    with pytest.raises(SourceError, match=r"adapter of 'model\..*' is not merged.*merge_adapter"):
        sent()
    with model.disable_adapter():
        found = sent()
    assert found.keys() == plain.keys()
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    model.merge_adapter()
    found = sent()
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
    other = make("llama", seed=3)
    other.load_state_dict(found)
    assert torch.allclose(other(input_ids=tokens).logits, expected, atol=1e-4)
    model.unmerge_adapter()
