"""Read which backends the installed distributions declare; none of them is imported.

Each distribution is read in its own ``try``: one that cannot be read loses its own entries and
leaves a `Diagnostic`; all others are listed.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, cast

from wtransfer.errors import PluginError, PluginIncompatibleError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from importlib_metadata import Distribution

    Distributions: TypeAlias = Callable[[], Iterable[Distribution]]
    """Returns the installed distributions, those that shadow others first."""

PluginErrorT = TypeVar("PluginErrorT", bound=PluginError)

CORE = "wtransfer"
"""Distribution whose entry points are the built-ins."""

Origin: TypeAlias = Literal[
    "built-in", "discovered", "file", "run time", "module path", "application"
]
"""Origin of a backend: our entry points, another distribution's, a file that the operator names,
``register_*``, a module that a configuration names, or an application's ``wtransfer_load`` hook."""


@dataclass(frozen=True, eq=False)
class Kind:
    """A kind of backend: its entry-point group, its contract and its words.

    Base classes are strings, so that no room is imported before one of its backends is loaded.
    """

    word: str
    """The word for it everywhere: folder, CLI, settings."""
    group: str
    """Entry-point group; empty where backends of this kind are not discovered."""
    noun: str
    """Noun for one such backend in texts."""
    bases: tuple[str, ...]
    """Base classes as ``module:Class``; one of them suffices."""
    methods: tuple[str, ...] = ()
    """Where given, a class fits by having these methods, whatever its bases are."""
    unknown: str = ""
    """Beginning of the error for an unknown name."""
    taken: str = ""
    """Text of the error for a name that is taken."""
    reserved: frozenset[str] = frozenset()
    """Names that cannot be registered at run time, whether installed or not."""
    first_party: Mapping[str, str] = field(default_factory=dict)
    """Name -> distribution that provides it, for the error while it is not installed."""


ENGINES = Kind(
    word="engines",
    group="wtransfer.engines",
    noun="weight transfer engine",
    bases=("wtransfer.engines.interface:WeightTransferEngine",),
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
    bases=("wtransfer.connectors.interface:Connector",),
    unknown="Unsupported connector type: {name}. Available connectors: {available}",
    taken="Connector '{name}' is already registered.",
)
SPECS = Kind(
    word="specs",
    group="wtransfer.specs",
    noun="offloading spec",
    bases=("wtransfer.specs.interface:OffloadingSpec", "wtransfer.specs.interface:Tier"),
    first_party={"valkey": "wtransfer-valkey", "mooncake": "wtransfer-mooncake"},
    unknown="Unsupported spec type: {name}. Available specs: {available}",
    # The seed says "Connector" here, too; programs may rely on the text.
    taken="Connector '{name}' is already registered.",
)
TRAINERS = Kind(
    word="trainers",
    group="",
    noun="weight transfer trainer engine",
    bases=("wtransfer.engines.interface:TrainerWeightTransferEngine",),
    methods=("trainer_init", "send_weights"),
    unknown="Invalid weight transfer trainer backend: {name}. Available trainers: {available}",
    taken="Weight transfer trainer engine '{name}' is already registered.",
)

HOSTS = "wtransfer.hosts"
"""Entry-point group of serving engines: functions of a backend's kind, its name and its example
options, that return what to write there, by words."""

DISCOVERED: tuple[Kind, ...] = (ENGINES, CONNECTORS, SPECS)
"""Kinds that distributions declare, in the order in which they are shown."""


@dataclass(frozen=True)
class Record:
    """Facts of a backend that are known without importing it."""

    kind: Kind
    name: str
    """Name as its author wrote it."""
    value: str
    """Location of the backend: ``module:Class``."""
    distribution: str | None
    """Distribution that declares it; None where a program registered it."""
    version: str | None
    """Version of that distribution."""
    origin: Origin
    target: Any = None
    """The class itself, where a program registered one."""
    source: Distribution | None = field(default=None, compare=False, repr=False)
    """The distribution's metadata."""

    def __str__(self) -> str:
        where = f"{self.distribution} {self.version}" if self.distribution else self.origin
        return f"{self.name!r} ({where})"

    @property
    def facts(self) -> dict[str, str | None]:
        """Attributes of an error about this backend."""
        return {
            "plugin": f"{self.kind.word}:{self.name}",
            "kind": self.kind.word,
            "name": self.name,
            "distribution": self.distribution,
            "distribution_version": self.version,
        }

    def error(self, cls: type[PluginErrorT], text: str) -> PluginErrorT:
        """Return an error whose sentence begins with this backend and goes on with `text`."""
        return cls(f"The {self.kind.noun} {self} {text}", **self.facts)

    def check_origin(
        self,
        distribution: str | None,
        version: str | None,
        contract: str | None,
        where: str,
        cls: Callable[[], type],
    ) -> None:
        """Raise unless another process has this backend from the same place.

        The sides of a backend exchange data in their author's own format. Two versions of one
        distribution understand each other where both state one `contract_version`, which is
        compared as a whole; without one the versions must be equal: one sentence before the first
        byte is better than an error in the middle of the data. Equal versions of two contracts,
        as in a tree under work, do not understand each other. Of a class of a file the versions
        must be equal whatever it states: a file that is edited between two tries makes no releases.

        Args:
            distribution: Distribution there; None where a program provided it, which passes.
            version: Version of that distribution.
            contract: Contract that the backend states there; None: it states none.
            where: Place of that process, as in "on the trainer".
            cls: Returns the backend's class here; called where the other side states a contract.

        Raises:
            PluginIncompatibleError: The distribution or the contract is another one, or the version
                where a side states no contract.
        """
        theirs, ours = (distribution, version), (self.distribution, self.version)
        if None in (*theirs, *ours):
            return
        stated, advice, own = "", "the same distribution and version", None
        is_same = canonical(distribution) == canonical(self.distribution)
        is_stated = contract is not None and is_same and self.origin != "file"
        if is_stated:
            own = contract_of(cls())
        if theirs == ours if own is None else own == contract:
            return
        if is_stated:
            stated = f" (contract {own or 'not stated'}, there {contract})"
            advice = "releases of one contract"
        raise PluginIncompatibleError(
            f"{self.kind.noun} {self.name!r} comes from {distribution} {version} {where} and from "
            f"{self.distribution} {self.version} here{stated}; install {advice} on both sides",
            **self.facts,
        )


@dataclass(frozen=True)
class Diagnostic:
    """Metadata of an installed distribution that could not be read."""

    distribution: str
    """Its name, or its place where the name cannot be read."""
    problem: str
    """The problem and its consequence."""


@dataclass
class Catalog:
    """Everything that was found."""

    records: list[Record] = field(default_factory=list)
    """Backends, by distribution and name."""
    diagnostics: list[Diagnostic] = field(default_factory=list)
    core_version: str | None = None
    """Version of wtransfer itself; None in a tree that is not installed."""


def contract_of(cls: type) -> str | None:
    """Return the ``major.minor`` of what the sides of a backend exchange; None: it states none.

    Anything of another form is no contract.

    A class does not inherit it: one that derives from a backend exchanges what its author decides.
    """
    stated = vars(cls).get("contract_version")
    is_contract = isinstance(stated, str) and re.fullmatch(r"\d+\.\d+", stated, re.ASCII)
    return stated if is_contract else None


def digest_of(content: bytes) -> str:
    """Return the version of a class of a file: a digest of the file."""
    return hashlib.sha256(content).hexdigest()[:12]


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
        distributions: Returns the distributions to read.

    Cost:
        One small file per distribution, and the metadata of those that declare a backend.
    """
    catalog = Catalog()
    seen: set[str] = set()
    try:
        for distribution in distributions():
            key = str(getattr(distribution, "_path", distribution))
            try:
                # As in importlib-metadata's own entry_points(): taken from the folder's name, where
                # the public `name` would parse the metadata of everything that is installed.
                key = canonical(distribution._normalized_name)  # noqa: SLF001
                if key in seen:
                    continue
                seen.add(key)
                records, problems = _read(distribution)
                if key == CORE:
                    catalog.core_version = distribution.version
            except Exception as error:
                spelled = f"{type(error).__name__}: {error}"
                problem = f"its entry points cannot be read and are left out: {spelled}"
                catalog.diagnostics.append(Diagnostic(key, problem))
                continue
            catalog.records += records
            catalog.diagnostics += problems
    except Exception as error:
        problem = f"not read to its end: {type(error).__name__}: {error}"
        catalog.diagnostics.append(Diagnostic("the search path", problem))
    # A folder lists its files in any order; people compare our texts between two machines.
    catalog.records.sort(key=lambda record: (canonical(record.distribution), record.name))
    return catalog


def _read(distribution: Distribution) -> tuple[Iterable[Record], list[Diagnostic]]:
    """Return the backends that one distribution declares; any error is the distribution's."""
    kinds = {kind.group: kind for kind in DISCOVERED}
    points = [point for point in distribution.entry_points if point.group.startswith(CORE)]
    if not points:
        return [], []
    name, version = _name_and_version(distribution)
    origin: Origin = "built-in" if canonical(name) == CORE else "discovered"
    records: dict[Record, None] = {}  # an entry that is written twice counts once
    problems: list[Diagnostic] = []
    for point in points:
        if point.group not in kinds:
            groups = [*kinds, HOSTS]
            meant = difflib.get_close_matches(point.group, groups, n=1, cutoff=0.8)
            if point.group != HOSTS and (meant or point.group.startswith(f"{CORE}.")):
                problem = f"{point.name!r} is in the group {point.group!r}, which is not read: "
                problem += f"did you mean {meant[0] if meant else ', '.join(groups)}?"
                problems.append(Diagnostic(name, problem))
            continue
        # A colon would let one distribution pose as "another:name".
        if not point.name or ":" in point.name:
            problem = f"{point.group} has an entry named {point.name!r}: not a name; left out"
            problems.append(Diagnostic(name, problem))
            continue
        kind = kinds[point.group]
        records[
            Record(kind, point.name, point.value, name, version, origin, source=distribution)
        ] = None
    return records, problems


def _name_and_version(distribution: Distribution) -> tuple[str, str]:
    """Read the header of the metadata; the description takes longer to parse than all the rest."""
    # Importing it costs a program that looks nothing up a few milliseconds.
    from email.parser import HeaderParser

    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    header = HeaderParser().parsestr(text.partition("\n\n")[0], headersonly=True)
    name, version = header["Name"], header["Version"]
    # Any other place or form is left to the library.
    return (name, version) if name and version else (distribution.name, distribution.version)
