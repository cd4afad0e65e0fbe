"""Memory of a model's own for its small tensors, to which updates are copied."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from wtransfer.transport.buckets import aligned
from wtransfer.transport.tensors import own_memory, tensors_at

if TYPE_CHECKING:
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
        self._sizes: dict[str, int] = {}
        self._last: tuple[list[str], list[int], Moves] | None = None

    def give(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor in a new home.

        Args:
            name: Whose home it is from now on.
            like: Of which dtype and shape it shall be.
        """
        start = self._take(like.nbytes)
        self._chunks[name], self._starts[name] = self._chunk, start
        self._sizes[name] = like.nbytes
        self._last = None
        form = ([like.dtype], [tuple(like.shape)], [like.numel()])
        return next(tensors_at(self._chunk, [start], *form))

    def forget(self, name: str) -> None:
        """Let go of a home, if there is one of this name."""
        if name in self._sizes:
            del self._chunks[name], self._starts[name], self._sizes[name]
            self._last = None

    def has(self, name: str, nbytes: int) -> bool:
        """Whether there is a home of this name, and of so many bytes."""
        return self._sizes.get(name) == nbytes

    def moves(self, update: StagedTensors) -> Moves:
        """Return how a model comes to an update that consists of places, none of them empty.

        Cost: about 1 us per tensor; nothing for one that lies as the last one did.
        """
        names, starts = update.outline.names, update.starts
        if self._last is None or self._last[:2] != (names, starts):
            self._last = names, list(starts), self._moves(names, starts, update.outline.sizes)
        return self._last[2]

    def _moves(self, names: list[str], starts: list[int], sizes: list[int]) -> Moves:
        leaving = [self._sizes.get(name) != size for name, size in zip(names, sizes, strict=True)]
        moves = Moves(leaving, [])
        for name, start, size, leaves in zip(names, starts, sizes, leaving, strict=True):
            if not leaves:
                self._add(moves.copies, self._copy(name, start, size))
        return moves

    def _copy(self, name: str, start: int, size: int) -> Copy:
        home = self._starts[name]
        return Copy(self._chunks[name], slice(home, home + size), slice(start, start + size))

    def _add(self, copies: list[Copy], more: Copy) -> None:
        """Add a copy; to the last one if it lies behind that, here and there."""
        last = copies[-1] if copies else None
        if last is not None and last.chunk is more.chunk:
            gap = aligned(last.home.stop) - last.home.stop
            if (
                more.home.start - gap == last.home.stop
                and more.staged.start - gap == last.staged.stop
            ):
                home = slice(last.home.start, more.home.stop)
                copies[-1] = Copy(last.chunk, home, slice(last.staged.start, more.staged.stop))
                return
        copies.append(more)

    def _take(self, nbytes: int) -> int:
        if self._used + nbytes > self._chunk.size:
            # As much again as there is, so that there are few pieces, however many tensors.
            size = max(CHUNK_NBYTES, nbytes, self._nbytes)
            self._chunk, self._used = own_memory(size), 0
            self._nbytes += size
        start, self._used = self._used, self._used + aligned(nbytes)
        return start
