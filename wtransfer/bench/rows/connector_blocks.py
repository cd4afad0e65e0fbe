"""Blocks from one serving process to another, held against plain copies of the same bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.bench.kinds import PROCESS_GROUP, SHM
from wtransfer.bench.lab import JOBS
from wtransfer.bench.nbytes import in_words
from wtransfer.bench.row import Goal, Row, Spread
from wtransfer.bench.scene import Scene
from wtransfer.bench.scratch import MEMORY
from wtransfer.bench.settings import goals_are_about

if TYPE_CHECKING:
    from wtransfer.bench.connectors import ConnectorSettings
    from wtransfer.bench.kinds import Kind
    from wtransfer.bench.lab import Lab

DECODE = f"{JOBS}.connecting:decode"
"""What the side that loads runs."""
PREFILL = f"{JOBS}.connecting:prefill"
"""What the side that saves runs."""

_GOAL = Goal(">=", 0.8)
_SPANS = {
    "load": "start_load_kv until it says that all is there",
    "save": "the first save_kv_layer until wait_for_save returns",
}
_NOTES = {
    PROCESS_GROUP: "sent and received by the kernel: two copies more, and a third into the cache",
}


@dataclass(frozen=True)
class ConnectorBlocks:
    """Loading or saving blocks of one size.

    Args:
        direction: ``load`` or ``save``.
        kind: The connector.
        block_nbytes: Bytes of a block.
        settings: How much, and how often.
    """

    direction: str
    kind: Kind
    block_nbytes: int
    settings: ConnectorSettings

    @property
    def name(self) -> str:
        """``load-shm-2MiB``, ``save-storage-128KiB``, ..."""
        size = in_words(self.block_nbytes).replace(" ", "")
        return f"{self.direction}-{self.kind.short}-{size}"

    @property
    def what(self) -> str:
        """In words."""
        return (
            f"memcpy / ({_SPANS[self.direction]}), {self.kind.connector} ({self.kind.way}), blocks "
            f"of {in_words(self.block_nbytes)}, checked; memcpy: the same blocks, each in one "
            "piece, on one thread"
        )

    def run(self, lab: Lab) -> Row:
        """Save and load, each between two plain copies; every byte is looked at afterwards."""
        told = lab.play(self._scene()).trainer
        ours, memcpy = told[self.direction], told[f"{self.direction}_memcpy"]
        each = self.settings.nbytes // self.block_nbytes / 1e6
        return Row(
            self.name,
            self.what,
            "",
            Spread.of(one / other for one, other in zip(memcpy, ours, strict=True)),
            _GOAL if self._is_the_goals() else None,
            {
                "memcpy_each_us": Spread.of(memcpy).median / each,
                "ours_each_us": Spread.of(ours).median / each,
                "best_by_best": min(memcpy) / min(ours),
            },
            note=self._note(),
        )

    def _is_the_goals(self) -> bool:
        loads = self.kind == SHM and self.direction == "load"
        return loads and goals_are_about(self.block_nbytes, self.settings.nbytes)

    def _note(self) -> str:
        if self.kind.is_files:
            return f"files in {self.settings.folder or MEMORY}"
        return _NOTES.get(self.kind, "")

    def _scene(self) -> Scene:
        arguments = {
            "connector": self.kind.connector,
            "block_nbytes": self.block_nbytes,
            "num_blocks": self.settings.nbytes // self.block_nbytes,
            "num_rounds": self.settings.num_rounds,
            "folder": self.settings.folder if self.kind.is_files else None,
        }
        name = f"{self.kind.connector}, blocks of {in_words(self.block_nbytes)}"
        return Scene(name, DECODE, PREFILL, 1, tuple(arguments.items()))
