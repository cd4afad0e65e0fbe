"""What a run of the bench is asked to measure."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20
"""Bytes."""
MOST_WATCHED_NBYTES = 256 * MIB
"""Where memory is counted; larger updates take as many copies, and the kernel long to count."""
COMMITS = ("adopt", "copy")
"""How a worker can commit."""


# The block of a common model. Smaller ones stand beside it.
_GOAL_BLOCK_NBYTES = 2 * MIB
# With fewer, what is done once takes longer than the copies.
_GOAL_NBYTES = 128 * MIB


def goals_are_about(block_nbytes: int, nbytes: int) -> bool:
    """Return whether a round says something of a goal, by the bytes of a block and of all."""
    return block_nbytes == _GOAL_BLOCK_NBYTES and nbytes >= _GOAL_NBYTES


@dataclass(frozen=True)
class Settings:
    """Sizes and numbers. The defaults are those of the design's goals."""

    engine: str = "shm"
    """Engine that is measured. Other ones than shm have fewer rows."""
    nbytes: int = 2048 * MIB
    """Bytes of one update, at least; whole layers are added until it is reached."""
    workers: tuple[int, ...] = (1, 4)
    """Numbers of workers. Rounds are measured with the first; the greatest is held against it."""
    num_rounds: int = 7
    """Rounds that count; some more before them touch the memory and do not."""
    num_small: int = 20_000
    """How many small tensors."""
    small_nbytes: int = 4096
    """Bytes of each."""
    commits: tuple[str, ...] = COMMITS
    """How workers commit."""
    num_kills: int = 11
    """How many workers are killed."""

    @classmethod
    def quick(cls) -> Settings:
        """Return small sizes, with which every row is filled and no number means much."""
        return cls(nbytes=64 * MIB, workers=(1, 2), num_rounds=3, num_small=1000, num_kills=3)

    @property
    def base_workers(self) -> int:
        """Workers of the rows that are about one number of them."""
        return self.workers[0]
