"""Checkpoints for `wtransfer_vllm.check`: two random twins of a model, or a disturbed copy of it.

A twin has the architecture, widths, vocabulary, quantisation and dtype of its model, so that vLLM
takes the same kernels, and as few layers and experts as have every kind of module.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from typing import TYPE_CHECKING, Any

import torch
from wtransfer.errors import WTransferError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import nn

MIN_LAYERS = 2
"""Fewest layers of a twin."""
MIN_EXPERTS = 4
"""Fewest experts of a twin, where its model has as many."""
GAIN = 1.7
"""Standard deviation of the product of a random matrix and a random vector: with less, every token
is as probable as any other; with much more, attention sees one token only."""
SPREAD = 0.3
"""Standard deviation of the values added to vectors: norms, biases."""
NOISE = 0.05
"""Standard deviation by which a disturbed copy differs from its model, relative to each value."""
MATRIX_NDIM = 2

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Names of the number of experts in a configuration."""
TOP_K = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_k", "top_k_experts")
"""Names of the number of experts that a token passes."""
EXPERTS = re.compile(r"\.experts\.(\d+\.)?")
"""Part of the name of an expert's tensor, with the number of the expert where it has its own."""
PREDICTED = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")
"""Names of the number of layers that predict further tokens: no weights of theirs are served."""
BESIDE = (
    *("token", "vocab", "merges", "added_tokens", "special_tokens", "chat_temp"),
    *("generation_config", "preprocessor", "processor", "video_preprocessor"),
)
"""Prefixes of the names of files that a twin takes from its model."""


class CheckError(WTransferError, RuntimeError):
    """A model cannot be checked."""


def make_twin(model: Path, into: Path, seed: int) -> None:
    """Write a random twin of a model. Twins of two seeds differ in every tensor of floats.

    Args:
        model: Folder of the model; its ``config.json`` is enough.
        into: Folder of the twin.
        seed: Seed of its values.

    Raises:
        CheckError: Twins of this model cannot be made.
    """
    try:
        config, quantisation = small_config(model)
        net = _random_net(config, seed)
        if quantisation is not None:
            _quantise(net, quantisation, seed)
        net.save_pretrained(into)
    except CheckError:
        raise
    except Exception as error:
        raise CheckError(
            f"twins cannot be made: {type(error).__name__}: {error}; use --full"
        ) from error
    if quantisation is not None:
        written = into / "config.json"
        settings = json.loads(written.read_text())
        written.write_text(json.dumps(settings | {"quantization_config": quantisation}, indent=2))
    for file in model.iterdir():
        if file.name.startswith(BESIDE) and file.is_file():
            shutil.copyfile(file, into / file.name)


def make_trained(model: Path, seed: int) -> nn.Module:
    """Return the twin of a seed as a trainer holds it: a model of transformers, not quantised.

    Raises:
        CheckError: Twins of this model cannot be made.
    """
    config, _ = small_config(model)
    net: nn.Module = _random_net(config, seed)
    return net


def experts_of(model: Path, names: Iterable[str]) -> str | None:
    """Return how many experts a model has, and how its checkpoint holds them; None: it has none.

    Args:
        model: Folder of the model.
        names: Names of the checkpoint's tensors.
    """
    held = [found for name in names if (found := EXPERTS.search(name))]
    if not held:
        return None
    settings = json.loads((model / "config.json").read_text())
    parts = [settings, *(each for each in settings.values() if isinstance(each, dict))]
    (number, *_) = [part[name] for part in parts for name in NUM_EXPERTS if part.get(name)] or ["?"]
    return f"{number} experts, {'one tensor each' if held[0][1] else 'packed in one tensor'}"


def small_config(model: Path) -> tuple[Any, dict[str, Any] | None]:
    """Return the configuration of a model's twins, and their quantisation, if any.

    Raises:
        CheckError: Twins of this model cannot be made.
    """
    from transformers import AutoConfig

    try:
        config: Any = AutoConfig.from_pretrained(model)
    except Exception as error:
        raise CheckError(
            f"twins cannot be made: transformers does not know the configuration of {model} "
            f"({error}); use --full"
        ) from error
    quantisation = json.loads((model / "config.json").read_text()).get("quantization_config")
    if quantisation is not None:
        _check_quantisation(quantisation)
        del config.quantization_config
    _, text, depth = _parts(config)
    by_layer = [name for name, value in text.items() if _is_by_layer(name, value, text[depth])]
    kinds = _kinds(config, by_layer)
    # The first layers, not some: models and vLLM derive a layer's kind from its number.
    for num_layers in range(min(MIN_LAYERS, text[depth]), text[depth]):
        small = _shrink(config, by_layer, num_layers)
        if _kinds(small, by_layer) == kinds:
            return small, quantisation
    return _shrink(config, by_layer, text[depth]), quantisation


def disturb(model: Path, into: Path) -> None:
    """Write a copy of a model with other weights; other files are linked.

    Floats of 16 bits and more are multiplied by 1 and some noise. Tensors packed in other dtypes
    have their rows rolled by one, so that they stay valid in any way of packing.

    Args:
        model: Folder of the model.
        into: Folder of the copy.

    Raises:
        CheckError: The model has no safetensors files, or there is no room for the copy.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    into.mkdir(parents=True)
    nbytes, files = copy_nbytes(model), sorted(model.glob("*.safetensors"))
    if not files:
        raise CheckError(f"{model} has no safetensors files, and so no copy to be disturbed")
    if (free := shutil.disk_usage(into).free) < nbytes:
        raise CheckError(
            f"the disturbed copy takes {nbytes / 1e9:.1f} GB and {into} has {free / 1e9:.1f} GB "
            "free: set TMPDIR to a folder on a larger disk"
        )
    for file in files:
        with safe_open(file, framework="pt") as opened:
            metadata = opened.metadata()
            tensors = {name: _disturbed(opened.get_tensor(name)) for name in opened.keys()}  # noqa: SIM118  # no mapping
        save_file(tensors, into / file.name, metadata=metadata)
    for file in model.iterdir():
        # A seal is that of the undisturbed weights.
        if file.suffix != ".safetensors" and file.name != "wtransfer.json":
            (into / file.name).symlink_to(file.resolve())


def copy_nbytes(model: Path) -> int:
    """Return how many bytes of disk `disturb` takes."""
    return sum(file.stat().st_size for file in model.glob("*.safetensors"))


def _random_net(config: Any, seed: int) -> Any:
    # Parts that are not filled below are the same in every twin.
    torch.manual_seed(0)
    net = _build(config)
    _fill(net, seed)
    return net


def _build(config: Any) -> Any:
    import transformers

    name = (config.architectures or ["unknown"])[0]
    model_cls = getattr(transformers, name, transformers.AutoModelForCausalLM)
    build = getattr(model_cls, "_from_config", None) or model_cls.from_config
    dtype = config.get_text_config().dtype or config.dtype or torch.float32
    return build(config, dtype=dtype).eval()


def _kinds(config: Any, by_layer: list[str]) -> set[object]:
    """Return the classes of a model's modules, and the settings of single layers."""
    with torch.device("meta"):
        kinds: set[object] = {type(module) for module in _build(config).modules()}
    _, text, _ = _parts(config)
    return kinds.union((name, json.dumps(each)) for name in by_layer for each in text[name])


def _parts(config: Any) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return all settings, those of the language model, and the name of its number of layers."""
    settings = config.to_dict()
    text = config.get_text_config()
    inside = [name for name in config.sub_configs if getattr(config, name, None) is text]
    depth = type(text).attribute_map.get("num_hidden_layers", "num_hidden_layers")
    return settings, settings[inside[0]] if inside else settings, depth


def _is_by_layer(name: str, value: object, num_layers: int) -> bool:
    """Return whether a setting has one value for each layer."""
    is_pattern = isinstance(value, str) and name.endswith("pattern")
    is_list = isinstance(value, list) and not name.endswith(("_id", "_ids", "architectures"))
    return (is_pattern or is_list) and len(value) == num_layers  # type: ignore[arg-type]


def _shrink(config: Any, by_layer: list[str], num_layers: int) -> Any:
    """Return a configuration with the first layers only, and with few experts."""
    settings, text, depth = _parts(config)
    for name, value in text.items():
        if name in by_layer:
            text[name] = value[:num_layers]
        elif name.endswith("layers") and isinstance(value, list):
            text[name] = [each for each in value if each < num_layers]
        elif name in PREDICTED:
            text[name] = 0
        elif name in NUM_EXPERTS and isinstance(value, int):
            text[name] = min(value, _num_experts(text))
    text[depth] = num_layers
    return type(config).from_dict(settings)


def _num_experts(text: dict[str, Any]) -> int:
    """Return the number of experts needed for a choice among them, in each group of them."""
    top_k = max((text[name] for name in TOP_K if isinstance(text.get(name), int)), default=1)
    groups, chosen = text.get("n_group") or 1, text.get("topk_group") or 1
    least = max(MIN_EXPERTS, top_k + 1, 2 * groups, math.ceil(top_k / chosen) * groups)
    return 1 << (least - 1).bit_length()


@torch.no_grad()
def _fill(net: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    filled = set()
    # Buffers that are saved are loaded as well. Tied tensors come twice.
    for tensor in net.state_dict(keep_vars=True).values():
        if not tensor.is_floating_point() or id(tensor) in filled:
            continue
        filled.add(id(tensor))
        random = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim >= MATRIX_NDIM:
            tensor.copy_(random * (GAIN / math.sqrt(tensor.shape[-1])))
        else:
            tensor.copy_(tensor.float() + SPREAD * random)


def _check_quantisation(quantisation: dict[str, Any]) -> None:
    method = quantisation.get("quant_method")
    more = [name for name in ("sparsity_config", "transform_config") if quantisation.get(name)]
    if method != "compressed-tensors" or more:
        what = f"of quant_method {method!r}" + (f" with a {more[0]}" if more else "")
        raise CheckError(f"twins {what} cannot be made; use --full")


@torch.no_grad()
def _quantise(net: nn.Module, quantisation: dict[str, Any], seed: int) -> None:
    """Quantise and compress a model as its configuration says, each scale by its weights."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from compressed_tensors.quantization.utils import calculate_qparams

    generator = torch.Generator().manual_seed(seed)
    if any(name.endswith("experts") for name, _ in net.named_modules()):
        raise CheckError("twins with quantised experts cannot be made; use --full")
    config = QuantizationConfig.model_validate(quantisation | {"quantization_status": "frozen"})
    apply_quantization_config(net, config)
    modules: Any = net.modules()
    for module in modules:
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or scheme.weights is None:
            continue
        weight, scale = module.weight, module.weight_scale
        # One scale for each block of the weight: all of it, a row, a part of a row, a square.
        rows, columns = scale.shape if scale.ndim == MATRIX_NDIM else (1, 1)
        blocks = weight.reshape(rows, weight.shape[0] // rows, columns, -1).float()
        found, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), scheme.weights)
        scale.copy_(found.reshape(scale.shape))
        if hasattr(module, "weight_zero_point"):
            module.weight_zero_point.copy_(zero.reshape(scale.shape))
        if hasattr(module, "input_scale"):
            # For inputs of a few standard deviations.
            is_float = scheme.input_activations.type == "float"
            limit = torch.finfo(torch.float8_e4m3fn).max if is_float else 127
            module.input_scale.fill_((4 + torch.rand((), generator=generator)) / limit)
    compressor: Any = ModelCompressor(config, force_compression_format=quantisation["format"])
    compressor.compress_model(net)


def _disturbed(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_floating_point() and tensor.element_size() > 1:
        # Equal tensors stay equal: a head and an embedding that are one, stored twice.
        generator = torch.Generator().manual_seed(tensor.numel())
        noise = 1 + NOISE * torch.randn(tensor.shape, generator=generator)
        return (tensor.float() * noise).to(tensor.dtype)
    if tensor.ndim >= MATRIX_NDIM:
        return torch.roll(tensor.view(torch.uint8), 1, 0).view(tensor.dtype)
    return tensor
