"""The yardstick: how long a plain copy of so many bytes takes, here and now."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from wtransfer.weight_sync.storages import group_storages, module_tensors

if TYPE_CHECKING:
    from torch import nn

_NUM_TRIES = 3


class Memcpy:
    """Copies between two buffers.

    Args:
        nbytes: Bytes that one copy moves.
    """

    def __init__(self, nbytes: int) -> None:
        # Written once here, so that no page is touched for the first time while it is measured.
        self._source = torch.ones(nbytes, dtype=torch.uint8)
        self._target = torch.zeros(nbytes, dtype=torch.uint8)

    @classmethod
    def of_model(cls, model: nn.Module) -> Memcpy:
        """Return copies as large as the model's weights, tied ones counted once."""
        storages = group_storages(module_tensors(model))
        return cls(sum(storage.tensors[0].nbytes for storage in storages))

    def seconds(self) -> float:
        """Return the seconds of the fastest of three copies on one thread."""
        return min(self._once() for _ in range(_NUM_TRIES))

    def _once(self) -> float:
        began = time.perf_counter()
        self._target.copy_(self._source)
        return time.perf_counter() - began
