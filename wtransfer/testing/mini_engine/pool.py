"""The blocks of the paged cache: who holds them, and what the free ones still contain."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from wtransfer.blocks import OffloadKey


class BlockPool:
    """Blocks by number.

    A block that nobody holds keeps its contents, and its name, until it is needed for others:
    least recently used first.

    Args:
        num_blocks: How many there are.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        """How many there are."""
        self._holders = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._blocks: dict[OffloadKey, int] = {}
        self._names: dict[int, OffloadKey] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int] | None:
        """Return blocks to be written, held; None if there are too few, and nothing changed."""
        if count > len(self._free):
            return None
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._forget(block)
            self._holders[block] = 1
        return taken

    def find(self, names: Iterable[OffloadKey]) -> list[int]:
        """Return the blocks of the longest prefix of names that are known. They are not held."""
        found = []
        for name in names:
            block = self._blocks.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def hold(self, blocks: Sequence[int]) -> None:
        """Hold blocks once more."""
        for block in blocks:
            self._holders[block] += 1
            self._free.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """Let go of blocks. The last of a sequence are the first to be used for others."""
        for block in reversed(blocks):
            self._holders[block] -= 1
            assert self._holders[block] >= 0, f"block {block} was released twice"
            if not self._holders[block]:
                self._free[block] = None

    def name(self, block: int, name: OffloadKey) -> None:
        """State what a block contains, unless another is known to contain it."""
        if self._blocks.setdefault(name, block) == block:
            self._names[block] = name

    def knows_any(self, blocks: Iterable[int]) -> bool:
        """Return whether it is known of any of some blocks what it contains."""
        return not self._names.keys().isdisjoint(blocks)

    def forget_all(self) -> None:
        """Forget what blocks contain."""
        self._blocks.clear()
        self._names.clear()

    def _forget(self, block: int) -> None:
        name = self._names.pop(block, None)
        if name is not None:
            del self._blocks[name]
