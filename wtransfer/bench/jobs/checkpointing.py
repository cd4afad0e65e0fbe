"""Weights through a checkpoint file in memory: saved by the trainer, loaded by each worker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import safe_open
from safetensors.torch import save_file

from wtransfer.bench.jobs.timing import Sending, time_rounds

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


def save_and_load(folder: str, **keywords: Any) -> None:
    """Save all tensors, and load them into those of the workers.

    Args:
        folder: Where; somebody else removes it.
        **keywords: As in `time_rounds`.
    """
    path = Path(folder, "model.safetensors")
    time_rounds(lambda sending: _one(sending, path), **keywords)


def _one(sending: Sending, path: Path) -> None:
    group = sending.group
    if group.rank == 0:
        save_file(sending.tensors, path)
    group.meet()
    if group.rank:
        _load(path, sending.tensors)


def _load(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    with safe_open(path, framework="pt") as file:
        for name, tensor in tensors.items():
            tensor.copy_(file.get_tensor(name))
