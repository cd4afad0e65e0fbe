"""Read what installed distributions declare. Nothing is imported, and nothing can fail as a whole.

Every distribution is read in its own ``try``: a file that cannot be read costs its own entries and
leaves a `Diagnostic`, never more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast

from wtransfer.registry.kinds import CORE, DISCOVERED, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from importlib_metadata import Distribution

    Distributions: TypeAlias = Callable[[], Iterable[Distribution]]
    """Returns the installed distributions, those that shadow others first."""

Origin: TypeAlias = Literal["built-in", "discovered", "run time", "module path", "application"]
"""Where a backend comes from: our entry points, another distribution's, ``register_*``, or an
application's ``wtransfer_load`` hook."""


@dataclass(frozen=True)
class Record:
    """What is known of a backend without importing it."""

    kind: str
    """Word of its kind."""
    name: str
    """Name as its author wrote it."""
    value: str
    """Where it is: ``module:Class``."""
    distribution: str | None
    """Distribution that declares it; None where a program registered it."""
    version: str | None
    """Version of that distribution."""
    origin: Origin
    """Where it comes from."""
    target: Any = None
    """The class itself, where a program registered one."""
    source: Distribution | None = field(default=None, compare=False, repr=False)
    """The distribution's metadata."""

    def __str__(self) -> str:
        where = f"{self.distribution} {self.version}" if self.distribution else self.origin
        return f"{self.name!r} ({where})"

    @property
    def facts(self) -> dict[str, str | None]:
        """What an error about this backend states."""
        return {
            "plugin": f"{self.kind}:{self.name}",
            "kind": self.kind,
            "name": self.name,
            "distribution": self.distribution,
            "distribution_version": self.version,
        }


@dataclass(frozen=True)
class Diagnostic:
    """Something about an installed distribution that could not be read."""

    distribution: str
    """Its name, or its place where the name cannot be read."""
    problem: str
    """What is wrong, and what follows."""


@dataclass
class Catalog:
    """Everything that was found."""

    records: list[Record] = field(default_factory=list)
    """Backends, by distribution and name."""
    diagnostics: list[Diagnostic] = field(default_factory=list)
    """What could not be read."""
    core_version: str | None = None
    """Version of wtransfer itself; None in a tree that is not installed."""

    def of(self, kind: Kind) -> list[Record]:
        """Return the records of one kind."""
        return [record for record in self.records if record.kind == kind.word]


def fold(name: str) -> str:
    """Return the form in which discovered names are compared."""
    return name.casefold().replace("_", "-")


def canonical(distribution: str | None) -> str:
    """Return the form in which names of distributions are compared."""
    return re.sub(r"[-_.]+", "-", distribution or "").lower()


def installed() -> Iterable[Distribution]:
    """Return the distributions of this process's search path."""
    import importlib_metadata

    # Its newer releases promise only a protocol here, of which we use all.
    return cast("Iterable[Distribution]", importlib_metadata.distributions())


def discover(distributions: Distributions = installed) -> Catalog:
    """Read the entry points of every distribution.

    Args:
        distributions: Returns what to read.

    Cost:
        One small file per distribution, and the metadata of those that declare a backend.
    """
    catalog = Catalog()
    seen: set[str] = set()
    try:
        for distribution in distributions():
            _read(distribution, seen, catalog)
    except Exception as error:
        catalog.diagnostics.append(
            Diagnostic("the search path", f"not read to its end: {_spell(error)}")
        )
    # A folder lists its files in any order; people compare our texts between two machines.
    catalog.records.sort(key=lambda record: (canonical(record.distribution), record.name))
    return catalog


def _read(distribution: Distribution, seen: set[str], catalog: Catalog) -> None:
    try:
        # The same key as in importlib-metadata's own entry_points(): it comes from the folder's
        # name, where the public `name` would parse the metadata of everything installed.
        key = distribution._normalized_name  # noqa: SLF001
        if key in seen:
            return
        seen.add(key)
        found, problems = _records(distribution)
        if canonical(key) == canonical(CORE):
            catalog.core_version = distribution.version
    except Exception as error:
        problem = f"its entry points cannot be read and are left out: {_spell(error)}"
        catalog.diagnostics.append(Diagnostic(_identify(distribution), problem))
        return
    catalog.records += found
    catalog.diagnostics += problems


def _records(distribution: Distribution) -> tuple[list[Record], list[Diagnostic]]:
    words = {kind.group: kind.word for kind in DISCOVERED}
    points = [point for point in distribution.entry_points if point.group in words]
    if not points:
        return [], []
    name, version = distribution.name, distribution.version
    origin: Origin = "built-in" if canonical(name) == CORE else "discovered"
    records: list[Record] = []
    problems: list[Diagnostic] = []
    for point in points:
        # A colon would let one distribution pose as "another:name".
        if not point.name or ":" in point.name:
            problem = f"{point.group} has an entry named {point.name!r}: not a name; left out"
            problems.append(Diagnostic(name, problem))
            continue
        record = Record(
            words[point.group], point.name, point.value, name, version, origin, source=distribution
        )
        if record not in records:
            records.append(record)
    return records, problems


def _identify(distribution: Distribution) -> str:
    try:
        return distribution.name or str(distribution)
    except Exception:
        return str(getattr(distribution, "_path", distribution))


def _spell(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
