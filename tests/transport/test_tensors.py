import numpy as np
import pytest
import torch

from wtransfer.dtypes import DTYPES
from wtransfer.errors import ManifestError, SourceError
from wtransfer.transport.tensors import (
    byte_view,
    dtype_name,
    flat_address,
    lacks_memory,
    own_memory,
    plain,
    torch_dtype,
)

NAMES = [name for name in DTYPES if hasattr(torch, name)]


@pytest.mark.parametrize("name", NAMES)
def test_a_dtype_is_its_name_and_back(name):
    dtype = torch_dtype(name)
    assert dtype_name(dtype) == name
    assert dtype.itemsize == DTYPES[name]


@pytest.mark.parametrize("name", ["load", "__class__", "Tensor", "float", "half", "", "x" * 2**20])
def test_a_name_outside_the_table_is_refused_in_a_short_sentence(name):
    with pytest.raises(ManifestError, match=r"cannot be used here: no such dtype; there are bool,"):
        torch_dtype(name)
    with pytest.raises(ManifestError) as caught:
        torch_dtype(name)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("dtype", [torch.complex32, torch.qint8])
def test_a_dtype_that_does_not_travel_is_refused_by_name(dtype):
    with pytest.raises(ManifestError, match=str(dtype)):
        dtype_name(dtype)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (2, 3, 4)])
@pytest.mark.parametrize("name", NAMES)
def test_a_byte_view_is_the_memory_of_a_tensor_of_any_dtype_and_shape(name, shape):
    # Torch cannot fill every dtype.
    zeros = torch.zeros(shape, dtype=torch.uint8 if "_x2" in name else torch_dtype(name))
    tensor = torch.nn.Parameter(zeros.view(torch_dtype(name)), requires_grad=False)
    view = byte_view(tensor)
    assert (view.dtype, view.shape) == (np.uint8, (tensor.nbytes,))
    if tensor.nbytes:
        assert view.ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4).T,
        torch.zeros(8)[::2],
        torch.zeros(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(2, dtype=torch.complex64).conj().imag,
    ],
    ids=["transposed", "strided", "meta", "sparse", "conjugated", "negated"],
)
def test_memory_that_cannot_be_viewed_is_refused(tensor):
    with pytest.raises(SourceError, match=r"has no byte view; pass"):
        byte_view(tensor)


def test_plain_makes_pending_and_strided_tensors_viewable():
    tensor = torch.tensor([[1 + 2j, 3 - 4j]]).conj().T
    expected = np.array([1 - 2j, 3 + 4j], dtype=np.complex64)
    assert byte_view(plain(tensor)).tobytes() == expected.tobytes()
    assert plain(expected := torch.zeros(3)).data_ptr() == expected.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 2).t(),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch._neg_view(torch.zeros(4)),
        torch.zeros(4, device="meta"),
        torch.eye(3).to_sparse(),
        torch.zeros(4).as_subclass(type("Own", (torch.Tensor,), {})),
        torch.empty(0, 2),
        torch.zeros(4)[:0],
    ],
    ids=["strided", "conj", "negative", "meta", "sparse", "subclass", "empty", "empty view"],
)
def test_only_bytes_in_c_order_in_host_memory_have_an_address(tensor):
    assert flat_address(tensor) is None


def test_address_of_bytes_in_c_order_is_that_of_the_first():
    buffer = torch.nn.Parameter(torch.zeros(2, 4))
    assert flat_address(buffer) == buffer.data_ptr()
    assert flat_address(buffer.detach()[1]) == buffer.data_ptr() + 16
    assert flat_address(torch.tensor(3)) is not None


@pytest.mark.parametrize("part", [lambda t: t, lambda t: t.t(), lambda t: t[1:]])
@pytest.mark.parametrize("nbytes", [0, 12, 31])
def test_tensor_lacks_memory_once_its_storage_was_freed_or_cut(nbytes, part):
    tensor = part(torch.zeros(2, 4))
    before = lacks_memory(tensor)
    tensor.untyped_storage().resize_(nbytes)
    # Not within the assert: to show what has failed, pytest would read past the end.
    after = lacks_memory(tensor)
    assert (before, after) == (False, True)


def test_tensors_without_elements_or_memory_of_their_own_lack_none():
    for tensor in (torch.empty(0), torch.zeros(4, device="meta"), torch.eye(3).to_sparse()):
        assert not lacks_memory(tensor)


@pytest.mark.parametrize("nbytes", [1, 64, 5_000, 1 << 20, (1 << 25) + 3])
def test_own_memory_begins_where_tensors_do_and_can_be_written(nbytes):
    memory = own_memory(nbytes)
    assert memory.ctypes.data % 64 == 0
    assert (memory.shape, memory.dtype, memory.flags.writeable) == ((nbytes,), np.uint8, True)


def test_own_memory_is_the_hosts_wherever_tensors_are_made():
    with torch.device("meta"):
        assert own_memory(64).nbytes == 64
