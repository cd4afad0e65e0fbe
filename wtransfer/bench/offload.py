"""Which rows ``bench offload`` has, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.bench.rows.arena_copies import ArenaCopy
from wtransfer.bench.rows.manager_calls import NUM_KEYS, OPERATIONS, ManagerCall, ManagerGrowth
from wtransfer.bench.settings import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer.bench.row import Measure

NUM_LAYERS = 32
"""Pages of a block; each layer is a tensor of its own."""

# The cache, two arenas, and the plain copies; what processes take comes on top.
_NUM_COPIES = 5
_BESIDE_NBYTES = 1 << 30


@dataclass(frozen=True)
class OffloadSettings:
    """Sizes and numbers. The defaults are those of the design's goals."""

    block_nbytes: tuple[int, ...] = (2 * MIB, 128 << 10, 16 << 10)
    """Bytes of a block, of all its 32 layers."""
    nbytes: int = 256 * MIB
    """Bytes that one round copies."""
    num_blocks: tuple[int, ...] = (1_000, 10_000, 100_000)
    """How many blocks managers have; the last number is the one of most rows."""
    num_rounds: int = 7
    """Rounds that count."""

    @classmethod
    def quick(cls) -> OffloadSettings:
        """Return small sizes, with which every row is filled and no number means much."""
        return cls(nbytes=16 * MIB, num_blocks=(200, 2_000), num_rounds=3)

    def check(self) -> None:
        """See to it that there is something to measure.

        Raises:
            ValueError: There is not; the text says what to ask for.
        """
        for nbytes in self.block_nbytes:
            if nbytes % NUM_LAYERS or not nbytes <= self.nbytes:
                raise ValueError(
                    f"blocks of {nbytes} bytes: expected a multiple of {NUM_LAYERS}, one for each "
                    f"layer, and at most the {self.nbytes} of a round"
                )
        if any(number < NUM_KEYS for number in self.num_blocks):
            raise ValueError(f"managers of {self.num_blocks} blocks: expected {NUM_KEYS} and more")

    @property
    def needed_nbytes(self) -> int:
        """Memory that a run takes."""
        return _BESIDE_NBYTES + _NUM_COPIES * self.nbytes


def offload_measures(settings: OffloadSettings) -> Iterator[Measure]:
    """Yield what measures each row."""
    for verified in (True, False):
        for block_nbytes in settings.block_nbytes:
            for direction in ("put", "get"):
                yield ArenaCopy(direction, block_nbytes, verified, settings)
    for policy in ("lru", "arc"):
        for operation in OPERATIONS:
            yield ManagerCall(operation, policy, settings)
    for operation in OPERATIONS:
        yield ManagerGrowth(operation, settings)
