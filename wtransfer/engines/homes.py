"""Memory of a model's own for its small tensors, to which updates are copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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
        self._chunks: dict[str, ByteArray] = {}
        self._starts: dict[str, int] = {}
        self._addresses: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
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
        home = next(tensors_at(self._chunk, [start], *form))
        self._chunks[name], self._starts[name] = self._chunk, start
        self._addresses[name], self._sizes[name] = home.data_ptr(), like.nbytes
        self._nbytes += aligned(like.nbytes)
        return home

    def forget(self, name: str) -> None:
        """Let go of a home, if there is one of this name."""
        if name in self._sizes:
            self._nbytes -= aligned(self._sizes.pop(name))
            del self._chunks[name], self._starts[name], self._addresses[name]
            self._last = None

    def forget_others(self, names: Collection[str]) -> None:
        """Let go of homes that are of none of these names."""
        for name in [name for name in self._sizes if name not in names]:
            self.forget(name)

    def has(self, name: str, address: int, nbytes: int) -> bool:
        """Whether that place is the home of this name."""
        return self._addresses.get(name) == address and self._sizes.get(name) == nbytes

    @property
    def addresses(self) -> Collection[int]:
        """First byte of each."""
        return self._addresses.values()

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
                _add(moves.copies, self._copy(name, size, start))
        return moves

    def _copy(self, name: str, size: int, start: int) -> Copy:
        home = self._starts[name]
        return Copy(self._chunks[name], slice(home, home + size), slice(start, start + size))

    def _take(self, nbytes: int) -> int:
        if self._used + nbytes > self._chunk.size:
            # As much again as there is, so that there are few pieces, however many tensors.
            self._chunk = own_memory(max(CHUNK_NBYTES, nbytes, self._nbytes))
            self._used = 0
        start, self._used = self._used, self._used + aligned(nbytes)
        return start


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
