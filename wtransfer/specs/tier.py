"""Any `Tier`: its options, how it is opened and closed, and the message between a spec's sides.

A spec over a tier (`wtransfer.specs.tier_spec`) keeps a store of bytes from making an answer wrong.
Its scheduler's side is `wtransfer.specs.tier_manager`, its worker's `wtransfer.specs.tier_link`. A
tier of which `FAILURES` calls in a row have failed is left alone for `PAUSE_S`: misses, and blocks
that are not kept, without a call. Then it is tried again.

The contents of a key are the connector's (`wtransfer.connectors.offloading`); here a rank's number
is added.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from wtransfer.calls import start_call
from wtransfer.config import backend_options, decode_options
from wtransfer.errors import OffloadingOptionError
from wtransfer.specs.interface import LoadStoreSpec, Tier, options_of_spec

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from typing_extensions import Self

    from wtransfer.kv.keys import OffloadKey

logger = logging.getLogger(__name__)

CLOSE_S = 2.0
"""Longest wait for a tier to close, in seconds."""
FAILURES = 3
"""Calls that fail in a row before a tier is left alone."""
PAUSE_S = 5.0
"""Length of that pause, in seconds; then one more failure is enough."""


class TierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of every tier, in ``kv_connector_extra_config``; all others are the tier's own."""

    buffer_bytes: Annotated[int, msgspec.Meta(gt=0, le=1 << 40)] = 128 << 20
    """Memory of each rank for blocks on their way to the tier; at least one block."""
    num_io_threads: Annotated[int, msgspec.Meta(gt=0, le=64)] = 2
    """Threads of each rank that put, and as many that get."""
    deadline_s: Annotated[float, msgspec.Meta(gt=0, le=86_400)] = 10.0
    """Longest duration of a load or a store, in seconds; then it fails."""
    store_threshold: Annotated[int, msgspec.Meta(gt=0)] = 1
    """A block is stored when it is offered for the n-th time: 2 keeps what was computed twice."""
    skip_slow_loads: bool = True
    """True if blocks are computed that the tier delivers more slowly than the model."""
    cpu_bytes_to_use: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    """Host memory for an arena over the tier, for all ranks together; 0: the tier alone."""
    eviction_policy: str = "lru"
    """Policy of the arena, refused without one: ``lru``, ``arc`` or ``module:Class``."""
    write_back: bool = False
    """True if blocks are put when the arena evicts them; else when they are stored. Refused without
    an arena."""

    @classmethod
    def of(cls, extra_config: Mapping[str, Any]) -> tuple[Self, dict[str, Any]]:
        """Read the options; return the options of every tier, and those of this one.

        Raises:
            OffloadingOptionError: An option cannot be used.
        """
        extra = {k: v for k, v in options_of_spec(extra_config).items() if k != "tier"}
        shared = {k: v for k, v in extra.items() if k in cls.__struct_fields__}
        name = "kv_connector_extra_config of every tier"
        options = decode_options(shared, cls, OffloadingOptionError, name)
        for name in ("eviction_policy", "write_back"):
            if extra.get(name) and not options.cpu_bytes_to_use:
                raise OffloadingOptionError(
                    f"kv_connector_extra_config: {name} is about an arena over the tier, and there "
                    f"is none: set cpu_bytes_to_use, its size, or leave {name} out"
                )
        return options, {k: v for k, v in extra.items() if k not in shared}


@dataclass
class TierLoadStoreSpec(LoadStoreSpec):
    """Blocks by key, each in the arena over the tier, or in the tier alone."""

    keys: Sequence[OffloadKey]
    """Keys, without rank, in the order of the blocks; a block's place is its key's among these."""
    in_arena: Mapping[int, int] = field(default_factory=dict)
    """Slots by place, of blocks that are copied from or to the arena: all others from or to the
    tier."""
    promoted: Mapping[int, int] = field(default_factory=dict)
    """Slots by place, of blocks that a load gets from the tier and the arena keeps as well."""
    outdated: Collection[int] = ()
    """Slots whose former block is of other weights: with ``write_back`` it is not put."""
    rewritten: Collection[OffloadKey] = ()
    """Keys that are put even if the tier has them: what it has may be damaged."""

    @staticmethod
    def medium() -> str:
        """Return ``"STORAGE"``."""
        return "STORAGE"


def rank_key(key: bytes, rank: int) -> bytes:
    """Return the key of one rank's part of a block."""
    return key + rank.to_bytes(2, "big")


def open_tier(tier_cls: type[Tier], options: Mapping[str, Any]) -> Tier:
    """Make an object of a tier.

    Raises:
        OffloadingOptionError: An option is unknown, missing, or of another type. Without
            `Tier.options_cls`: the constructor did not find one in the mapping.
    """
    given = backend_options(tier_cls, options, OffloadingOptionError)
    try:
        return tier_cls(given)
    except KeyError as error:
        if given is not options:
            raise
        raise OffloadingOptionError(f"{tier_cls.__name__} needs the option {error}") from error


def close_tier(tier: Tier) -> None:
    """Close a tier; a close that takes longer than `CLOSE_S` continues on a thread."""
    call = start_call(tier.close, "wtransfer-tier-close")
    if not call.done.wait(CLOSE_S):
        logger.warning("%s.close takes longer than %g s", type(tier).__name__, CLOSE_S)
    elif call.error is not None:
        raise call.error


class Counts:
    """Counts failures by reason, and logs the first of each reason. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()

    def add(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[f"{name}_total"] += number

    def fail(self, name: str, reason: str, detail: object, number: int = 1) -> None:
        with self._lock:
            is_first = not self._counts[f"{name}_{reason}_total"]
            self._counts[f"{name}_total"] += number
            self._counts[f"{name}_{reason}_total"] += number
        if is_first:
            text = "%s (%s): %s; further ones are only counted"
            logger.warning(text, name.replace("_", " "), reason, detail)

    def numbers(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counts)


class Health:
    """Leaves a tier alone whose calls fail. Thread-safe."""

    def __init__(self) -> None:
        self._num_failed, self._until = 0, 0.0

    @property
    def is_paused(self) -> bool:
        return time.monotonic() < self._until

    def ended(self, *, success: bool) -> None:
        """Count the end of a call."""
        self._num_failed = 0 if success else self._num_failed + 1
        if self._num_failed >= FAILURES:
            self._until = time.monotonic() + PAUSE_S
