"""Architectures that were checked: kept in architectures.json, shown in README.md.

python architectures.py [NAME...]    checks those that are named, or all, and writes both

Each is a configuration of tiny sizes, for `wtransfer_vllm.check`; nothing comes from elsewhere.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tiny_models import write_tokenizer

HERE = Path(__file__).parent
FOUND = HERE / "architectures.json"
README = HERE.parent / "README.md"
COLUMNS = ("update", "transformers' model", "KV connectors")
PLACE = re.compile(r"(?<=<!-- architectures -->\n).*?(?=<!-- end -->)", re.DOTALL)

SIZES = {
    "vocab_size": 320,
    "hidden_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 1024,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": None,
    "dtype": "bfloat16",
}
MOE = {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
WINDOWED = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA_4 = WINDOWED | {
    "tie_word_embeddings": True,
    "sliding_window": 128,
    "per_layer_config": {"1": {"head_dim": 64}},
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 320,
}
DEEPSEEK = {
    "n_routed_experts": 64,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 3,
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_rope_head_dim": 32,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "num_nextn_predict_layers": 1,
}
MLA = DEEPSEEK | {
    "first_k_dense_replace": 1,
    # The widths that vLLM's MLA has kernels for.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
VISION = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}


def compressed_tensors(kind, strategy, activations, num_bits=8, **weights):
    """Return a configuration as llm-compressor writes it; no activations: they stay as they are."""
    common = {"num_bits": num_bits, "type": kind, "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": common | {"strategy": strategy, "dynamic": False} | weights,
        "input_activations": activations and common | {"dynamic": True} | activations,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": f"{kind}-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": group},
    }


TOKEN = {"strategy": "token"}
INT8 = compressed_tensors("int", "channel", TOKEN)
STATIC = {"strategy": "tensor", "dynamic": False}
ASYMMETRIC = STATIC | {"symmetric": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
CASES = {
    "Llama": ("llama", "LlamaForCausalLM", {}),
    "Qwen3, tied": ("qwen3", "Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "gpt2": (
        "gpt2",
        "GPT2LMHeadModel",
        {"n_embd": 128, "n_head": 4, "n_layer": 2, "n_positions": 1024},
    ),
    # By vLLM's Transformers backend, which makes the bias of the head anew at each load.
    "Phi": ("phi", "PhiForCausalLM", {"num_hidden_layers": 2, "num_key_value_heads": 4}),
    # Theirs has no number of heads for keys and values of its own.
    "GPT-NeoX": ("gpt_neox", "GPTNeoXForCausalLM", {"num_key_value_heads": 4}),
    "Qwen3-MoE": ("qwen3_moe", "Qwen3MoeForCausalLM", MOE),
    "Mixtral": (
        "mixtral",
        "MixtralForCausalLM",
        {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None},
    ),
    "gpt-oss": (
        "gpt_oss",
        "GptOssForCausalLM",
        WINDOWED | {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": 128},
    ),
    "DeepSeek-V2": (
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        MLA | {"topk_method": "group_limited_greedy", "n_shared_experts": 1},
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        MLA | {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "Gemma 3": (
        "gemma3_text",
        "Gemma3ForCausalLM",
        WINDOWED | {"tie_word_embeddings": True, "sliding_window": 128},
    ),
    "Gemma 4": ("gemma4_text", "Gemma4ForCausalLM", GEMMA_4),
    "Gemma 4, `--disable-hybrid-kv-cache-manager`": ("gemma4_text", "Gemma4ForCausalLM", GEMMA_4),
    "Mistral": ("mistral", "MistralForCausalLM", {"sliding_window": 128}),
    "Qwen3-Next": (
        "qwen3_next",
        "Qwen3NextForCausalLM",
        MOE
        | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
        | {"head_dim": 64, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"shared_expert_intermediate_size": 64},
    ),
    "Qwen2.5": ("qwen2", "Qwen2ForCausalLM", {"use_sliding_window": False}),
    # Its checkpoint has q, k and v in one tensor, and gate and up in another.
    "Phi-3": ("phi3", "Phi3ForCausalLM", {"sliding_window": None}),
    "Gemma 2": (
        "gemma2",
        "Gemma2ForCausalLM",
        WINDOWED | {"tie_word_embeddings": True, "sliding_window": 128},
    ),
    "Cohere 2": (
        "cohere2",
        "Cohere2ForCausalLM",
        WINDOWED | {"tie_word_embeddings": True, "sliding_window": 128},
    ),
    # By vLLM's Transformers backend.
    "OLMo 3": ("olmo3", "Olmo3ForCausalLM", WINDOWED | {"sliding_window": 128}),
    "GLM-4.5": (
        "glm4_moe",
        "Glm4MoeForCausalLM",
        {"n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        | {"attention_bias": True, "use_qk_norm": True},
    ),
    "LFM2": (
        "lfm2",
        "Lfm2ForCausalLM",
        {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
        | {"tie_word_embeddings": True, "block_auto_adjust_ff_dim": False}
        # Of published configurations; transformers' own has none.
        | {"conv_dim": 128, "block_dim": 128},
    ),
    "AFMoE": (
        "afmoe",
        "AfmoeForCausalLM",
        MOE
        | WINDOWED
        | {"num_dense_layers": 1, "num_shared_experts": 1, "sliding_window": 128}
        | {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    ),
    "ERNIE 4.5 MoE": (
        "ernie4_5_moe",
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 16, "moe_k": 2, "moe_intermediate_size": 64}
        | {"tie_word_embeddings": True},
    ),
    "Idefics3 (vision), by text": (
        "idefics3",
        "Idefics3ForConditionalGeneration",
        {
            "text_config": SIZES | {"model_type": "llama", "tie_word_embeddings": False},
            "vision_config": VISION,
            "image_token_id": 300,
            "scale_factor": 2,
        },
    ),
    "Llama, W8A8 int8 (compressed-tensors)": (
        "llama",
        "LlamaForCausalLM",
        {"quantization_config": INT8},
    ),
    # Widths for which vLLM's only kernel is oneDNN, whatever the CPU.
    "Llama, W8A8 int8, static": (
        "llama",
        "LlamaForCausalLM",
        {"hidden_size": 516, "quantization_config": compressed_tensors("int", "channel", STATIC)},
    ),
    "Llama, W8A8 int8, static, asymmetric": (
        "llama",
        "LlamaForCausalLM",
        {
            "hidden_size": 516,
            "quantization_config": compressed_tensors("int", "channel", ASYMMETRIC),
        },
    ),
    "Llama, int8 by vLLM": ("llama", "LlamaForCausalLM", {}),
    "Qwen3-MoE, int8 by vLLM": ("qwen3_moe", "Qwen3MoeForCausalLM", MOE),
    "Llama, block fp8": ("llama", "LlamaForCausalLM", {"quantization_config": FP8}),
}
"""Name in the table -> type of model, architecture, settings."""
BY_VLLM = {"quantization": "int8_per_channel_weight_only"}
ARGUMENTS = {
    "Gemma 4, `--disable-hybrid-kv-cache-manager`": {"disable_hybrid_kv_cache_manager": True},
    "Llama, int8 by vLLM": BY_VLLM,
    "Qwen3-MoE, int8 by vLLM": BY_VLLM,
}
"""Name in the table -> arguments of vLLM, given by ``--vllm``."""
FILES = {
    "Idefics3 (vision), by text": {
        "preprocessor_config.json": {"image_processor_type": "Idefics3ImageProcessor"},
        "processor_config.json": {"processor_class": "Idefics3Processor"},
    },
}
"""Name in the table -> further files of the model; beside them it has a tokenizer."""
KV_ROWS = ("KV of a fresh engine", "KV of the updated engine")
TRAINED = "update by transformers"


def write_model(folder, model_type, architecture, settings):
    """Write the configuration of a tiny model, and nothing else; return the folder."""
    import transformers

    more = dict(settings)
    quantisation = more.pop("quantization_config", None)
    config = transformers.AutoConfig.for_model(model_type, **(SIZES | more))
    config.architectures = [architecture]
    config.save_pretrained(folder)
    if quantisation:
        file = folder / "config.json"
        text = json.dumps(json.loads(file.read_text()) | {"quantization_config": quantisation})
        file.write_text(text)
    return folder


def check(model, *options, env=None, **more):
    """Run the command on a model; return its exit code and its document.

    Args:
        model: Folder of the model.
        *options: Options of the command.
        env: Variables beside those of this process.
        **more: Arguments of vLLM.
    """
    arguments = {"enforce_eager": True, "kv_cache_memory_bytes": 64 << 20} | more
    command = [sys.executable, "-m", "wtransfer_vllm.check", str(model), "--json", *options]
    done = subprocess.run(
        [*command, "--vllm", json.dumps(arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def check_case(folder, name):
    """Run the command on a case; return its exit code and its document."""
    write_model(folder, *CASES[name])
    for file, settings in FILES.get(name, {}).items():
        (folder / file).write_text(json.dumps(settings))
        write_tokenizer(folder)
    return check(folder, **ARGUMENTS.get(name, {}))


def results_of(document):
    """Return what the table says of a document: result and reason by column."""
    if "rows" not in document:
        return {name: ["not checked", _first(document["error"])] for name in COLUMNS}
    updates, kv, trained = [], [], []
    for row in document["rows"]:
        column = kv if row["name"] in KV_ROWS else trained if row["name"] == TRAINED else updates
        column.append((row["result"], row["why"]))
    worst = [
        min(column, key=lambda each: ["WRONG", "refused", "not run", "right"].index(each[0]))
        for column in (updates, trained, kv)
    ]
    return {name: [result, _first(why)] for name, (result, why) in zip(COLUMNS, worst, strict=True)}


def _first(reason):
    """Return a reason without its list, but for the first of it; None: there is none.

    Nor does it name the folder of the twin.
    """
    lines = re.sub(r"^'/\S+': ", "", reason or "").splitlines()
    number = 2 if lines and lines[0].endswith(":") else 1
    return " ".join(line.strip() for line in lines[:number]) or None


def enter(name, document, *, versions):
    """Enter what was found, and write the table anew."""
    kind = [document.get(fact) for fact in ("experts", "quantisation", "kv_cache")]
    found = {each: old for each, old in json.loads(FOUND.read_text()).items() if each in CASES}
    found[name] = {"kind": [each for each in kind if each], **results_of(document), **versions}
    FOUND.write_text(json.dumps(found, indent=2) + "\n")
    # Once: right behind an empty place there is another, up to the end of the next table.
    README.write_text(PLACE.sub(lambda _: made_of(found), README.read_text(), count=1))


def made_of(found):
    """Return the tables, one for each pair of versions, and the reasons that they refer to."""
    lines, notes = [], []

    def cell(result, reason):
        if reason is None:
            return result
        if reason not in notes:
            notes.append(reason)
        return f"{result} ({notes.index(reason) + 1})"

    by_versions = {}
    for name in sorted(found, key=list(CASES).index):
        versions = (found[name]["vllm"], found[name]["transformers"])
        by_versions.setdefault(versions, []).append(name)
    for (vllm, transformers), names in sorted(by_versions.items()):
        lines += [f"vLLM {vllm} on a CPU, transformers {transformers}:", ""]
        lines.append(f"| model | kind, KV cache groups | {' | '.join(COLUMNS)} |")
        lines.append("|---" * (len(COLUMNS) + 2) + "|")
        for name in names:
            cells = [cell(*found[name][column]) for column in COLUMNS]
            lines.append(f"| {name} | {'; '.join(found[name]['kind'])} | {' | '.join(cells)} |")
        lines.append("")
    lines += [f"{number}. {reason}" for number, reason in enumerate(notes, start=1)]
    return "\n".join(lines).rstrip() + "\n"


def main(names):
    """Check the cases that are named, or all."""
    import transformers
    import vllm

    versions = {"vllm": vllm.__version__, "transformers": transformers.__version__}
    for name in names or CASES:
        with tempfile.TemporaryDirectory() as folder:
            _, document = check_case(Path(folder) / "model", name)
        enter(name, document, versions=versions)
        print(name, document["result"], document["seconds"], flush=True)  # noqa: T201  # a script


if __name__ == "__main__":
    main(sys.argv[1:])
