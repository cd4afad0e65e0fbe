"""Weights put into the form of a quantised checkpoint: what the libraries of that form write."""

import pytest
import torch
from wtransfer.checkpoint.quantisation import QuantisedTensor, scales_of, scheme_of
from wtransfer.weights import ParamMeta

WEIGHTS = {
    "int8 rows": {"type": "int", "strategy": "channel"},
    "int8 one": {"type": "int", "strategy": "tensor"},
    "int8 groups": {"type": "int", "strategy": "group", "group_size": 32},
    "fp8 rows": {"type": "float", "strategy": "channel"},
    "fp8 one": {"type": "float", "strategy": "tensor"},
    "fp8 blocks": {"type": "float", "strategy": "block", "block_structure": [128, 128]},
}


def weight_of(rows, columns, dtype):
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator)
    weight *= torch.logspace(-6, 3, rows)[:, None]
    weight[1] = 0.0
    return weight.to(dtype)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("dtypes", ["bfloat16 bfloat16", "float32 float32", "bfloat16 float32"])
@pytest.mark.parametrize("case", WEIGHTS)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_weights_are_what_compressed_tensors_makes_of_them(case, dtypes):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    dtype, scale_dtype = (getattr(torch, each) for each in dtypes.split())
    weight, settings = weight_of(256, 384, dtype), WEIGHTS[case] | {"num_bits": 8}
    args = QuantizationArgs(**settings)
    group = {"weights": settings, "format": "naive-quantized"}
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    scheme = scheme_of(config)
    height, width = scheme.block_of(weight.shape)
    blocks = weight.to(scale_dtype).reshape(256 // height, height, 384 // width, width)
    wanted, zero = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), args)
    if case.endswith("one"):
        wanted, zero = wanted.reshape(1), zero.reshape(1)
    scale = scales_of(weight, scheme, ParamMeta("scale", scale_dtype, tuple(wanted.shape)))
    assert torch.equal(scale, wanted)
    made = quantize(weight, wanted, zero, args, dtype=args.pytorch_dtype())
    assert torch.equal(bits(QuantisedTensor(weight, scale, scheme).load()), bits(made))
