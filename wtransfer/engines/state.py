"""The tensors that a module consists of, with tied storage counted once."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    """Whether another entry shares a part of its memory (one view of a flat buffer, say)."""


def module_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> parameter or persistent buffer, the objects themselves.

    Wrappers that only rename (``torch.compile``, ``DistributedDataParallel``) are taken off, so
    that trainer and worker agree on names whichever of them is wrapped.
    """
    state = unwrap(module).state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside ``torch.compile`` and ``DistributedDataParallel``."""
    while True:
        inner = module.module if isinstance(module, DistributedDataParallel) else None
        inner = inner or getattr(module, "_orig_mod", None)
        if inner is None:
            return module
        module = inner


def group_storages(tensors: Mapping[str, torch.Tensor]) -> dict[str, Storage]:
    """Group names by the elements they stand for.

    Returns:
        First name -> entry, in the order of `tensors`.
    """
    memory = {name: _memory(tensor) for name, tensor in tensors.items()}
    names: dict[object, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(_elements(tensor, memory[name]), []).append(name)
    users = Counter(memory[group[0]] for group in names.values())
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
    # Sharded and empty tensors have no address that would identify them.
    if hasattr(tensor, "full_tensor") or tensor.numel() == 0 or tensor.is_meta:
        return id(tensor)
    return (tensor.device, tensor.untyped_storage().data_ptr())


def _elements(tensor: torch.Tensor, memory: object) -> object:
    if isinstance(memory, int):
        return memory
    return (memory, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
