"""What a connector takes of the scheduler's time to find a request's blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wtransfer.bench.lab import JOBS
from wtransfer.bench.row import Row, Spread
from wtransfer.bench.scene import Scene
from wtransfer.connectors.storage.finder import REMEMBERED_S

if TYPE_CHECKING:
    from wtransfer.bench.connectors import ConnectorSettings
    from wtransfer.bench.kinds import Kind
    from wtransfer.bench.lab import Lab

# What was seen before that is looked for again.
_PAUSE_S = REMEMBERED_S + 0.05


@dataclass(frozen=True)
class ConnectorPlan:
    """From the question what there is of a request to the order to load it.

    Args:
        kind: The connector.
        settings: How many blocks, and how often.
    """

    kind: Kind
    settings: ConnectorSettings

    @property
    def name(self) -> str:
        """``plan-shm``, ``plan-multi``, ..."""
        return f"plan-{self.kind.short}"

    @property
    def what(self) -> str:
        """In words."""
        return (
            f"{self.kind.connector}, scheduler's side, per block: get_num_new_matched_tokens to "
            f"build_connector_meta, a request of {self.settings.num_planned:,} blocks, all found"
        )

    def run(self, lab: Lab) -> Row:
        """Ask about one request after another, and load what was found."""
        job = f"{JOBS}.planning:measure"
        arguments = {
            "connector": self.kind.connector,
            "num_blocks": self.settings.num_planned,
            "num_rounds": self.settings.num_rounds,
            "folder": self.settings.folder,
            "pause_s": _PAUSE_S if self.kind.is_files else 0.0,
        }
        name = f"{self.kind.connector}, a request of {self.settings.num_planned:,} blocks"
        told = lab.play(Scene(name, job, job, 0, tuple(arguments.items()))).trainer
        each_us = [seconds / self.settings.num_planned * 1e6 for seconds in told["plan"]]
        whole_s = Spread.of(told["plan"]).median
        return Row(self.name, self.what, "us", Spread.of(each_us), beside={"request_s": whole_s})
