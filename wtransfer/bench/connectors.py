"""Which rows ``bench connectors`` has, in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.bench.kinds import ALL, BETWEEN_INSTANCES
from wtransfer.bench.offload import NUM_LAYERS
from wtransfer.bench.rows.connector_blocks import ConnectorBlocks
from wtransfer.bench.rows.connector_plans import ConnectorPlan
from wtransfer.bench.settings import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer.bench.row import Measure

# Pages are filled and compared word by word.
_UNIT_NBYTES = 8 * NUM_LAYERS
# Smaller ones lie in slots several times their size.
_LEAST_NBYTES = 4096
# On either side a cache and the plain copies' two; between them a shelf, or files in memory. Slots
# of the smallest blocks are twice as large.
_NUM_COPIES = 8
_BESIDE_NBYTES = 1 << 30


@dataclass(frozen=True)
class ConnectorSettings:
    """Sizes and numbers. The defaults are those of the design's goals."""

    block_nbytes: tuple[int, ...] = (2 * MIB, 128 << 10)
    """Bytes of a block, of all its 32 layers."""
    nbytes: int = 256 * MIB
    """Bytes that one round saves and loads."""
    num_planned: int = 2000
    """Blocks of the request that schedulers are asked about."""
    folder: str | None = None
    """Where files are kept meanwhile; None: in memory."""
    num_rounds: int = 7
    """Rounds that count."""

    @classmethod
    def quick(cls) -> ConnectorSettings:
        """Return small sizes, with which every row is filled and no number means much."""
        return cls(nbytes=16 * MIB, num_planned=200, num_rounds=3)

    def check(self) -> None:
        """See to it that there is something to measure.

        Raises:
            ValueError: There is not; the text says what to ask for.
        """
        for nbytes in self.block_nbytes:
            if nbytes % _UNIT_NBYTES or not _LEAST_NBYTES <= nbytes <= self.nbytes:
                raise ValueError(
                    f"blocks of {nbytes} bytes: expected a multiple of {_UNIT_NBYTES}, 8 for each "
                    f"of {NUM_LAYERS} layers, at least {_LEAST_NBYTES} and at most the "
                    f"{self.nbytes} of a round"
                )

    @property
    def needed_nbytes(self) -> int:
        """Memory that a run takes."""
        return _BESIDE_NBYTES + _NUM_COPIES * self.nbytes


def connector_measures(settings: ConnectorSettings) -> Iterator[Measure]:
    """Yield what measures each row."""
    for kind in BETWEEN_INSTANCES:
        for block_nbytes in settings.block_nbytes:
            yield ConnectorBlocks("load", kind, block_nbytes, settings)
            yield ConnectorBlocks("save", kind, block_nbytes, settings)
    for kind in ALL:
        yield ConnectorPlan(kind, settings)
