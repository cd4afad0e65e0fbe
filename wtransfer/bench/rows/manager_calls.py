"""What the scheduler's side takes for each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wtransfer.bench.lab import JOBS
from wtransfer.bench.row import Goal, Row, Spread
from wtransfer.bench.scene import Scene

if TYPE_CHECKING:
    from wtransfer.bench.lab import Lab
    from wtransfer.bench.offload import OffloadSettings

NUM_KEYS = 16
"""Blocks of one request."""

_WHAT = {
    "lookup": "lookup",
    "store": "prepare_store + complete_store, room is free",
    "evict": "prepare_store + complete_store, others give way",
    "load": "prepare_load + complete_load",
}
OPERATIONS = tuple(_WHAT)
"""What managers do."""


def _told(lab: Lab, settings: OffloadSettings, num_blocks: int, policy: str) -> dict[str, Any]:
    job = f"{JOBS}.managing:measure"
    arguments = {
        "num_blocks": num_blocks,
        "num_keys": NUM_KEYS,
        "num_rounds": settings.num_rounds,
        "policy": policy,
    }
    name = f"managers of {num_blocks:,} blocks, {policy}"
    return lab.play(Scene(name, job, job, 0, tuple(arguments.items()))).trainer


@dataclass(frozen=True)
class ManagerCall:
    """One operation, of our manager and of vLLM's.

    Args:
        operation: One of `OPERATIONS`.
        policy: What gives way.
        settings: How many blocks, and how often.
    """

    operation: str
    policy: str
    settings: OffloadSettings

    @property
    def name(self) -> str:
        """``lookup-lru``, ``evict-arc``, ..."""
        return f"{self.operation}-{self.policy}"

    @property
    def what(self) -> str:
        """In words."""
        return (
            f"ours / vLLM's manager: {_WHAT[self.operation]}, per block, {self.policy}, "
            f"{NUM_KEYS} blocks a call, {self.settings.num_blocks[-1]:,} kept"
        )

    def run(self, lab: Lab) -> Row:
        """Let both do it, in turn."""
        told = _told(lab, self.settings, self.settings.num_blocks[-1], self.policy)
        ours = told[f"ours_{self.operation}"]
        beside = {"ours_us": Spread.of(ours).median}
        if told["missing"]:
            note = f"nothing stands beside it: vLLM's manager is not here ({told['missing']})"
            return Row(self.name, self.what, "us", Spread.of(ours), beside=beside, note=note)
        theirs = told[f"vllm_{self.operation}"]
        beside["vllm_us"] = Spread.of(theirs).median
        shares = Spread.of(one / other for one, other in zip(ours, theirs, strict=True))
        return Row(self.name, self.what, "", shares, Goal("<=", 1.0), beside)


@dataclass(frozen=True)
class ManagerGrowth:
    """What more blocks do to the cost of one.

    Args:
        operation: One of `OPERATIONS`.
        settings: How many blocks, and how often.
    """

    operation: str
    settings: OffloadSettings

    @property
    def name(self) -> str:
        """``lookup-growth``, ..."""
        return f"{self.operation}-growth"

    @property
    def what(self) -> str:
        """In words."""
        few, many = self.settings.num_blocks[0], self.settings.num_blocks[-1]
        return f"cost per block with {many:,} blocks / with {few:,}: {_WHAT[self.operation]}, lru"

    def run(self, lab: Lab) -> Row:
        """Do it with each number of blocks."""
        beside = {}
        for num_blocks in self.settings.num_blocks:
            told = _told(lab, self.settings, num_blocks, "lru")
            for side in ("ours", "vllm"):
                if values := told.get(f"{side}_{self.operation}"):
                    beside[f"{side}_{num_blocks}_us"] = Spread.of(values).median
        few, many = self.settings.num_blocks[0], self.settings.num_blocks[-1]
        base = beside[f"ours_{few}_us"]
        values = _told(lab, self.settings, many, "lru")[f"ours_{self.operation}"]
        return Row(self.name, self.what, "", Spread.of(v / base for v in values), beside=beside)
