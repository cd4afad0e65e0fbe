"""Where a worker of vLLM stands: in its instance, and behind which server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where a worker stands in its serving instance."""

    instance: str
    """The instance, where no engine core has named it."""
    rank: int
    """Rank, 0-based."""
    num_ranks: int
    """Ranks of the instance."""
    host_ranks: int | None = None
    """Ranks behind the server's address, where the server counts those of others as well."""


def place_of(parallel_config: Any, instance_id: str) -> Place:
    """Return a worker's place; each data-parallel replica is an instance of its own."""
    replica = getattr(parallel_config, "data_parallel_index", 0)
    return Place(
        f"vllm-{instance_id}-{replica}",
        parallel_config.rank,
        parallel_config.world_size,
        _host_ranks(parallel_config),
    )


def _host_ranks(parallel_config: Any) -> int | None:
    """Return the ranks behind one server where several servers are one data-parallel group.

    Each of them then says the whole group's number, but leads only to the replicas on its node.
    """
    if not getattr(parallel_config, "local_engines_only", False):
        return None
    num_replicas: int = getattr(parallel_config, "data_parallel_size_local", 1)
    return num_replicas * int(parallel_config.world_size)
