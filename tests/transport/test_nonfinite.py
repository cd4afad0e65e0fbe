import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from wtransfer.transport import nonfinite
from wtransfer.transport.nonfinite import count_nonfinite, counter

IEEE = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
FP8 = [
    name
    for name in (
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e4m3fnuz",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
    )
    if hasattr(torch, name)
]
INTEGERS = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]


def expected_count(tensor):
    """What torch says, which has never heard of our encodings."""
    wide = tensor.float() if tensor.itemsize == 1 else tensor
    return int((~torch.isfinite(wide)).sum())


@pytest.mark.parametrize("name", FP8)
def test_every_8_bit_pattern_alone(name):
    count = counter(getattr(torch, name))
    for pattern in range(256):
        data = np.array([pattern], dtype=np.uint8)
        tensor = torch.from_numpy(data).view(getattr(torch, name))
        assert count(data) == expected_count(tensor), hex(pattern)


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_every_16_bit_pattern_alone(name):
    count = counter(getattr(torch, name))
    data = np.arange(2**16, dtype=np.uint16)
    expected = ~torch.isfinite(torch.from_numpy(data).view(getattr(torch, name)))
    found = [count(data[i : i + 1].view(np.uint8)) for i in range(2**16)]
    assert found == expected.int().tolist()


@pytest.mark.parametrize("name", IEEE + FP8)
@given(data=st.data())
@settings(deadline=None, max_examples=40)
def test_any_bytes_are_counted_exactly(name, data):
    dtype = getattr(torch, name)
    num = data.draw(st.integers(0, 9))
    raw = data.draw(st.binary(min_size=num * dtype.itemsize, max_size=num * dtype.itemsize))
    # Random exponents are rarely all ones: plant some.
    planted = bytearray(raw)
    for at in data.draw(st.sets(st.integers(0, max(0, len(raw) - 1)), max_size=3)):
        planted[at : at + 2] = b"\xf0\x7f"[: len(planted) - at]
    tensor = torch.tensor(list(planted), dtype=torch.uint8).view(dtype)
    assert count_nonfinite(tensor) == expected_count(tensor)


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), -float("nan")])
@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_one_bad_value_among_the_extremes_is_found(name, value):
    dtype = getattr(torch, name)
    limits = torch.finfo(dtype)
    tensor = torch.tensor([limits.max, limits.min, limits.tiny, -0.0, 0.0] * 3, dtype=dtype)
    assert count_nonfinite(tensor) == 0
    tensor[7] = value
    assert count_nonfinite(tensor) == 1


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_have_none(dtype):
    assert counter(dtype) is None
    assert count_nonfinite(torch.full((4,), -1).to(dtype)) == 0


def test_strided_and_large_tensors_are_counted_whole():
    tensor = torch.zeros(400, 1000)
    tensor[0, 0] = tensor[399, 999] = tensor[200, 3] = float("inf")
    assert count_nonfinite(tensor.T) == 3
    assert tensor.nbytes > 2 * nonfinite._PART_NBYTES


@pytest.mark.parametrize("name", IEEE + FP8)
def test_the_way_taken_on_devices_counts_the_same(name):
    data = torch.arange(16 * 256, dtype=torch.int32).mul_(7).to(torch.uint8)
    tensor = data.view(getattr(torch, name))
    assert nonfinite._count_on_device(tensor) == count_nonfinite(tensor)
