"""The kinds of backend: entry-point group, words and contract of each.

Base classes are strings, so that the host imports no room until a backend of that room is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

CORE = "wtransfer"
"""Distribution whose entry points are the built-ins."""


@dataclass(frozen=True)
class Kind:
    """One kind of backend."""

    word: str
    """The word for it everywhere: folder, CLI, settings."""
    group: str
    """Entry-point group; empty where backends of this kind are not discovered."""
    noun: str
    """What one of them is called in texts."""
    base: str
    """Base class as ``module:Class``."""
    methods: tuple[str, ...] = ()
    """Where given, a class fits by having these methods, whatever its bases are."""
    unknown: str = "Unknown {name}. Available: {available}"
    """How the error for an unknown name begins."""
    taken: str = "'{name}' is already registered."
    """Text of the error for a name that is taken."""
    reserved: frozenset[str] = frozenset()
    """Names that nobody may register at run time, whether installed or not."""
    first_party: Mapping[str, str] = field(default_factory=dict)
    """Name -> distribution that provides it, for the error while it is not installed."""


ENGINES = Kind(
    word="engines",
    group="wtransfer.engines",
    noun="weight transfer engine",
    base="wtransfer.engines.interface:WeightTransferEngine",
    methods=("init_transfer_engine", "receive_weights", "shutdown"),
    unknown="Invalid weight transfer backend: {name}. Available engines: {available}",
    taken="Weight transfer engine '{name}' is already registered.",
    reserved=frozenset({"nccl"}),
    first_party={"nccl": "wtransfer-nccl"},
)
CONNECTORS = Kind(
    word="connectors",
    group="wtransfer.connectors",
    noun="connector",
    base="wtransfer.connectors.interface:Connector",
    unknown="Unsupported connector type: {name}. Available connectors: {available}",
    taken="Connector '{name}' is already registered.",
)
SPECS = Kind(
    word="specs",
    group="wtransfer.specs",
    noun="offloading spec",
    base="wtransfer.specs.interface:OffloadingSpec",
    unknown="Unsupported spec type: {name}. Available specs: {available}",
    # The seed says "Connector" here, too; programs may rely on the text.
    taken="Connector '{name}' is already registered.",
)
TRAINERS = Kind(
    word="trainers",
    group="",
    noun="weight transfer trainer engine",
    base="wtransfer.engines.interface:TrainerWeightTransferEngine",
    methods=("trainer_init", "send_weights"),
    unknown="Invalid weight transfer trainer backend: {name}. Available trainers: {available}",
    taken="Weight transfer trainer engine '{name}' is already registered.",
)

DISCOVERED: tuple[Kind, ...] = (ENGINES, CONNECTORS, SPECS)
"""Kinds that distributions declare, in the order in which they are shown."""

KINDS: Mapping[str, Kind] = {kind.word: kind for kind in (*DISCOVERED, TRAINERS)}
"""Every kind by its word."""
