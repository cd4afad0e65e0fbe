"""What users may set, for both kinds."""

from __future__ import annotations

from typing import Annotated

import msgspec

MIB = 1 << 20
_DAY_S = 86_400

Seconds = Annotated[float, msgspec.Meta(gt=0, le=_DAY_S)]


class RelayOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Options of ``kv_connector_extra_config``."""

    shelf_bytes: Annotated[int, msgspec.Meta(ge=0)] = 512 * MIB
    """Host memory for blocks that wait to be fetched, of each rank."""
    lease_s: Seconds = 30.0
    """How long blocks are kept for an instance that does not come for them, in seconds."""
    deadline_s: Seconds = 30.0
    """Longest time without a sign of life from the other instance, in seconds."""
    num_threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    """Threads that copy what is loaded, of each rank."""
    token: str | None = None
    """Secret that both instances know; None: ``WTRANSFER_TOKEN``, or as the kind has it."""
