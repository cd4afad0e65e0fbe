"""The built-in connectors, as rows and jobs name them."""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """A connector."""

    short: str
    """What its rows are called by."""
    connector: str
    """Its name in ``kv_connector``."""
    way: str
    """How blocks come from one instance to the next, in words."""
    is_files: bool = False
    """Whether blocks are kept in a folder."""


SHM = Kind("shm", "SharedMemoryConnector", "the other process's shelf, mapped, two threads")
"""Prefill and decode on one host."""
PROCESS_GROUP = Kind("process-group", "ProcessGroupConnector", "gloo, TCP on loopback")
"""Prefill and decode on different hosts."""
STORAGE = Kind("storage", "SharedStorageConnector", "files", is_files=True)
"""Prefixes in a folder."""
OFFLOADING = Kind("offloading", "OffloadingConnector", "an arena of the instance's own")
"""Prefixes in host memory: `bench offload` measures its copies."""
MULTI = Kind("multi", "MultiConnector", "shm, then storage", is_files=True)
"""Several under one."""

BETWEEN_INSTANCES = (SHM, PROCESS_GROUP, STORAGE)
"""Those that bring blocks from one process to another."""
ALL = (*BETWEEN_INSTANCES, OFFLOADING, MULTI)
"""Every built-in."""
