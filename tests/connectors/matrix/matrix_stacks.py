"""Which connectors a host has, in order, and how each of them is described to it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wtransfer.connectors.p2p.buffer import SlotMemory
from wtransfer.kv.header import HEADER_NBYTES
from wtransfer.specs.arena import ArenaLayout

if TYPE_CHECKING:
    from pathlib import Path

KINDS = {
    "tier": "OffloadingConnector",
    "files": "SharedStorageConnector",
    "shm": "SharedMemoryConnector",
    "group": "ProcessGroupConnector",
    "several": "MultiConnector",
    "tiered": "OffloadingConnector",
}
"""All built-ins, by a short name; the last one has its arena over files."""
P2P_KINDS = frozenset({"shm", "group"})
"""Those that hand a request over from one instance to another."""
# Nobody's speed decides whether a block is still there, or who is given up.
_UNHURRIED = {"skip_slow_loads": False, "buffer_bytes": 1 << 20}
_PATIENT = {"staging_bytes": 4 << 20, "lease_s": 600.0, "deadline_s": 60.0}
_MANY_TOKENS = 4096


@dataclass(frozen=True)
class Stack:
    """Connectors under one host: one by itself, or more under a ``MultiConnector``."""

    kinds: tuple[str, ...]
    """Short names, in order."""

    def __str__(self) -> str:
        """Return what a test is called by."""
        return "+".join(self.kinds)

    @property
    def loaders(self) -> list[int]:
        """Places of those that take their turn: the last one, then the first one of all."""
        last = len(self.kinds) - 1
        return [last] if last == 0 else [last, 0]

    @property
    def tiers(self) -> list[int]:
        """Places of those that keep what this host has computed."""
        return [n for n, kind in enumerate(self.kinds) if kind not in P2P_KINDS]

    @property
    def p2p_numbers(self) -> list[int]:
        """Places of those that load what another host has computed."""
        return [n for n, kind in enumerate(self.kinds) if kind in P2P_KINDS]

    def prefix(self, number: int) -> str:
        """Return what the numbers of one of them begin with."""
        return f"{number}_{KINDS[self.kinds[number]]}_" if len(self.kinds) > 1 else ""


_BUILT_INS = [kind for kind in KINDS if kind != "tiered"]
ALONE = [Stack((kind,)) for kind in _BUILT_INS]
"""Each built-in by itself; a ``MultiConnector`` with one child."""
PAIRS = [Stack(pair) for pair in itertools.permutations(_BUILT_INS, 2)]
"""Every pair, in both orders, as the order says who loads."""
TWINS = [Stack((kind, kind)) for kind in _BUILT_INS if kind not in P2P_KINDS]
"""Two of one kind. Of two P2P connectors of one kind the first takes all addresses."""


def described(
    stack: Stack, folder: Path, room: dict[str, dict[str, Any]], sender: int | None
) -> list[dict[str, Any]]:
    """Return the connectors of a host, each as ``MultiConnector`` has it described.

    Args:
        stack: Which they are.
        folder: Where they may keep files.
        room: By kind, the options that say how much it keeps.
        sender: The P2P connector by which this host hands requests over; None: it goes on with
            those of others. Only one may: a request carries the addresses of one.
    """
    return [
        describe(kind, _role(kind, is_sender=number == sender), folder / str(number), room)
        for number, kind in enumerate(stack.kinds)
    ]


def _role(kind: str, *, is_sender: bool) -> str:
    if kind not in P2P_KINDS:
        return "kv_both"
    return "kv_producer" if is_sender else "kv_consumer"


def describe(
    kind: str,
    role: str,
    folder: Path | None = None,
    room: dict[str, dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return one connector, as ``MultiConnector`` has it described."""
    if kind == "several":
        options: Any = {"connectors": [describe("files", role, folder, room)]}
    else:
        files = {"shared_storage_path": str(folder), **_UNHURRIED}
        options = {
            "tier": {},
            "files": files,
            "tiered": {"tier": "file", **files},
            "shm": _PATIENT,
            "group": {**_PATIENT, "token": "a token of these tests"},
        }[kind] | (room or {}).get(kind, {})
    return {"kv_connector": KINDS[kind], "kv_role": role, "kv_connector_extra_config": options}


def settings_of(connectors: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what `EngineConfig` says of connectors: of one as it is, of more under another one."""
    if not connectors:
        return {}
    if len(connectors) > 1:
        return {"connector": "MultiConnector", "options": {"connectors": connectors}}
    (only,) = connectors
    return {
        "connector": only["kv_connector"],
        "options": only["kv_connector_extra_config"],
        "role": only["kv_role"],
    }


def room_for(num_tokens: int | None, block_size: int, block_nbytes: int) -> dict[str, Any]:
    """Return options of each kind by which it keeps so many tokens; None: more than any test has.

    The arena over files has room for half of them.
    """

    def arena(num_blocks: int) -> dict[str, Any]:
        return {"cpu_bytes_to_use": ArenaLayout(num_blocks, block_nbytes, 1).used_nbytes}

    num_blocks = (num_tokens or _MANY_TOKENS) // block_size
    room: dict[str, Any] = {"tier": arena(num_blocks), "tiered": arena(num_blocks // 2)}
    if num_tokens is not None:
        files = {"max_bytes": num_blocks * (HEADER_NBYTES + block_nbytes)}
        shelf = {"staging_bytes": num_blocks * SlotMemory.stride(block_nbytes)}
        room |= {"files": files, "shm": shelf, "group": shelf}
        room["tiered"] |= files
    return room
