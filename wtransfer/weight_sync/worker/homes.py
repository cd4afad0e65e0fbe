"""Memory of a model's own for its small tensors, to which updates are copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec

from wtransfer.transport.buckets import aligned
from wtransfer.transport.tensors import own_memory, tensors_at

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from wtransfer.engines.staged import StagedTensors
    from wtransfer.transport.tensors import ByteArray

SMALL_NBYTES = 16 << 10
"""Most bytes of a small tensor: to copy as many takes as long as to make a tensor."""
CHUNK_NBYTES = 1 << 20
"""Least bytes that are taken at once; more where there are more already."""


class Copy(NamedTuple):
    """Bytes that lie in one piece in homes as well as in an update."""

    chunk: ByteArray
    """Where the homes are."""
    home: slice
    """Their bytes of it."""
    staged: slice
    """The update's bytes for them."""


class Moves(NamedTuple):
    """How a model comes to an update."""

    leaving: list[bool]
    """For each tensor of the update whether it has no home."""
    copies: list[Copy]
    """For all others."""

    def copy(self, memory: ByteArray) -> None:
        """Copy from the memory of the update."""
        for chunk, home, staged in self.copies:
            chunk[home] = memory[staged]


class Homes:
    """Homes of tensors, by name.

    They lie one behind the other, in the order in which they were given. So an update in the same
    order is copied many tensors at a time. A home stays as long as it is known here, whatever
    becomes of the tensor that was pointed to it.
    """

    def __init__(self) -> None:
        self._chunk = own_memory(0)
        self._used = 0
        self._nbytes = 0
        self._homes: dict[str, _Home] = {}
        self._last: _Known | None = None

    def give(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor in a new home; whoever lies in an old one is not written to any more.

        Args:
            name: Whose home it is from now on.
            like: Of which dtype and shape it shall be.
        """
        self.forget(name)
        start = self._take(like.nbytes)
        form = ([like.dtype], [tuple(like.shape)], [like.numel()])
        tensor = next(tensors_at(self._chunk, [start], *form))
        self._homes[name] = _Home(self._chunk, start, like.nbytes, tensor.data_ptr())
        self._nbytes += aligned(like.nbytes)
        return tensor

    def forget(self, name: str) -> None:
        """Let go of a home, if there is one of this name."""
        home = self._homes.pop(name, None)
        if home is not None:
            self._nbytes -= aligned(home.nbytes)
            self._last = None

    def forget_others(self, names: Collection[str]) -> None:
        """Let go of homes that are of none of these names."""
        for name in self._homes.keys() - names:
            self.forget(name)

    def has(self, name: str, address: int, nbytes: int) -> bool:
        """Whether that place is the home of this name."""
        home = self._homes.get(name)
        return home is not None and (home.address, home.nbytes) == (address, nbytes)

    @property
    def addresses(self) -> set[int]:
        """First byte of each."""
        return {home.address for home in self._homes.values()}

    def moves(self, update: StagedTensors, places: list[int]) -> Moves:
        """Return how a model comes to an update that consists of places, none of them empty.

        Args:
            update: What it shall consist of.
            places: Where its tensors lie now, in the order of the update.

        Cost: about 1 us per tensor; 0.1 us where all lie as at the last time.
        """
        outline, last = update.outline, self._last
        key = outline.names, outline.sizes, update.starts, places
        if last is None or last.key != key:
            # The update's own list may grow.
            key = outline.names, outline.sizes, list(update.starts), places
            last = self._last = _Known(key, self._moves(*key))
        return last.moves

    def _moves(
        self, names: list[str], sizes: list[int], starts: list[int], places: list[int]
    ) -> Moves:
        rows = list(zip(names, sizes, starts, places, strict=True))
        moves = Moves([not self.has(name, place, size) for name, size, _, place in rows], [])
        for (name, size, start, _), leaves in zip(rows, moves.leaving, strict=True):
            if not leaves:
                home = self._homes[name]
                _add(moves.copies, Copy(home.chunk, home.place, slice(start, start + size)))
        return moves

    def _take(self, nbytes: int) -> int:
        if self._used + nbytes > self._chunk.size:
            # As much again as there is, so that there are few pieces, however many tensors.
            self._chunk = own_memory(max(CHUNK_NBYTES, nbytes, self._nbytes))
            self._used = 0
        start, self._used = self._used, self._used + aligned(nbytes)
        return start


# Not for the cyclic collector, like the pieces of a manifest: there are many.
class _Home(msgspec.Struct, frozen=True, gc=False):
    chunk: ByteArray
    start: int
    nbytes: int
    address: int

    @property
    def place(self) -> slice:
        return slice(self.start, self.start + self.nbytes)


class _Known(NamedTuple):
    key: tuple[list[str], list[int], list[int], list[int]]
    moves: Moves


def _add(copies: list[Copy], more: Copy) -> None:
    """Add a copy; to the last one if it lies behind that, here and there."""
    last = copies[-1] if copies else None
    if last is not None and last.chunk is more.chunk:
        gap = aligned(last.home.stop) - last.home.stop
        begins = last.home.stop + gap, last.staged.stop + gap
        if begins == (more.home.start, more.staged.start):
            home = slice(last.home.start, more.home.stop)
            copies[-1] = Copy(last.chunk, home, slice(last.staged.start, more.staged.stop))
            return
    copies.append(more)
