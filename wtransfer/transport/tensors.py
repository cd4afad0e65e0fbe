"""Tensors as bytes and bytes as tensors, without copying either way.

The wire knows dtypes by name. Names are looked up in a table that is built here, once, from
`wtransfer.manifest.DTYPES`; a peer's word never reaches ``getattr``.
"""

from __future__ import annotations

import itertools
import math
import operator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from wtransfer.errors import ManifestError, SourceError, TruncatedError
from wtransfer.manifest import DTYPES

if TYPE_CHECKING:
    import mmap
    from collections.abc import Collection, Iterable, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    ByteArray: TypeAlias = npt.NDArray[np.uint8]
    """One-dimensional uint8 array."""
    WritableBuffer: TypeAlias = bytearray | memoryview | mmap.mmap | ByteArray
    """What `tensor_from` may point a tensor into."""

# Older torch releases lack some of the dtypes; those cannot arrive there, and are refused by name.
_BY_NAME: dict[str, torch.dtype] = {
    name: dtype for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
_BY_DTYPE: dict[torch.dtype, str] = {dtype: name for name, dtype in _BY_NAME.items()}

PLAIN_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of which torch's own answers hold; a subclass may change any of them."""
PART = 512
"""Tensors looked at together: so few that they stay in the cache from one question to the next."""

_is_cpu, _layout = operator.attrgetter("is_cpu"), operator.attrgetter("layout")
# All in one look: of thousands of tensors each is fetched from memory for it but once.
_form = operator.attrgetter("is_cpu", "layout", "dtype", "shape")


def are_plain(tensors: Collection[torch.Tensor]) -> bool:
    """Whether all are of torch's own types."""
    return all(map(PLAIN_TYPES.__contains__, map(type, tensors)))


def are_in_host_memory(tensors: Collection[torch.Tensor]) -> bool:
    """Whether all are of torch's own types, in host memory, with strides.

    Cost: about 0.1 us per tensor, while they are not many more than a `PART`: each question is put
    to all of them by one loop in C.
    """
    return (
        are_plain(tensors)
        and all(map(_is_cpu, tensors))
        and all(map(operator.is_, map(_layout, tensors), itertools.repeat(torch.strided)))
    )


def own_memory(nbytes: int) -> ByteArray:
    """Return memory of this process that begins as the memory of tensors does, at a whole line.

    numpy's own begins 16 bytes into one. Copying pieces of a tensor to there takes ten times as
    long on some processors (AMD's of the third generation, for one).
    """
    memory: ByteArray = torch.empty(nbytes, dtype=torch.uint8, device="cpu").numpy()
    return memory


def host_forms(
    dtypes: Iterable[torch.dtype], shapes: Iterable[tuple[int, ...]]
) -> list[tuple[object, ...]]:
    """Return the forms of tensors in host memory, with strides, for `have_forms`."""
    fixed = itertools.repeat(True), itertools.repeat(torch.strided)
    return list(zip(*fixed, dtypes, shapes, strict=False))


def have_forms(tensors: Collection[torch.Tensor], forms: list[tuple[object, ...]]) -> bool:
    """Whether all are of torch's own types, and each has its form.

    Cost: about 0.3 us per tensor, most of it to fetch the tensor itself.
    """
    return are_plain(tensors) and list(map(_form, tensors)) == forms


def _any_complex(forms: list[tuple[object, ...]]) -> bool:
    dtypes = {dtype for _, _, dtype, _ in forms}
    return any(dtype.is_complex for dtype in dtypes if isinstance(dtype, torch.dtype))


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of a wire name.

    Args:
        name: Key of `wtransfer.manifest.DTYPES`.

    Raises:
        ManifestError: The name is not in the table, or this torch lacks the dtype.
    """
    dtype = _BY_NAME.get(name)
    if dtype is None:
        reason = f"torch {torch.__version__} lacks it" if name in DTYPES else "no such dtype"
        raise ManifestError(
            f"dtype {name[:80]!r} cannot be used here: {reason}; there are {', '.join(_BY_NAME)}"
        )
    return dtype


def torch_dtypes(names: Iterable[str]) -> list[torch.dtype | None]:
    """Return the torch dtype of each wire name, None for one that cannot be used here."""
    return list(map(_BY_NAME.get, names))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the wire name of a torch dtype.

    Raises:
        ManifestError: The dtype does not travel (quantised or sub-byte ones, ``complex32``).
    """
    name = _BY_DTYPE.get(dtype)
    if name is None:
        raise ManifestError(
            f"tensors of {dtype} cannot be sent; the dtypes that can are {', '.join(_BY_NAME)}"
        )
    return name


def lacks_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor's storage ends before its last element: reading it would read on.

    Cost: about 0.5 us.
    """
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.numel() == 0:
        return False
    if type(tensor) not in PLAIN_TYPES and hasattr(tensor, "full_tensor"):
        return False
    end = tensor.storage_offset() + _reach(tensor)
    return end * tensor.itemsize > tensor.untyped_storage().nbytes()


def _reach(tensor: torch.Tensor) -> int:
    """Return the elements from the first one to behind the last one, gaps included."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor detached, contiguous and without pending operations, on its device.

    A tensor with a pending conjugation or negation holds other bytes than its values.

    Cost: nothing for a contiguous tensor, else one copy of it.
    """
    is_plain = type(tensor) in PLAIN_TYPES and tensor.layout is torch.strided
    if is_plain and tensor.dtype is torch.bool:
        # As bytes: torch makes 1 of every byte but 0.
        return tensor.detach().view(torch.uint8).contiguous().view(torch.bool)
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def lies_flat(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes lie one after the other in host memory, from ``data_ptr()`` on.

    Cost: about 0.4 us.
    """
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.data_ptr() != 0
    )


class FlatMemory(NamedTuple):
    """Where the bytes of tensors lie, one after the other within each."""

    addresses: list[int]
    """First byte of each; says nothing of one that is empty."""
    begins: list[int]
    """First byte of each one's storage."""
    storages: list[torch.UntypedStorage]
    """Keep the memory when their tensors are gone; but anybody may have them take another."""

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> FlatMemory:
        """Return where tensors in host memory begin, with strides or without."""
        storages = list(map(torch.Tensor.untyped_storage, tensors))
        begins = list(map(torch.UntypedStorage.data_ptr, storages))
        return cls(list(map(torch.Tensor.data_ptr, tensors)), begins, storages)

    def extend(self, more: FlatMemory) -> None:
        """Add what is known of further tensors."""
        self.addresses.extend(more.addresses)
        self.begins.extend(more.begins)
        self.storages.extend(more.storages)

    def part(self, own: slice) -> FlatMemory:
        """Return what is known of the tensors with these numbers."""
        return FlatMemory(self.addresses[own], self.begins[own], self.storages[own])

    def is_there(self, sizes: Sequence[int]) -> bool:
        """Whether all storages are where they were, and have so many bytes for each tensor.

        Cost: about 0.2 us per tensor.
        """
        now = list(map(torch.UntypedStorage.data_ptr, self.storages))
        return now == self.begins and self.is_whole(sizes)

    def is_whole(self, sizes: Sequence[int]) -> bool:
        """Whether the storages, if they are where they were, have so many bytes for each tensor."""
        ends = map(operator.add, self.begins, map(torch.UntypedStorage.nbytes, self.storages))
        return all(map(operator.le, map(operator.add, self.addresses, sizes), ends))


def flat_memory(
    tensors: Sequence[torch.Tensor], forms: list[tuple[object, ...]], sizes: Sequence[int]
) -> FlatMemory | None:
    """Return where each tensor's bytes lie; None unless every one lies flat, with all its memory.

    What `lies_flat` and `lacks_memory` say of one tensor, for hundreds at once.

    Args:
        tensors: Any.
        forms: Of `host_forms`; None is returned as well if one has another.
        sizes: Bytes of each, by its form.

    Cost: about 0.8 us per tensor.
    """
    if not are_flat(tensors, forms):
        return None
    found = FlatMemory.of(tensors)
    return found if found.is_whole(sizes) else None


def are_flat(tensors: Sequence[torch.Tensor], forms: list[tuple[object, ...]]) -> bool:
    """Whether each tensor has its form (`have_forms`), and its values are its bytes, in a row.

    Cost: about 0.5 us per tensor.
    """
    own = torch.Tensor
    return (
        have_forms(tensors, forms)
        and all(map(own.is_contiguous, tensors))
        and not any(map(own.is_neg, tensors))
        and not (_any_complex(forms) and any(map(own.is_conj, tensors)))
    )


def byte_view(tensor: torch.Tensor) -> ByteArray:
    """Return a tensor's memory as bytes, without a copy.

    Args:
        tensor: Dense, contiguous, on the CPU; any dtype, any rank, also empty.

    Returns:
        uint8 array of shape ``(tensor.nbytes,)`` that shares and keeps alive the memory.

    Raises:
        SourceError: The tensor's memory cannot be viewed (strided, sparse, on a device, meta).

    Cost: about 2.5 us, whatever the size.
    """
    try:
        view: ByteArray = tensor.detach().view(-1).view(torch.uint8).numpy()
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise SourceError(
            f"a tensor of {tensor.dtype}, shape {tuple(tensor.shape)}, layout {tensor.layout} on "
            f"device {tensor.device} has no byte view; pass `plain(tensor.cpu())`"
        ) from error
    return view


def tensor_from(
    buffer: WritableBuffer, offset: int, dtype_name: str, shape: Sequence[int]
) -> torch.Tensor:
    """Return a tensor that lies in a buffer, without a copy.

    The tensor keeps the buffer *object* alive but not exported: ``mmap.close()`` would pull the
    memory from under it. Let go of such a mapping instead; it goes when its last tensor goes.

    Args:
        buffer: Writable and contiguous.
        offset: First byte.
        dtype_name: Wire name.
        shape: Dimensions.

    Raises:
        ManifestError: Unknown dtype or a negative dimension.
        TruncatedError: The tensor does not lie within the buffer.

    Cost: about 1 us, and 1.5 us more where it has another number of dimensions than one.
    """
    dtype = torch_dtype(dtype_name)
    # -1 is "all the rest" to frombuffer and to view; here it is only ever a mistake.
    if shape and min(shape) < 0:
        raise ManifestError(f"shape {tuple(shape)} has a negative dimension")
    numel = math.prod(shape)
    if numel == 0:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    try:
        flat = torch.frombuffer(buffer, dtype=dtype, count=numel, offset=offset)
        return flat if len(shape) == 1 else flat.view(tuple(shape))
    except (ValueError, OverflowError, TypeError) as error:
        raise TruncatedError(
            f"a {dtype_name} tensor of shape {tuple(shape)} at byte {offset} does not lie within "
            f"{len(buffer)} bytes"
        ) from error


def tensors_at(
    memory: ByteArray,
    starts: Iterable[int],
    dtypes: Iterable[torch.dtype],
    shapes: Iterable[tuple[int, ...]],
    numels: Iterable[int],
) -> Iterator[torch.Tensor]:
    """Yield tensors that lie in a piece of memory: what `tensor_from` does, many times.

    Args:
        memory: Where; each tensor keeps it alive.
        starts: First byte of each, which lies within the memory.
        dtypes: Dtypes.
        shapes: Dimensions.
        numels: Numbers of elements.

    Cost: about 0.7 us each, and 1 us more where it has another number of dimensions than one.
    """
    place = torch.frombuffer
    for start, dtype, shape, numel in zip(starts, dtypes, shapes, numels, strict=True):
        if numel == 0:
            yield torch.empty(shape, dtype=dtype, device="cpu")
            continue
        flat = place(memory, dtype=dtype, count=numel, offset=start)
        yield flat if len(shape) == 1 else flat.view(shape)
