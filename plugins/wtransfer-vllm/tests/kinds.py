"""Kinds of models beside those that write text, each tiny and of random weights.

`make` writes a model; `live/host.py` asks it (`ask`), by requests that are JSON. README.md has a
row for each, which `test_live_kinds.py` proves.
"""

from __future__ import annotations

import json
import re
import string
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import tiny_models
import torch
from safetensors.torch import load_file, save_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

HIDDEN, VOCAB = tiny_models.HIDDEN, tiny_models.VOCAB
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 2 * HIDDEN,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
DECODER = TEXT | {"num_key_value_heads": 2}
SPEECH = {
    "vocab_size": VOCAB,
    "d_model": HIDDEN,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 2 * HIDDEN,
    "decoder_ffn_dim": 2 * HIDDEN,
    "max_target_positions": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 257,
    "decoder_start_token_id": 256,
}
IMAGE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
TOWER_TEXT = TEXT | {"hidden_size": 64, "num_attention_heads": 2, "projection_size": 64}
IMAGES = {
    "image_processor_type": "SiglipImageProcessor",
    "size": {"height": 32, "width": 32},
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "SiglipProcessor",
}


class Kind(NamedTuple):
    """A kind of model."""

    model_type: str
    """Of transformers' configuration."""
    architecture: str
    """By which vLLM knows it."""
    config: dict[str, Any]
    """Settings of the configuration."""
    task: str | None = None
    """Task of vLLM's pooling; None: it makes tokens."""
    requests: tuple[dict[str, Any], ...] = ({"prompt": 300}, {"prompt": 40}, {"prompt": 130})
    """Requests, as the host takes them; of a prompt the number of its tokens."""
    options: Mapping[str, Any] = MappingProxyType({})
    """Options of vLLM."""
    head: str | None = None
    """transformers' class with all of its weights, where that of the configuration has fewer."""
    prefix: str = ""
    """Prefix of the names under which vLLM looks for them."""
    more: Callable[[torch.Generator], dict[str, torch.Tensor]] | None = None
    """Makes weights that no class of transformers has."""
    files: Callable[[Path, torch.Generator], None] | None = None
    """Writes further files."""
    refused: str | None = None
    """Words of the refusal; None: it takes updates."""
    why: str = ""
    """Why it is refused, for a reader."""


def _rows(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator) * 0.3


def _score(num_labels: int) -> Callable[[torch.Generator], dict[str, torch.Tensor]]:
    return lambda generator: {
        "score.0.weight": _rows(generator, HIDDEN, HIDDEN),
        "score.0.bias": _rows(generator, HIDDEN),
        "score.2.weight": _rows(generator, num_labels, HIDDEN),
        "score.2.bias": _rows(generator, num_labels),
    }


def _heads_in_files(folder: Path, generator: torch.Generator) -> None:
    """Write the heads of BGE-M3, which are in files of their own."""
    for name, width in (("sparse_linear", 1), ("colbert_linear", HIDDEN)):
        head = {"weight": _rows(generator, width, HIDDEN), "bias": _rows(generator, width)}
        torch.save(head, folder / f"{name}.pt")


def _dense(folder: Path, generator: torch.Generator) -> None:
    """Write a Dense layer of Sentence Transformers behind the pooling."""
    kinds = ("Transformer", "Pooling", "Dense")
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": path,
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, (kind, path) in enumerate(zip(kinds, ("", "1_Pooling", "2_Dense"), strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for name, settings in {
        "1_Pooling": {"word_embedding_dimension": HIDDEN, "pooling_mode_mean_tokens": True},
        "2_Dense": {
            "in_features": HIDDEN,
            "out_features": 32,
            "bias": True,
            "activation_function": "torch.nn.modules.linear.Identity",
        },
    }.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(settings))
    head = {"linear.weight": _rows(generator, 32, HIDDEN), "linear.bias": _rows(generator, 32)}
    save_file(head, folder / "2_Dense" / "model.safetensors")


def _images(folder: Path, _: torch.Generator) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(IMAGES))


def _speech(folder: Path, _: torch.Generator) -> None:
    """Write what makes features of a sound, and the tokenizer's two files."""
    extractor = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 80}
    extractor |= {"processor_class": "WhisperProcessor", "sampling_rate": 16000, "n_fft": 400}
    (folder / "preprocessor_config.json").write_text(json.dumps(extractor))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "WhisperTokenizer", "processor_class": "WhisperProcessor"}
    settings |= {"unk_token": "<s>", "pad_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n")


POOLING = {"runner": "pooling", "dtype": "float32", "max_num_seqs": 1}
"""Options of vLLM for a kind with a task: one request after the other."""
QWEN = ("qwen3", "Qwen3ForCausalLM", DECODER | {"head_dim": 32})
"""A model that writes text; vLLM takes its last states for embeddings."""
IN_PARTS = {"max_num_batched_tokens": 128}
KINDS = {
    "embeddings": Kind(*QWEN, "embed", options=IN_PARTS),
    "embeddings of tokens": Kind(*QWEN, "token_embed", options=IN_PARTS),
    "embeddings by a bidirectional model": Kind("bert", "BertModel", TEXT, "embed"),
    "embeddings behind a Dense layer": Kind(
        *QWEN,
        "embed",
        files=_dense,
        refused=r"poolers_by_task\..* \(Linear\) is no registered module",
        why="the layer is no registered module",
    ),
    "late interaction": Kind(
        *QWEN,
        "token_embed",
        options=IN_PARTS
        | {"pooler_config": {"task": "token_embed", "enable_flash_late_interaction": False}},
    ),
    "late interaction in the workers": Kind(
        *QWEN,
        "token_embed",
        options={"pooler_config": {"task": "token_embed"}},
        refused="--no-enable-flash-late-interaction",
        why="see `--no-enable-flash-late-interaction`",
    ),
    # vLLM makes its last layer as it loads, and its reload does not know it.
    "late interaction by ColBERT": Kind(
        "bert",
        "HF_ColBERT",
        TEXT,
        "token_embed",
        options={"pooler_config": {"enable_flash_late_interaction": False}},
        prefix="bert.",
        more=lambda generator: {"linear.weight": _rows(generator, 32, HIDDEN)},
        refused="vLLM cannot reload the weights that it serves",
        why="vLLM cannot reload it",
    ),
    "several vectors": Kind(
        "xlm-roberta",
        "BgeM3EmbeddingModel",
        TEXT,
        "token_embed",
        files=_heads_in_files,
        refused=r"BgeM3EmbeddingModel.*layer '.*_linear', .* received no elements",
        why="its heads are in files of their own",
    ),
    "sparse embeddings": Kind(
        "bert",
        "BertSpladeSparseEmbeddingModel",
        TEXT | {"tie_word_embeddings": False},
        "embed",
        head="BertForMaskedLM",
    ),
    "cross encoder": Kind(
        "bert",
        "BertForSequenceClassification",
        TEXT | {"num_labels": 1},
        "classify",
        head="BertForSequenceClassification",
    ),
    "classification": Kind(
        "llama",
        "LlamaForSequenceClassification",
        DECODER | {"num_labels": 3},
        "classify",
        options=IN_PARTS,
        head="LlamaForSequenceClassification",
    ),
    "classification of tokens": Kind(
        "bert",
        "BertForTokenClassification",
        TEXT | {"num_labels": 5},
        "token_classify",
        head="BertForTokenClassification",
    ),
    "reward": Kind(
        "qwen2",
        "Qwen2ForRewardModel",
        DECODER,
        "token_classify",
        options=IN_PARTS,
        head="Qwen2ForCausalLM",
        more=_score(1),
    ),
    "reward of steps": Kind(
        "qwen2",
        "Qwen2ForProcessRewardModel",
        DECODER,
        "token_classify",
        options={"pooler_config": {"step_tag_id": 100, "returned_token_ids": [0, 1]}},
        head="Qwen2ForCausalLM",
        more=_score(2),
    ),
    "image tower": Kind(
        "siglip",
        "SiglipModel",
        {"text_config": TOWER_TEXT, "vision_config": IMAGE},
        "embed",
        requests=({"image": 1}, {"image": 2}, {"prompt": 12}),
        files=_images,
    ),
    "speech to text": Kind(
        "whisper",
        "WhisperForConditionalGeneration",
        SPEECH,
        requests=({"sound": 1}, {"sound": 2}),
        options={"max_model_len": 256, "limit_mm_per_prompt": {"audio": 1}},
        head="WhisperForConditionalGeneration",
        files=_speech,
    ),
    "prompt embeddings": Kind(
        "llama",
        "LlamaForCausalLM",
        DECODER,
        requests=({"embeds": 200}, {"prompt": 40}, {"embeds": 30}),
        options={"enable_prompt_embeds": True},
        head="LlamaForCausalLM",
    ),
}
"""Name -> kind."""
PLACE = re.compile(r"(?<=<!-- kinds -->\n).*?(?=<!-- end -->)", re.DOTALL)
"""Place of the table in README.md."""


def table() -> str:
    """Return the table of README.md."""
    rows = ["| kind | run as | update |", "|---|---|---|"]
    for name, kind in KINDS.items():
        result = f"refused: {kind.why}" if kind.refused else "right"
        rows.append(f"| {name} | {kind.architecture} | {result} |")
    return "\n".join(rows) + "\n"


def make(folder: Path, name: str, seed: int) -> Path:
    """Write a model of a kind, as transformers saves it; return the folder."""
    import transformers

    kind = KINDS[name]
    config = transformers.AutoConfig.for_model(kind.model_type, **kind.config)
    torch.manual_seed(seed)
    if kind.head is None:
        net = transformers.AutoModel.from_config(config)
    else:
        net = getattr(transformers, kind.head)(config)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 1:
                parameter.mul_(8)  # apart from each other, beside initialisers of 0.02
    net.save_pretrained(folder)
    generator = torch.Generator().manual_seed(seed)
    file = folder / "model.safetensors"
    more = kind.more(generator) if kind.more else {}
    saved = {kind.prefix + name: tensor for name, tensor in load_file(file).items()}
    save_file(saved | more, file, metadata={"format": "pt"})
    settings = folder / "config.json"
    named = json.loads(settings.read_text()) | {"architectures": [kind.architecture]}
    settings.write_text(json.dumps(named))
    tiny_models.write_tokenizer(folder)
    if kind.files:
        kind.files(folder, generator)
    return folder


def requests_of(name: str) -> list[dict[str, Any]]:
    """Return the requests of a kind, with their tokens."""
    letters = [ord(letter) % 250 + 1 for letter in string.ascii_letters]
    return [
        {
            key: [letters[(number + index) % len(letters)] for index in range(value)]
            if key == "prompt"
            else value
            for key, value in request.items()
        }
        for number, request in enumerate(KINDS[name].requests)
    ]
