"""How much memory a round takes beside the weights that are in use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from wtransfer.bench.lab import JOBS
from wtransfer.bench.nbytes import in_words
from wtransfer.bench.row import Goal, Row, Spread
from wtransfer.bench.scene import Scene, workers_in_words
from wtransfer.bench.sets import TensorSet
from wtransfer.bench.settings import MIB, MOST_WATCHED_NBYTES

if TYPE_CHECKING:
    from wtransfer.bench.lab import Lab


class Copies(NamedTuple):
    """Memory, in copies of one update."""

    staging: Spread
    """Beside the trainer's weights and those that workers have in use."""
    shared: float
    """Shared memory on the host."""


class StagingMemory:
    """Memory of trainer and workers, as the kernel counts it, at its peak in a round."""

    name = "memory"
    what = "shm: staging memory on the host, in copies of one update, however many workers adopt"

    def run(self, lab: Lab) -> Row:
        """Play watched rounds."""
        settings = lab.settings
        few, most = settings.base_workers, max(settings.workers)
        adopting = _copies(lab, "adopt", most)
        beside = {"workers": float(most), "shared_copies": adopting.shared}
        if few != most:
            beside[f"staging_with_{few}"] = _copies(lab, "adopt", few).staging.median
        if "copy" in settings.commits:
            copying = _copies(lab, "copy", most)
            beside |= {
                "staging_by_copy": copying.staging.median,
                "shared_copies_by_copy": copying.shared,
            }
        note = (
            "two segments are shared: one holds the last update, which all workers that adopt "
            "have in use together, the other stages the next"
        )
        # Messages and page tables grow with the weights, too: by less than a twentieth.
        return Row(
            self.name, self.what, "copies", adopting.staging, Goal("<=", 1.05), beside, note=note
        )


def _copies(lab: Lab, commit: str, num_workers: int) -> Copies:
    """Return by how many copies the memory grows with an update, without those in use.

    Two sizes of it, because processes have memory beside the weights, and by how much the kernel
    shares that among them changes all the time. What both have in common drops out.
    """
    most = max(2, min(lab.settings.nbytes, MOST_WATCHED_NBYTES) // MIB)
    small, large = (_watched(lab, number, commit, num_workers) for number in (most // 2, most))
    nbytes = large["nbytes"] - small["nbytes"]
    # The trainer's, and those of the workers.
    in_use = 1 + (1 if commit == "adopt" else num_workers)
    least = Spread.of(small["peak_nbytes"]).median
    staging = [(peak - least) / nbytes - in_use for peak in large["peak_nbytes"]]
    shared_nbytes = max(large["peak_shared_nbytes"]) - max(small["peak_shared_nbytes"])
    return Copies(Spread.of(staging), shared_nbytes / nbytes)


def _watched(lab: Lab, number: int, commit: str, num_workers: int) -> dict[str, Any]:
    tensors = TensorSet("many", MIB, number)
    arguments = {
        "tensors": tensors.plain(),
        "commit": commit,
        "num_rounds": lab.settings.num_rounds,
    }
    scene = Scene(
        f"memory of {in_words(tensors.total_nbytes())}, {commit}, {workers_in_words(num_workers)}",
        f"{JOBS}.footprint:publish_watched",
        f"{JOBS}.joining:join",
        num_workers,
        tuple(arguments.items()),
    )
    return lab.play(scene).trainer
