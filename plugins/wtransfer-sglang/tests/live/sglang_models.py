"""Tiny random models of transformers, by the kind of attention or layers; their answers."""

import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="SGLang is not installed: tests/make_env.py ENV")

from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

SHAPE = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
}
EXPERTS = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 4}
ROUTING = 32.0
"""Factor of the routers' weights: an expert that one kernel chooses last, and another leaves out by
its rounding, weighs next to nothing. So tokens do not hang on which kernel has routed them."""
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
STATES = {
    "mamba_d_ssm": 64,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "head_dim": 16,
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "moe_layer_freq": 1,
    # SGLang computes positions of this attention on a CPU by this scaling alone.
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
TIE = 0.05
"""Distance of two logits, in standard deviations of all, that two kernels may round either way; of
a token that other weights have chosen it is two or three."""


def model(kind, seed):
    """Return a model whose weights a seed gives."""
    if kind == "llama":
        made = LlamaForCausalLM(LlamaConfig(**SHAPE))
    elif kind == "latent":
        made = DeepseekV2ForCausalLM(DeepseekV2Config(**SHAPE | LATENT))
    elif kind == "window":
        # SGLang has one group of KV cache for all layers of this one, and ties its head.
        of_kind = WINDOW | {"query_pre_attn_scalar": 16, "tie_word_embeddings": True}
        made = Gemma3ForCausalLM(Gemma3TextConfig(**SHAPE | of_kind))
    elif kind == "groups":
        made = MellumForCausalLM(MellumConfig(**SHAPE, **EXPERTS, **WINDOW))
    elif kind == "states":
        made = FalconH1ForCausalLM(FalconH1Config(**SHAPE, **STATES))
    else:
        made = Qwen3MoeForCausalLM(Qwen3MoeConfig(**SHAPE, **EXPERTS))
    made = made.to(torch.bfloat16)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator) * 0.2
            drawn *= ROUTING if name.endswith("mlp.gate.weight") else 1.0
            parameter.copy_(drawn.to(torch.bfloat16))
    return made


def make(folder, kind, seed):
    """Write a model's checkpoint."""
    model(kind, seed).save_pretrained(folder)


def tie(folder):
    """Make a checkpoint's head its embedding: one tensor of the model, and two of the files."""
    held = load_file(folder / "model.safetensors")
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))


@functools.cache
def loaded(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


@torch.no_grad()
def wrong_tokens(folder_of, answer):
    """Return the places of tokens that the model of their version would not have chosen.

    Args:
        folder_of: Label of a version -> folder of its checkpoint.
        answer: The answer, whose tokens before a place are taken as they are.
    """
    ids = torch.tensor([answer.prompt + answer.tokens])
    wrong = []
    for version, start, end in answer.versions:
        logits = loaded(folder_of[version])(ids).logits[0].float()
        for place in range(start, end):
            row = logits[len(answer.prompt) + place - 1]
            if row.max() - row[answer.tokens[place]] > TIE * row.std():
                wrong.append(place)
    return wrong
