"""The tensors that a module consists of, with tied storage counted once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import nn


@dataclass(frozen=True)
class Storage:
    """All tensors that are views of the same elements: one entry of a schema."""

    name: str
    """First name."""
    tensors: tuple[torch.Tensor, ...]
    """The distinct tensor objects, first name first."""
    aliases: tuple[str, ...]
    """Further names."""
    overlaps: bool
    """Whether another entry, or a tensor beside them, shares a part of its memory (one view of a
    flat buffer, say)."""


def module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> parameter or persistent buffer, the objects themselves.

    Wrappers that only rename (``torch.compile``, ``DistributedDataParallel``) are taken off, so
    that trainer and worker agree on names whichever of them is wrapped.
    """
    state = unwrap(module).state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def unnamed_tensors(module: nn.Module) -> list[torch.Tensor]:
    """Return what a module computes with but does not name in its state.

    These are non-persistent buffers, and tensors that are mere attributes.
    """
    named = {id(tensor) for tensor in module_tensors(module).values()}
    return [
        each
        for part in unwrap(module).modules()
        for each in (
            *part.parameters(recurse=False),
            *part.buffers(recurse=False),
            *_attributes(part),
        )
        if id(each) not in named
    ]


def _attributes(module: nn.Module) -> list[torch.Tensor]:
    return [each for each in vars(module).values() if isinstance(each, torch.Tensor)]


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile`` and ``DistributedDataParallel``."""
    while True:
        inner = module.module if isinstance(module, DistributedDataParallel) else None
        inner = inner or getattr(module, "_orig_mod", None)
        if inner is None:
            return module
        module = inner


def group_storages(
    tensors: Mapping[str, torch.Tensor], beside: Iterable[torch.Tensor] = ()
) -> dict[str, Storage]:
    """Group names by the elements they stand for.

    Args:
        tensors: Name -> tensor.
        beside: Tensors without a name; entries that share memory with one of them overlap.

    Returns:
        First name -> entry, in the order of `tensors`.
    """
    memory = {name: _memory(tensor) for name, tensor in tensors.items()}
    names: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(_elements(tensor, memory[name]), []).append(name)
    users = Counter(memory[group[0]] for group in names.values())
    users.update({_memory(tensor) for tensor in beside})
    return {
        group[0]: Storage(
            name=group[0],
            tensors=tuple({id(tensors[name]): tensors[name] for name in group}.values()),
            aliases=tuple(group[1:]),
            overlaps=users[memory[group[0]]] > 1,
        )
        for group in names.values()
    }


def _memory(tensor: torch.Tensor) -> object:
    # These have no memory yet, or none in one piece; empty ones no address that identifies them.
    if is_lazy(tensor) or tensor.layout is not torch.strided or tensor.is_meta:
        return id(tensor)
    if hasattr(tensor, "full_tensor") or tensor.numel() == 0:
        return id(tensor)
    return (tensor.device, tensor.untyped_storage().data_ptr())


def _elements(tensor: torch.Tensor, memory: object) -> object:
    if isinstance(memory, int):
        return memory
    return (memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)


def stands_alone(tensor: torch.Tensor) -> bool:
    """Whether a tensor is the whole of a private piece of CPU memory, element after element.

    Only such a tensor may be pointed elsewhere, or pointed to: of any other, a further tensor or
    another process may hold a part, which would be left behind or written along.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        return False
    # One made in inference mode that points to other memory is broken: even `repr` fails.
    if tensor.is_conj() or tensor.is_neg() or tensor.is_inference():
        return False
    storage = tensor.untyped_storage()
    return storage.nbytes() == tensor.nbytes and not storage.is_shared()
