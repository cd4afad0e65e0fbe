"""Tiny random Llamas with a byte-level tokenizer, made without anything from elsewhere.

python tiny_models.py FOLDER    makes FOLDER/A and FOLDER/B
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

HIDDEN, VOCAB, LAYERS = 128, 320, 2
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 256,
    "eos_token_id": 257,
    "attention_bias": False,
    "mlp_bias": False,
}


def config(layers: int, hidden: int, *, tied: bool) -> dict[str, object]:
    """Return a model's configuration."""
    return CONFIG | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "head_dim": hidden // 4,
        "tie_word_embeddings": tied,
    }


def weights(
    seed: int, *, tied: bool = False, layers: int = LAYERS, hidden: int = HIDDEN
) -> dict[str, torch.Tensor]:
    """Return a model's weights under the names of its checkpoint."""
    inner, keys = 2 * hidden, hidden // 2
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    made = {
        "model.embed_tokens.weight": random(VOCAB, hidden, scale=1.0),
        "lm_head.weight": random(VOCAB, hidden),
        "model.norm.weight": ones.clone(),
    }
    if tied:
        made["lm_head.weight"] = made["model.embed_tokens.weight"].clone()
    for index in range(layers):
        layer = f"model.layers.{index}."
        made |= {
            layer + "self_attn.q_proj.weight": random(hidden, hidden),
            layer + "self_attn.k_proj.weight": random(keys, hidden),
            layer + "self_attn.v_proj.weight": random(keys, hidden),
            layer + "self_attn.o_proj.weight": random(hidden, hidden),
            layer + "mlp.gate_proj.weight": random(inner, hidden),
            layer + "mlp.up_proj.weight": random(inner, hidden),
            layer + "mlp.down_proj.weight": random(hidden, inner),
            layer + "input_layernorm.weight": ones.clone(),
            layer + "post_attention_layernorm.weight": ones.clone(),
        }
    return made


def make(
    folder: Path,
    seed: int,
    *,
    tied: bool = False,
    without: str | None = None,
    layers: int = LAYERS,
    hidden: int = HIDDEN,
) -> Path:
    """Write a model that vLLM can load, perhaps without a tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(layers, hidden, tied=tied)))
    tensors = weights(seed, tied=tied, layers=layers, hidden=hidden)
    tensors.pop(without, None)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    write_tokenizer(folder)
    return folder


def make_adapter(folder: Path, seed: int) -> Path:
    """Write a random LoRA adapter of the queries, for models of `make`."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        f"base_model.model.model.layers.{index}.self_attn.q_proj.lora_{part}.weight": torch.randn(
            shape, generator=generator
        )
        for index in range(LAYERS)
        for part, shape in (("A", (8, HIDDEN)), ("B", (HIDDEN, 8)))
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": 8, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return folder


EXPERTS = CONFIG | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "head_dim": HIDDEN // 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": HIDDEN // 2,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
"""Configuration of a model of experts."""

SIZES = {name: EXPERTS[name] for name in ("hidden_size", "num_hidden_layers", "head_dim")}
WINDOW = 64
"""Tokens that a layer with a sliding window attends to: two blocks."""
HYBRID = {
    "gemma3": CONFIG
    | SIZES
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "intermediate_size": 2 * HIDDEN,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "query_pre_attn_scalar": HIDDEN // 4,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
    "gpt_oss": CONFIG
    | SIZES
    | {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "intermediate_size": HIDDEN,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": WINDOW,
        "layer_types": ["sliding_attention", "full_attention"],
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "qwen3_next": EXPERTS
    | {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "shared_expert_intermediate_size": HIDDEN // 2,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "mistral": CONFIG
    | SIZES
    | {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "intermediate_size": 2 * HIDDEN,
        "sliding_window": WINDOW,
        "tie_word_embeddings": False,
    },
}
"""Configurations of models whose layers attend to different parts of a prefix."""


def of_experts(seed: int = 1) -> torch.nn.Module:
    """Return a model of transformers, which holds the experts of a layer in one tensor."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    assert any(each.dim() == 3 for each in model.parameters())
    return model


def make_twin(folder: Path, config: dict[str, object], seed: int) -> Path:
    """Write a model of a configuration that vLLM can load."""
    from wtransfer_vllm import twins

    asked = folder / "asked"
    asked.mkdir(parents=True)
    (asked / "config.json").write_text(json.dumps(config))
    write_tokenizer(asked)
    twins.make_twin(asked, folder / "model", seed)
    return folder / "model"


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<s>": 256, "</s>": 257}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


if __name__ == "__main__":
    for name, seed in (("A", 1), ("B", 2)):
        print(make(Path(sys.argv[1]) / name, seed))  # noqa: T201  # a script
