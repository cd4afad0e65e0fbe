"""What has arrived of one update: tensors, and places in memory that are tensors when read."""

from __future__ import annotations

import itertools
import operator
from collections.abc import ItemsView, Mapping
from typing import TYPE_CHECKING

import torch

from wtransfer.transport.tensors import tensors_at

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from wtransfer.engines.outline import Outline
    from wtransfer.transport.tensors import ByteArray


class StagedTensors(Mapping[str, torch.Tensor]):
    """Name -> tensor, in the order of arrival.

    Tensors that arrived in one piece of host memory, in plan order, are kept as what they are:
    numbers. Each reading makes another tensor, with a storage of its own, that keeps the memory.
    So thousands of small ones do not lie about between two rounds, where the cyclic collector would
    go through all of them.

    Args:
        outline: The update.
    """

    def __init__(self, outline: Outline) -> None:
        self.outline = outline
        self.memory: ByteArray | None = None
        """Where the places are."""
        self.starts: list[int] = []
        """First byte of each place, in plan order from the first tensor on."""
        self._made: dict[str, torch.Tensor] = {}

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Enter a tensor that has arrived."""
        self._made[name] = tensor

    def put_places(self, memory: ByteArray, starts: Sequence[int]) -> bool:
        """Enter where the next tensors of the plan lie, each wholly within `memory`.

        Returns:
            Whether they were entered. If not, because something came in another way before, put
            them in one by one.
        """
        elsewhere = self.memory is not None and self.memory is not memory
        if self._made or elsewhere or len(self.starts) + len(starts) > len(self.outline):
            return False
        self.memory = memory
        self.starts += starts
        return True

    @property
    def all_apart(self) -> bool:
        """Whether every tensor of the plan is a place in `memory`, each behind the one before."""
        # Empty ones have none of their own.
        if self._made or len(self.starts) != len(self.outline) or 0 in self.outline.sizes:
            return False
        stops = map(operator.add, self.starts, self.outline.sizes)
        return all(map(operator.le, stops, self.starts[1:]))

    def addresses(self) -> Iterator[int]:
        """Return the address of each place."""
        base = 0 if self.memory is None else self.memory.ctypes.data
        return map(base.__add__, self.starts)

    def made(self, wanted: Sequence[bool]) -> Iterator[torch.Tensor]:
        """Make those tensors that are places and wanted, one after the other."""
        return self._at(itertools.compress(range(len(self.starts)), wanted))

    def __getitem__(self, name: str) -> torch.Tensor:
        if name in self._made:
            return self._made[name]
        number = self.outline.numbers[name]
        if number >= len(self.starts):
            raise KeyError(name)
        return next(self._at((number,)))

    def __contains__(self, name: object) -> bool:
        number = self.outline.numbers.get(name)  # type: ignore[call-overload]  # any object may be
        return name in self._made or (number is not None and number < len(self.starts))

    def __iter__(self) -> Iterator[str]:
        return itertools.chain(self.outline.names[: len(self.starts)], self._made)

    def __len__(self) -> int:
        return len(self.starts) + len(self._made)

    def items(self) -> ItemsView[str, torch.Tensor]:
        """Return pairs, one after the other."""
        return _Items(self)

    def pairs(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return an iterator over names and tensors."""
        placed = zip(self.outline.names, self._at(range(len(self.starts))), strict=False)
        return itertools.chain(placed, self._made.items())

    def _at(self, numbers: Iterable[int]) -> Iterator[torch.Tensor]:
        if self.memory is None:
            return iter(())
        outline, every = self.outline, list(numbers)
        return tensors_at(
            self.memory,
            map(self.starts.__getitem__, every),
            map(outline.dtypes.__getitem__, every),
            map(outline.shapes.__getitem__, every),
            map(outline.numels.__getitem__, every),
        )


class _Items(ItemsView[str, torch.Tensor]):
    """The pairs of `StagedTensors`; Python's own view looks each name up."""

    _mapping: StagedTensors

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._mapping.pairs()
