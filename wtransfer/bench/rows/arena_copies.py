"""Blocks into the arena and back, held against plain copies of the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.bench.lab import JOBS
from wtransfer.bench.nbytes import in_words
from wtransfer.bench.row import Goal, Row, Spread
from wtransfer.bench.scene import Scene
from wtransfer.bench.settings import goals_are_about

if TYPE_CHECKING:
    from wtransfer.bench.lab import Lab
    from wtransfer.bench.offload import OffloadSettings

_GOAL = Goal(">=", 0.85)
_MEMCPY = {"put": "memcpy_in", "get": "memcpy_out"}


@dataclass(frozen=True)
class ArenaCopy:
    """Storing or loading blocks of one size.

    Args:
        direction: ``put`` or ``get``.
        block_nbytes: Bytes of a block.
        verified: Whether checksums are made and compared.
        settings: How much, and how often.
    """

    direction: str
    block_nbytes: int
    verified: bool
    settings: OffloadSettings

    @property
    def name(self) -> str:
        """``put-2MiB``, ``get-16KiB-unverified``, ..."""
        size = in_words(self.block_nbytes).replace(" ", "")
        return f"{self.direction}-{size}{'' if self.verified else '-unverified'}"

    @property
    def what(self) -> str:
        """In words."""
        way = {"put": "cache to arena", "get": "arena to cache"}[self.direction]
        proof = "checksummed" if self.verified else "without checksums"
        return (
            f"memcpy / ({way}, two threads), blocks of {in_words(self.block_nbytes)}, {proof}; "
            "memcpy: the same blocks, each in one piece, on one thread"
        )

    def run(self, lab: Lab) -> Row:
        """Copy, in turn with memcpy; every byte is looked at afterwards."""
        told = lab.play(self._scene()).trainer
        ours = told[self.direction + ("" if self.verified else "_unverified")]
        memcpy = told[_MEMCPY[self.direction]]
        shares = Spread.of(one / other for one, other in zip(memcpy, ours, strict=True))
        num_blocks = self.settings.nbytes // self.block_nbytes
        return Row(
            self.name,
            self.what,
            "",
            shares,
            _GOAL if self._is_the_goals() else None,
            {
                "memcpy_each_us": Spread.of(memcpy).median / num_blocks * 1e6,
                "ours_each_us": Spread.of(ours).median / num_blocks * 1e6,
            },
        )

    def _is_the_goals(self) -> bool:
        return self.verified and goals_are_about(self.block_nbytes, self.settings.nbytes)

    def _scene(self) -> Scene:
        job = f"{JOBS}.offloading:measure"
        arguments = {
            "block_nbytes": self.block_nbytes,
            "nbytes": self.settings.nbytes,
            "num_rounds": self.settings.num_rounds,
        }
        name = f"blocks of {in_words(self.block_nbytes)} into an arena and back"
        return Scene(name, job, job, 0, tuple(arguments.items()))
