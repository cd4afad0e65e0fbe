"""Where blocks are in the arena: numbers of slots, and what is to be found there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.specs.interface import BlockIDsLoadStoreSpec

if TYPE_CHECKING:
    from collections.abc import Sequence


class ArenaLoadStoreSpec(BlockIDsLoadStoreSpec):
    """Slots of the arena, and the key of the block in each.

    The keys travel with the numbers so that a worker can compare them with the slot's header: a
    number alone would be believed.

    Args:
        slots: Their numbers.
        keys: The fenced keys, in the same order.
    """

    def __init__(self, slots: Sequence[int], keys: Sequence[bytes]) -> None:
        super().__init__(slots)
        self.keys = list(keys)
        """Key of the block in each slot."""
        if len(self.keys) != len(self.block_ids):
            raise ValueError(f"{len(self.keys)} keys for {len(self.block_ids)} slots")

    @property
    def slots(self) -> list[int]:
        """Numbers of the slots; the same as `block_ids`."""
        return self.block_ids

    @staticmethod
    def medium() -> str:
        """Return ``"CPU"``."""
        return "CPU"
