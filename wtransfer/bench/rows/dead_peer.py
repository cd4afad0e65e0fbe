"""How soon the publisher knows that a worker has died."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.bench.lab import JOBS
from wtransfer.bench.row import Goal, Row, Spread
from wtransfer.bench.scene import Scene
from wtransfer.bench.sets import TensorSet
from wtransfer.bench.settings import MIB
from wtransfer.errors import StallError

if TYPE_CHECKING:
    from wtransfer.bench.lab import Lab

_NBYTES = 256 * MIB
"""Whatever was asked for: long enough a round to be hit in its middle, short enough to be quick."""
_ALWAYS_MS = 1000.0


class DeadPeer:
    """From SIGKILL of a worker in the middle of a round to the publisher's error that names it."""

    name = "death"
    what = "SIGKILL of a worker in the middle of a round, to the publisher's error that names it"

    def run(self, lab: Lab) -> Row:
        """Kill one worker after another, spread over the length of a round."""
        tensors = TensorSet("llama", _NBYTES)
        arguments = {"tensors": tensors.plain(), "num_kills": lab.settings.num_kills}
        told = lab.play(
            Scene(
                "killed workers",
                f"{JOBS}.killing:publish_and_kill",
                f"{JOBS}.joining:join",
                1,
                tuple(arguments.items()),
                replaces_killed=True,
            )
        ).trainer
        if not told["noticed_s"]:
            raise StallError("every round was over before its worker could be killed")
        return Row(
            self.name,
            self.what,
            "ms",
            Spread.of(seconds * 1e3 for seconds in told["noticed_s"]),
            Goal("<=", 50.0),
            {"kills": len(told["noticed_s"]), "undisturbed_round_s": told["round_s"]},
            limit=_ALWAYS_MS,
        )
