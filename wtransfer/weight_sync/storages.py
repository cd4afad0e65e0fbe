"""The tensors that a model consists of, tied parameters counted once."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from wtransfer.transport.tensors import PLAIN_TYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy.typing as npt
    from torch import nn


class Storages(NamedTuple):
    """The elements that names stand for. Only names that share memory have more than one tensor."""

    tensors: dict[str, torch.Tensor]
    """First name -> tensor: one entry of a schema each."""
    ties: dict[str, dict[str, torch.Tensor]]
    """First name -> further names (tied parameters) with their tensors, which may be others."""


def only_tensors(mapping: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a mapping, the objects themselves."""
    # Through a copy: the owner may put a tensor in while another thread asks.
    return {name: each for name, each in dict(mapping).items() if isinstance(each, torch.Tensor)}


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile`` and ``DistributedDataParallel``."""
    while True:
        inner = module.module if isinstance(module, DistributedDataParallel) else None
        inner = inner or getattr(module, "_orig_mod", None)
        if inner is None:
            return module
        module = inner


def group_storages(tensors: Mapping[str, torch.Tensor]) -> Storages:
    """Group names by the elements they stand for.

    Returns:
        One entry per storage, in the order of `tensors`.

    Cost: about 1 us per tensor.
    """
    memory = {name: memory_of(tensor) for name, tensor in tensors.items()}
    users = Counter(memory.values())
    found = Storages(dict(tensors), {})
    first_names: dict[object, str] = {}
    for name in [name for name, place in memory.items() if users[place] > 1]:
        tensor, place = tensors[name], memory[name]
        elements: object = place
        if not isinstance(place, _Alone):
            seen_as = tensor.dtype, tensor.is_conj(), tensor.is_neg()
            elements = (place, tensor.storage_offset(), tensor.shape, tensor.stride(), seen_as)
        first_name = first_names.setdefault(elements, name)
        if first_name != name:
            found.ties.setdefault(first_name, {})[name] = found.tensors.pop(name)
    return found


class _Alone(NamedTuple):
    """A tensor that shows no element, or has no memory in one piece."""

    identity: int


def memory_of(tensor: torch.Tensor) -> object:
    """Return where a tensor's storage begins, or the tensor's identity (lazy, sparse, wrapper)."""
    if type(tensor) not in PLAIN_TYPES and (is_lazy(tensor) or hasattr(tensor, "full_tensor")):
        return _Alone(id(tensor))
    if tensor.layout is not torch.strided or tensor.is_nested or not tensor.numel():
        return _Alone(id(tensor))
    begin = memory_address(tensor)
    if not begin:
        return _Alone(id(tensor))
    return begin if tensor.is_cpu else (tensor.device, begin)


def memory_address(tensor: torch.Tensor) -> int | None:
    """Return where a strided tensor's storage begins; None for one that only wraps others."""
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:
        return None


def shared_memory(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> tuple[str, str] | None:
    """Return the names of two tensors, one of each mapping, that overlap; None: there are none.

    Tensors overlap that are one object, or lie in one storage and have bytes in common between
    their first and last elements. Tensors without elements overlap none.

    Cost: about 2 us per tensor.
    """
    names = {id(tensor): name for name, tensor in one.items()}
    for name, tensor in other.items():
        # Also where another thread points the object to other memory right now.
        if id(tensor) in names and tensor.numel():
            return names[id(tensor)], name
    places = [{name: memory_of(each) for name, each in side.items()} for side in (one, other)]
    common = set(places[0].values()) & set(places[1].values())
    spans = sorted(
        (str(tensors[name].device), *span_of(tensors[name]), side, name)
        for side, tensors in enumerate((one, other))
        for name, place in places[side].items()
        if place in common and not isinstance(place, _Alone)
    )
    # Of each side: how far those reach that begin before.
    ends = [("", 0, ""), ("", 0, "")]
    for device, begin, end, side, name in spans:
        on, their_end, theirs = ends[1 - side]
        if on == device and begin < their_end:
            return (theirs, name) if side else (name, theirs)
        ends[side] = max(ends[side], (device, end, name))
    return None


def span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses at which a tensor's first element begins, and its last one ends."""
    begin = tensor.data_ptr()
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    dims = zip(tensor.shape, tensor.stride(), strict=True)
    num_spanned = 1 + sum((size - 1) * stride for size, stride in dims)
    return begin, begin + int(num_spanned) * tensor.itemsize


def covered_nbytes(tensors: Sequence[torch.Tensor]) -> int:
    """Return how many bytes of one memory tensors have, each byte once."""
    first = tensors[0]
    if len(tensors) == 1 and first.layout is torch.strided and first.is_contiguous():
        return first.nbytes
    return num_bytes(spans_of(tensors))


def spans_of(tensors: Sequence[torch.Tensor]) -> npt.NDArray[np.int64]:
    """Return the first byte, and the byte after the last, of each piece that tensors have.

    Args:
        tensors: Tensors of one memory.

    Returns:
        Rows that neither overlap nor touch, in order.

    Cost: for a tensor with gaps, 32 bytes and 100 ns per piece without one.
    """
    found = [np.empty((0, 2), np.int64)]
    for each in tensors:
        if each.layout is not torch.strided or each.is_nested or not each.numel():
            # Alone, as a whole.
            found.append(np.array([[0, each.numel() * each.itemsize]]))
            continue
        # The innermost dimensions that leave no gap are one span.
        dims = sorted(d for d in zip(each.stride(), each.shape, strict=True) if d[1] != 1)
        length, starts = 1, np.array([each.storage_offset()])
        while dims and dims[0][0] <= length:
            stride, size = dims.pop(0)
            length += stride * (size - 1)
        for stride, size in reversed(dims):
            starts = (starts[:, None] + stride * np.arange(size)).ravel()
        found.append(np.stack([starts, starts + length], axis=1) * each.itemsize)
    return merged(*found)


def merged(*spans: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return what spans cover together, as rows that neither overlap nor touch, in order."""
    rows = np.concatenate(spans)
    # Stable: mostly in order already.
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    ends = np.maximum.accumulate(rows[:, 1])
    is_first = np.ones(len(rows), bool)
    is_first[1:] = rows[1:, 0] > ends[:-1]
    return np.stack([rows[is_first, 0], ends[np.roll(is_first, -1)]], axis=1)


def num_bytes(spans: npt.NDArray[np.int64]) -> int:
    """Return how many bytes spans of `merged` have."""
    return int((spans[:, 1] - spans[:, 0]).sum())


def stands_alone(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is the whole of a private piece of CPU memory, in element order.

    Only such a tensor may be pointed elsewhere, or pointed to: of any other, a further tensor or
    another process may hold a part, which would be left behind or written along.
    """
    if not tensor.is_cpu or not tensor.is_contiguous():
        return False
    # A tensor made in inference mode that points to other memory is broken: even `repr` fails.
    if tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
        return False
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.nbytes and not storage.is_shared()


def num_holders(tensor: torch.Tensor) -> int | None:
    """Return how many tensors use a tensor's storage: itself, its views, the tensors tied to it.

    Every tensor of this process counts, wherever it is held: by an attribute, a list, a
    closure, a numpy array, a graph of autograd. None: this torch cannot tell (2.6 and 2.7 without
    CUDA).

    Cost: about 0.5 us.
    """
    if _use_count is None:
        return None
    storage = tensor.untyped_storage()
    # Without the object made above.
    return _use_count(storage._cdata) - 1  # noqa: SLF001


_use_count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)  # noqa: SLF001
