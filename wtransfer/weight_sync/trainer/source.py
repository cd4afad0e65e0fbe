"""Sources of a trainer's weights: a module, or a state dict."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from wtransfer.transport.tensors import PLAIN_TYPES
from wtransfer.weight_sync.storages import group_storages, module_tensors, only_tensors
from wtransfer.weights import ParamMeta, WeightSource

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import nn


class StateDictSource:
    """A mapping of names to tensors, read anew in every round.

    Args:
        tensors: Name -> tensor. Names of the same storage are sent once, under the first name.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._mapping = tensors

    def _tensors(self) -> dict[str, torch.Tensor]:
        return only_tensors(self._mapping)

    @property
    def metadata(self) -> Sequence[ParamMeta]:
        """Name, dtype and whole shape of every tensor; of a DTensor also its sharding."""
        return [
            ParamMeta(name, tensor.dtype, tuple(tensor.shape), *_sharding(tensor))
            for name, tensor in group_storages(self._tensors()).tensors.items()
        ]

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield whole tensors, the trainer's own or gathered ones.

        A sharded tensor is gathered, which every rank must take part in.
        """
        for name, tensor in group_storages(self._tensors()).tensors.items():
            gather = getattr(tensor, "full_tensor", None)
            yield name, gather() if gather else tensor

    def iter_local(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's parts."""
        for name, tensor in group_storages(self._tensors()).tensors.items():
            to_local = getattr(tensor, "to_local", None)
            yield name, to_local() if to_local else tensor


class ModuleSource(StateDictSource):
    """A module's parameters and persistent buffers, tied storage once.

    Args:
        module: The model in training; ``torch.compile`` and ``DistributedDataParallel`` wrappers
            are looked through.
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__({})
        self._module = module

    def _tensors(self) -> dict[str, torch.Tensor]:
        return module_tensors(self._module)


def _has_metadata(source: object) -> bool:
    # Not read where the name alone tells: reading may cost a pass over all tensors.
    return inspect.getattr_static(source, "metadata", None) is not None or hasattr(
        source, "metadata"
    )


def _sharding(tensor: torch.Tensor) -> tuple[tuple[int, ...] | None, Any, tuple[Any, ...] | None]:
    """Return owners, mesh and placements of a DTensor; three None for a whole tensor."""
    if type(tensor) in PLAIN_TYPES or not hasattr(tensor, "full_tensor"):
        return None, None, None
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    placements = tuple(tensor.placements)  # type: ignore[attr-defined]
    return tuple(mesh.mesh.flatten().tolist()), mesh, placements


def as_source(model: nn.Module | Mapping[str, torch.Tensor] | WeightSource) -> WeightSource:
    """Return a source for a user's argument: a module, a mapping, or a source."""
    from collections.abc import Mapping as AnyMapping

    if isinstance(model, torch.nn.Module):
        return ModuleSource(model)
    if isinstance(model, AnyMapping):
        return StateDictSource(model)
    if hasattr(model, "iter_full") and _has_metadata(model):
        return model
    raise TypeError(
        f"cannot publish a {type(model).__name__}: expected a torch module, a mapping of names to "
        "tensors, or a WeightSource with `metadata` and `iter_full`"
    )
