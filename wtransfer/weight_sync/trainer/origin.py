"""Where the trainer's engine comes from, which its workers must match."""

from __future__ import annotations

from dataclasses import dataclass

from wtransfer.registry.registry import registry


@dataclass
class Origin:
    """An engine by name and distribution, and how often workers were asked to make it."""

    engine: str
    """Name in the group ``wtransfer.engines``."""
    distribution: str | None = None
    """Distribution that it comes from; None where it was registered at run time."""
    engine_version: str | None = None
    """Version of that distribution."""
    needs_generation: bool = False
    """Whether all workers must be initialised again when one joins or leaves."""
    epoch: int = 0
    """Number of initialisations so far."""


def origin_of(engine: str, trainer: type | None) -> Origin:
    """Return the origin of an engine.

    Args:
        engine: Name.
        trainer: The trainer class, where it was given; the worker class may then be elsewhere.

    Raises:
        PluginError: No such engine, or it cannot be loaded.
    """
    engines = registry("engines")
    if trainer is not None and engine not in engines.names():
        return Origin(engine, needs_generation=getattr(trainer, "needs_generation", False))
    record = engines.record(engine)
    worker_cls = engines.get(engine)
    return Origin(
        engine,
        record.distribution,
        record.version,
        needs_generation=getattr(worker_cls, "needs_generation", False),
    )
