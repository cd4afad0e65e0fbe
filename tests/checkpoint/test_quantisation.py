"""Quantised checkpoints: schemes read and refused, and weights put into them bit for bit."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from wtransfer.checkpoint import quantisation
from wtransfer.checkpoint.quantisation import (
    QuantisedTensor,
    read_quantised,
    scales_of,
    scheme_name,
    scheme_of,
)
from wtransfer.errors import SourceError
from wtransfer.weights import ParamMeta

DYNAMIC = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(weights=None, **settings):
    """Return a configuration of compressed-tensors: W8A8-int8, but for what is given."""
    made = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}
    group = {"targets": ["Linear"], "weights": made | (weights or {}), "input_activations": DYNAMIC}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    } | settings


def static(config):
    config["config_groups"]["group_0"]["input_activations"] = DYNAMIC | {"dynamic": False}
    return config


def two(config):
    other = compressed({"strategy": "tensor"})["config_groups"]["group_0"]
    config["config_groups"]["group_1"] = other
    return config


def float8(**weights):
    return compressed({"type": "float", **weights}, format="float-quantized")


SCHEMES = {
    "compressed-tensors:int8:channel:symmetric": compressed(),
    "compressed-tensors:int8:tensor:symmetric": compressed({"strategy": "tensor"}),
    "compressed-tensors:int8:group32:symmetric": compressed(
        {"strategy": "group", "group_size": 32}
    ),
    "compressed-tensors:fp8:channel:symmetric": float8(),
    "compressed-tensors:fp8:tensor:symmetric": float8(strategy="tensor"),
    "compressed-tensors:fp8:block128x128:symmetric": float8(
        strategy="block", block_structure=[128, 128]
    ),
    "fp8:block128x128": FP8,
    "fp8:tensor": FP8 | {"weight_block_size": None},
}
REFUSED = {
    "awq": ({"quant_method": "awq", "bits": 4}, "quantised by 'awq'"),
    "gptq": ({"quant_method": "gptq", "bits": 4}, "quantised by 'gptq'"),
    "mxfp4": ({"quant_method": "mxfp4"}, "quantised by 'mxfp4'"),
    "modelopt": ({"quant_method": "modelopt"}, "quantised by 'modelopt'"),
    "nothing": ({}, "quantised by None"),
    "nvfp4": (compressed(format="nvfp4-pack-quantized"), "format 'nvfp4-pack-quantized'"),
    "packed": (compressed(format="pack-quantized"), "format 'pack-quantized'"),
    "4 bits": (compressed({"num_bits": 4}), "'int' weights of 4 bits"),
    "asymmetric": (compressed({"symmetric": False}), "asymmetric weights, which have zero points"),
    "ordered": (compressed({"actorder": "group"}), "with actorder 'group'"),
    "scales of 8 bits": (compressed({"scale_dtype": "float8_e8m0fnu"}), "with scale_dtype"),
    "static": (static(compressed()), "static scales of activations"),
    "two ways": (two(compressed()), "in one way.*int8:channel.*int8:tensor"),
    "no way": (compressed(config_groups={}), "in one way; this has none"),
    "KV cache": (compressed(kv_cache_scheme={"num_bits": 8}), "with a kv_cache_scheme"),
    "sparse": (
        compressed(sparsity_config={"format": "sparse-24-bitmask", "targets": ["Linear"]}),
        "with a sparsity_config",
    ),
    "rotated": (compressed(transform_config={"config_groups": {}}), "with a transform_config"),
    "no group": (compressed({"strategy": "group"}), "scales by 'group', of size"),
    "tokens": (compressed({"strategy": "token"}), "scales by 'token'"),
    "malformed": (compressed(config_groups=[1]), "cannot be read: AttributeError"),
    "static fp8": (FP8 | {"activation_scheme": "static"}, "static scales of activations"),
    "e5m2": (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2'"),
    "powers of two": (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt 'ue8m0'"),
    "half a block": (FP8 | {"weight_block_size": [0, 128]}, "weight_block_size"),
}


@pytest.fixture
def checkpoint(tmp_path):
    """Return a writer of a checkpoint of tensors."""

    def write(tensors, settings):
        config = {} if settings is None else {"quantization_config": settings}
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file(tensors, tmp_path / "model.safetensors")
        return tmp_path

    return write


def int8_layer(rows=4, columns=64, **more):
    return {
        "layer.weight": torch.zeros(rows, columns, dtype=torch.int8),
        "layer.weight_scale": torch.ones(rows, 1, dtype=torch.bfloat16),
        "norm.weight": torch.ones(4, dtype=torch.bfloat16),
    } | more


def block_layer(rows, columns):
    scale = torch.ones(-(-rows // 128), -(-columns // 128))
    weight = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    return {"layer.weight": weight, "layer.weight_scale_inv": scale}


@pytest.mark.parametrize("name", SCHEMES)
def test_scheme_has_one_canonical_text(name):
    assert scheme_of(SCHEMES[name]).name == scheme_name(SCHEMES[name]) == name


@pytest.mark.parametrize("case", REFUSED)
def test_scheme_that_follows_from_no_weights_is_refused_with_what_it_has(case):
    settings, error = REFUSED[case]
    with pytest.raises(SourceError, match=error):
        scheme_of(settings)
    assert scheme_name(settings) == settings.get("quant_method", "unknown")


def test_checkpoint_that_says_that_it_is_dense_and_how_it_was_measured_is_known():
    said = compressed({"observer": "mse"}, sparsity_config={"format": "dense"}, transform_config={})
    assert scheme_of(said) == scheme_of(compressed())


def test_checkpoint_that_is_not_quantised_has_no_scheme(checkpoint):
    folder = checkpoint({"layer.weight": torch.ones(2, 2)}, None)
    assert read_quantised(folder) is None
    assert scheme_name(None) == ""
    (folder / "config.json").unlink()
    assert read_quantised(folder) is None


def test_layers_that_the_scheme_ignores_are_those_that_the_files_have_as_floats(checkpoint):
    more = {"lm_head.weight": torch.ones(8, 4, dtype=torch.bfloat16)}
    more["attention.mask"] = torch.ones(2, dtype=torch.uint8)
    scheme, forms = read_quantised(checkpoint(int8_layer(**more), compressed()))
    assert scheme.name == "compressed-tensors:int8:channel:symmetric"
    ((name, form),) = forms.items()
    assert (name, form.weight.shape, form.scale.name) == (
        "layer.weight",
        (4, 64),
        "layer.weight_scale",
    )


def test_scheme_of_a_part_of_the_model_is_found(checkpoint):
    folder = checkpoint(int8_layer(), None)
    inner = {"text_config": {"quantization_config": compressed()}}
    (folder / "config.json").write_text(json.dumps(inner))
    assert read_quantised(folder)[0].dtype == torch.int8


ODD = torch.ones(4, 1)
BROKEN = {
    "lost": ({"layer.weight_scale": None}, "'layer.weight' is quantised and has lost its scale"),
    "beside": ({"norm.weight_scale": ODD}, "'norm.weight_scale' is the scale of no quantised"),
    "zeros": ({"layer.weight_zero_point": ODD.to(torch.int8)}, "weight_zero_point.*not of scheme"),
    "packed": ({"other.weight_packed": ODD.to(torch.int32)}, "'other.weight_packed'.*not of sch"),
    "other": ({"other.weight": ODD.to(torch.float8_e4m3fn)}, "'other.weight' .float8_e4m3fn. is"),
    "input": ({"layer.input_scale": ODD}, "'layer.input_scale' was measured on data"),
    "KV cache": ({"self_attn.k_scale": ODD}, "'self_attn.k_scale' was measured on data"),
    "stacked": ({"experts.weight": torch.zeros(2, 4, 4, dtype=torch.int8)}, "only matrices"),
    "named": ({"experts.w": torch.zeros(4, 4, dtype=torch.int8)}, "'experts.w' of shape.*only"),
    "empty": ({"e.weight": torch.zeros(0, 4, dtype=torch.int8)}, "'e.weight' of shape.*only"),
    "shape": ({"layer.weight_scale": torch.ones(1, 4)}, r"float32 \[1, 4\].*of shape \[4, 1\]"),
    "dtype": ({"layer.weight_scale": torch.ones(4, 1, dtype=torch.float64)}, "is float64"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_checkpoint_with_a_tensor_that_no_weight_gives_is_refused_by_name(case, checkpoint):
    more, error = BROKEN[case]
    tensors = {name: each for name, each in int8_layer(**more).items() if each is not None}
    with pytest.raises(SourceError, match=error) as caught:
        read_quantised(checkpoint(tensors, compressed()))
    assert caught.value.piece in (*more, "layer.weight")


def test_quantised_weights_without_a_configuration_are_refused(checkpoint):
    with pytest.raises(SourceError, match=r"'layer\.weight'.*no quantization_config that says how"):
        read_quantised(checkpoint(int8_layer(), None))


def test_configuration_that_is_no_json_is_refused(checkpoint):
    folder = checkpoint(int8_layer(), None)
    (folder / "config.json").write_text("{")
    with pytest.raises(SourceError, match=r"config\.json' cannot be read"):
        read_quantised(folder)
    (folder / "config.json").write_text('{"quantization_config": "int8"}')
    with pytest.raises(SourceError, match="quantization_config is 'int8'"):
        read_quantised(folder)


def test_groups_that_do_not_divide_a_row_are_refused_and_blocks_may_be_cut(checkpoint):
    groups = compressed({"strategy": "group", "group_size": 48})
    tensors = int8_layer(**{"layer.weight_scale": torch.ones(4, 2, dtype=torch.bfloat16)})
    with pytest.raises(SourceError, match=r"\[4, 64\] does not divide into groups of 48"):
        read_quantised(checkpoint(tensors, groups))
    _, forms = read_quantised(checkpoint(block_layer(200, 300), FP8))
    assert forms["layer.weight"].scale.shape == (2, 3)


# -- bit for bit


def quantise(weight, settings, scale_dtype):
    """Return the scale and the weight as a checkpoint of the scheme has them."""
    scheme = scheme_of(settings)
    grid = scheme.grid(weight.shape) if scheme.block != (None, None) else (1,)
    scale = scales_of(weight, scheme, ParamMeta("s", scale_dtype, grid))
    return scale, QuantisedTensor(weight, scale, scheme)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


def weight_of(rows, columns, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    # Rows of very different size, zeros, and values that lie between two integers.
    weight *= torch.logspace(-6, 3, rows)[:, None]
    weight[1] = 0.0
    weight[2, :5] = torch.tensor([127.5, 0.5, 1.5, 2.5, -127.5])
    return weight.to(dtype)


def deepseek_blocks(weight, size=128):
    """Quantise as DeepSeek's kernels do: in float32, each block by its largest magnitude."""
    rows, columns = weight.shape
    scale = torch.zeros(-(-rows // size), -(-columns // size))
    found = torch.zeros(rows, columns, dtype=torch.float8_e4m3fn)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * size, (i + 1) * size), slice(j * size, (j + 1) * size)
            block = weight[at].float()
            scale[i, j] = block.abs().max() / 448.0
            found[at] = (block / scale[i, j]).to(torch.float8_e4m3fn)
    return scale, found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 384), (200, 300), (128, 128), (5, 7)])
def test_block_fp8_is_that_of_deepseek_also_where_a_block_is_cut(shape, dtype):
    weight = weight_of(*shape, dtype)
    scale, unread = quantise(weight, FP8, torch.float32)
    wanted_scale, wanted = deepseek_blocks(weight)
    assert torch.equal(scale, wanted_scale)
    assert torch.equal(bits(unread.load()), bits(wanted))


def test_int8_by_row_rounds_as_the_library_does():
    """Half to even, and in the dtype of the weight: x / scale is bfloat16 where both are."""
    weight = weight_of(6, 64)
    scale, unread = quantise(weight, compressed(), torch.bfloat16)
    wanted = (weight.abs().amax(1, keepdim=True).float() / 127.5).to(torch.bfloat16)
    wanted[1] = torch.finfo(torch.bfloat16).eps
    assert torch.equal(scale, wanted)
    assert torch.equal(unread.load(), (weight / wanted).round().clamp(-128, 127).to(torch.int8))
    assert not unread.load()[1].any()


# -- streaming


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("transposed", [False, True])
def test_bytes_read_in_any_pieces_are_those_of_the_whole(name, transposed, monkeypatch):
    monkeypatch.setattr(quantisation, "CHUNK_NBYTES", 3000)
    weight = weight_of(384, 256).t() if transposed else weight_of(256, 384)
    _, unread = quantise(weight, SCHEMES[name], torch.float32)
    whole = bytearray(unread.nbytes)
    unread.read(memoryview(whole), 0)
    assert bytes(whole) == bits(unread.load()).numpy().tobytes()
    pieces = bytearray(unread.nbytes)
    for start in range(0, len(pieces), 1001):
        unread.read(memoryview(pieces)[start : start + 1001], start)
    assert pieces == whole


def test_memory_in_work_is_bounded_however_large_the_weight(monkeypatch):
    from torch.utils._python_dispatch import TorchDispatchMode

    monkeypatch.setattr(quantisation, "CHUNK_NBYTES", 1 << 16)
    made = {}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            if isinstance(found, torch.Tensor):
                storage = found.untyped_storage()
                made[storage.data_ptr()] = storage.nbytes()
            return found

    for name, settings in SCHEMES.items():
        weight, piece = torch.randn(2048, 1024), bytearray(1 << 14)
        with Counting():
            scale, unread = quantise(weight, settings, torch.float32)
            unread.read(memoryview(piece), 0)
        made.pop(weight.untyped_storage().data_ptr(), None)
        # Rows of one block are in work at least: 128 of them, of 4 KiB.
        assert max(made.values()) <= max(1 << 19, scale.nbytes), name
        made.clear()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nonfinite_weights_are_seen_in_the_scale_and_read_alike_each_time(value):
    weight = weight_of(64, 65)
    weight[3, 4] = value
    scale, unread = quantise(weight, compressed(), torch.bfloat16)
    assert torch.isfinite(scale).flatten().tolist() == [row != 3 for row in range(64)]
    pieces = bytearray(unread.nbytes)
    for start in range(0, len(pieces), 7):
        unread.read(memoryview(pieces)[start : start + 7], start)
    assert pieces == bits(unread.load()).numpy().tobytes()
