"""Where a worker's weights go: a module, or a state dict."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch

from wtransfer.engines.interface import TensorSpec, WeightTarget
from wtransfer.engines.state import Storage, group_storages, module_tensors

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

CommitMode = Literal["adopt", "copy"]
"""How an update is applied: by pointing parameters at the staged memory, or by copying."""


class StateDictTarget:
    """A mapping of names to tensors, written so that the tensor objects stay the same.

    Args:
        tensors: Name -> tensor. Names of the same storage are written once.
        commit: ``"adopt"`` points a tensor at the staged memory, which costs nothing and needs no
            second copy, but changes its address. ``"copy"`` writes into the existing memory: for
            models whose addresses somebody holds (a captured graph, an optimizer's flat buffer).
            Tensors that cannot adopt (on a device, not contiguous, parts of a flat buffer, of
            another dtype) are copied either way.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], commit: CommitMode = "adopt") -> None:
        if commit not in ("adopt", "copy"):
            raise ValueError(f"commit is {commit!r}, expected 'adopt' or 'copy'")
        self._storages = group_storages(
            {name: t for name, t in tensors.items() if isinstance(t, torch.Tensor)}
        )
        self._canonical = {
            alias: name
            for name, storage in self._storages.items()
            for alias in (name, *storage.aliases)
        }
        self._commit = commit

    def schema(self) -> Mapping[str, TensorSpec]:
        """Return one spec per storage, under its first name."""
        return {
            name: TensorSpec(s.tensors[0].dtype, tuple(s.tensors[0].shape), s.aliases)
            for name, s in self._storages.items()
        }

    def apply(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Write every given tensor, by its name or an alias.

        Raises:
            KeyError: A name that the schema does not have.
        """
        for name, staged in tensors.items():
            self._write(self._storages[self._canonical[name]], staged)

    def capture(self) -> Mapping[str, torch.Tensor]:
        """Return the present tensors: the memory itself where commits adopt, else copies of it."""
        return {
            name: storage.tensors[0].detach()
            if self._adopts(storage)
            else storage.tensors[0].detach().clone()
            for name, storage in self._storages.items()
        }

    def _adopts(self, storage: Storage) -> bool:
        tensor = storage.tensors[0]
        return (
            self._commit == "adopt"
            and not storage.overlaps
            and tensor.device.type == "cpu"
            and tensor.is_contiguous()
        )

    def _write(self, storage: Storage, staged: torch.Tensor) -> None:
        tensor = storage.tensors[0]
        with torch.no_grad():
            if self._adopts(storage) and staged.device == tensor.device:
                adopted = staged.to(tensor.dtype)
                for each in storage.tensors:
                    each.data = adopted
            else:
                tensor.copy_(staged)


class ModuleTarget(StateDictTarget):
    """A module's parameters and persistent buffers.

    Args:
        module: The serving model; ``torch.compile`` and ``DistributedDataParallel`` wrappers are
            looked through.
        commit: As in `StateDictTarget`.
    """

    def __init__(self, module: nn.Module, commit: CommitMode = "adopt") -> None:
        super().__init__(module_tensors(module), commit)


class NotedTensors(Mapping[str, torch.Tensor]):
    """A read-only mapping that notes which tensor was read last: the one at which a target failed.

    Args:
        tensors: What it holds.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.last_read: str | None = None
        self._tensors = tensors

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._tensors[name]
        self.last_read = name
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def as_target(
    model: nn.Module | Mapping[str, torch.Tensor] | WeightTarget, commit: CommitMode
) -> WeightTarget:
    """Return a target for what a user hands in: a module, a mapping, or a target."""
    if isinstance(model, torch.nn.Module):
        return ModuleTarget(model, commit)
    if isinstance(model, Mapping):
        return StateDictTarget(model, commit)
    if hasattr(model, "schema") and hasattr(model, "apply") and hasattr(model, "capture"):
        return model
    raise TypeError(
        f"cannot serve a {type(model).__name__}: expected a torch module, a mapping of names to "
        "tensors, or a WeightTarget with `schema`, `apply` and `capture`"
    )
