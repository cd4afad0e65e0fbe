import gc
import mmap
import weakref

import numpy as np
import pytest
import torch

from wtransfer.errors import ManifestError, SourceError, TruncatedError
from wtransfer.manifest import DTYPES
from wtransfer.transport.tensors import (
    are_in_host_memory,
    are_plain,
    byte_view,
    dtype_name,
    flat_memory,
    have_forms,
    host_forms,
    own_memory,
    plain,
    tensor_from,
    tensors_at,
    torch_dtype,
    torch_dtypes,
)

NAMES = [name for name in DTYPES if hasattr(torch, name)]


def random_bytes(name, nbytes):
    data = np.random.default_rng(7).integers(0, 256, nbytes, dtype=np.uint8)
    return data % 2 if name == "bool" else data


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
def test_bytes_become_a_tensor_and_the_same_bytes_again(name, shape):
    nbytes = int(np.prod(shape)) * DTYPES[name]
    data = random_bytes(name, nbytes)
    buffer = bytearray(b"\xaa" * 16 + data.tobytes() + b"\xaa" * 16)
    tensor = tensor_from(buffer, 16, name, shape)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch_dtype(name), shape)
    view = byte_view(tensor)
    assert (view.dtype, view.shape) == (np.uint8, (nbytes,))
    assert view.tobytes() == data.tobytes()


def test_a_byte_view_is_the_tensors_own_memory():
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    byte_view(parameter)[:4] = np.frombuffer(np.float32(1.5).tobytes(), np.uint8)
    assert parameter[0, 0] == 1.5
    tensor = torch.zeros(4)
    view = byte_view(tensor)
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
    ("offset", "shape"),
    [(-1, (1,)), (64, (1,)), (61, (1,)), (0, (17,)), (2**70, (1,)), (0, (2**62, 4))],
)
def test_a_tensor_beyond_its_buffer_is_refused(offset, shape):
    with pytest.raises(TruncatedError, match="does not lie within 64 bytes"):
        tensor_from(bytearray(64), offset, "float32", shape)


@pytest.mark.parametrize("shape", [(-1,), (4, -1), (-2, -2)])
def test_negative_dimensions_never_mean_all_the_rest(shape):
    with pytest.raises(ManifestError, match="negative dimension"):
        tensor_from(bytearray(64), 0, "float32", shape)


def test_a_mapping_lives_as_long_as_its_last_tensor():
    mapping = mmap.mmap(-1, 4096)
    gone = weakref.ref(mapping)
    tensor = tensor_from(mapping, 0, "uint8", (16,))
    part = tensor[3:5]
    del mapping, tensor
    gc.collect()
    assert gone() is not None
    part += 1
    del part
    gc.collect()
    assert gone() is None


# -- many at once


def freed():
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


def cut():
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(12)
    return tensor


GOOD = (torch.zeros(2, 3), torch.nn.Parameter(torch.ones(4)), torch.tensor(3), torch.empty(0, 2))
ODD = {
    "strided": lambda: torch.zeros(3, 2).t(),
    "conj": lambda: torch.zeros(2, dtype=torch.complex64).conj(),
    "negative": lambda: torch._neg_view(torch.zeros(4)),
    "meta": lambda: torch.zeros(4, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "subclass": lambda: torch.zeros(4).as_subclass(type("Own", (torch.Tensor,), {})),
    "freed": freed,
    "cut": cut,
    "none": lambda: None,
}


def sizes(tensors):
    return [each.nbytes for each in tensors]


def forms(tensors):
    """Return dtypes and shapes as they are, as of tensors in host memory."""
    named = [getattr(each, "dtype", torch.float32) for each in tensors]
    return host_forms(named, [tuple(getattr(each, "shape", (4,))) for each in tensors])


def test_where_many_tensors_lie_is_what_each_says():
    found = flat_memory(GOOD, forms(GOOD), sizes(GOOD))
    assert found.addresses == [each.data_ptr() for each in GOOD]
    assert flat_memory([], [], []) == ([], [], [])


def test_memory_that_is_flat_stays_whatever_is_done_to_its_tensor():
    tensor = torch.arange(1 << 20)
    before = tensor.data_ptr()
    found = flat_memory([tensor], forms([tensor]), sizes([tensor]))
    tensor.data = torch.zeros(1 << 20, dtype=torch.int64)
    again = torch.empty(0, dtype=torch.int64).set_(found.storages[0])
    assert found.addresses == [before]
    assert again.data_ptr() == before
    assert again.equal(torch.arange(1 << 20))


@pytest.mark.parametrize("kind", ODD)
def test_one_odd_tensor_among_many_is_not_overlooked(kind):
    odd = ODD[kind]()
    tensors, nbytes = [*GOOD, odd], [*sizes(GOOD), 16]
    assert flat_memory(tensors, forms(tensors), nbytes) is None
    assert flat_memory(tensors[::-1], forms(tensors)[::-1], nbytes[::-1]) is None


@pytest.mark.parametrize(
    "form", [(torch.float64, (3,)), (torch.int32, (4,)), (torch.float32, (2, 2))]
)
def test_one_tensor_in_another_form_is_not_overlooked(form):
    tensors, expected = [*GOOD, torch.zeros(4)], [*forms(GOOD), *host_forms([form[0]], [form[1]])]
    assert not have_forms(tensors, expected)
    assert flat_memory(tensors, expected, [*sizes(GOOD), 16]) is None
    assert have_forms(tensors, forms(tensors))


def test_parts_of_a_buffer_lie_where_they_begin():
    buffer = torch.zeros(8)
    parts = [buffer[4:], buffer[:4]]
    found = flat_memory(parts, forms(parts), [16, 16])
    assert found.addresses == [buffer.data_ptr() + 16, buffer.data_ptr()]


@pytest.mark.parametrize("nbytes", [0, 16, 31])
def test_memory_that_was_cut_is_not_there(nbytes):
    buffer = torch.zeros(8)
    parts = [buffer[:4], buffer[4:]]
    found = flat_memory(parts, forms(parts), [16, 16])
    assert found.is_there([16, 16])
    assert found.part(slice(1, 2)).is_there([16])
    buffer.untyped_storage().resize_(nbytes)
    assert not found.is_there([16, 16])
    assert not found.part(slice(1, 2)).is_there([16])
    assert flat_memory(parts, forms(parts), [16, 16]) is None


def test_memory_that_ends_before_a_tensor_does_is_not_there():
    buffer = torch.zeros(8)
    parts = [buffer[:4], buffer[4:]]
    found = flat_memory(parts, forms(parts), [16, 16])
    # As if it had been cut where it is.
    assert not found.is_there([16, 17])


def test_memory_that_was_taken_anew_is_not_there():
    tensor = torch.zeros(4)
    found = flat_memory([tensor], forms([tensor]), [16])
    tensor.untyped_storage().resize_(1 << 22)
    assert tensor.data_ptr() != found.addresses[0]
    assert not found.is_there([16])


def test_kinds_of_tensors_are_told_apart():
    assert are_plain(GOOD)
    assert are_in_host_memory(GOOD)
    assert not are_plain([*GOOD, ODD["subclass"]()])
    for kind in ("subclass", "meta", "sparse"):
        assert not are_in_host_memory([*GOOD, ODD[kind]()])


def test_names_of_dtypes_are_looked_up_together():
    assert torch_dtypes(["float32", "load", "int8"]) == [torch.float32, None, torch.int8]


def test_tensors_at_places_are_those_that_lie_there():
    memory = np.arange(64, dtype=np.uint8)
    rows = [(0, "uint8", (3,)), (8, "int16", (2, 2)), (16, "uint8", ()), (20, "int32", (0, 2))]
    starts, names, shapes = zip(*rows, strict=True)
    numels = [int(np.prod(shape)) for shape in shapes]
    found = list(tensors_at(memory, starts, map(torch_dtype, names), shapes, numels))
    expected = [tensor_from(memory, start, name, shape) for start, name, shape in rows]
    assert [(x.dtype, x.shape, x.tolist()) for x in found] == [
        (x.dtype, x.shape, x.tolist()) for x in expected
    ]


@pytest.mark.parametrize("nbytes", [1, 64, 5_000, 1 << 20, (1 << 25) + 3])
def test_own_memory_begins_where_tensors_do_and_can_be_written(nbytes):
    memory = own_memory(nbytes)
    assert memory.ctypes.data % 64 == 0
    assert (memory.shape, memory.dtype, memory.flags.writeable) == ((nbytes,), np.uint8, True)


def test_own_memory_is_the_hosts_wherever_tensors_are_made():
    with torch.device("meta"):
        assert own_memory(64).nbytes == 64
