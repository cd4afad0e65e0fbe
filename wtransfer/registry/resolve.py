"""From a name to a class: one registry for each kind of backend, all of them over one host.

The order: an explicit class, which needs no registry, then the pin, the backend registered at run
time, the built-in, the only one discovered. No silent choice between two distributions: the error
names both and the pin to write (`Registry.record`). A name of nothing here is an error with what
exists, the nearest match, and for our own packages the ``pip install`` line.

========================================  ======================================================
``WTRANSFER_PIN``                         ``kind:name=distribution``, separated by commas
``WTRANSFER_PLUGINS``                     only these plug-ins; empty: none. Built-ins always stay
``WTRANSFER_PLUGINS_BLOCK``               not these; may name built-ins as ``wtransfer:name``
``WTRANSFER_PLUGIN_FILES``                ``kind:/path/file.py:Class``, separated by commas: classes
                                          of files, found by their own names (``--plugin``)
``WTRANSFER_LOAD_TIMEOUT_S``              seconds that a plug-in's import may take; 0: import in
                                          the calling thread, without a deadline
========================================  ======================================================

Entries of the two lists are ``distribution`` or ``distribution:name``. The distribution of a class
of a file is the file's name, and its version a digest of the file.
"""

from __future__ import annotations

import difflib
import logging
import math
import os
import re
import threading
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wtransfer.errors import (
    AlreadyRegisteredError,
    PluginAmbiguousError,
    PluginBlockedError,
    PluginError,
    PluginNotInstalledError,
    PluginSettingError,
    RegistrationError,
    UnknownBackendError,
)
from wtransfer.registry.discovery import (
    DISCOVERED,
    TRAINERS,
    Catalog,
    Diagnostic,
    Kind,
    Record,
    canonical,
    digest_of,
    discover,
    fold,
    installed,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from wtransfer.registry.discovery import Distributions
    from wtransfer.registry.hooks import PluginManager
    from wtransfer.registry.loading import Loader

PIN = "WTRANSFER_PIN"
ALLOW = "WTRANSFER_PLUGINS"
BLOCK = "WTRANSFER_PLUGINS_BLOCK"
FILES = "WTRANSFER_PLUGIN_FILES"
LOAD_TIMEOUT = "WTRANSFER_LOAD_TIMEOUT_S"
DEFAULT_LOAD_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


class Settings:
    """Settings in the environment variables.

    Args:
        environ: The environment.

    Raises:
        PluginSettingError: A variable cannot be read. Going on without it would load backends that
            the operator did not choose.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        words = "|".join(kind.word for kind in DISCOVERED)
        self.pins: dict[tuple[str, str], str] = {}
        """(kind, folded name) -> distribution as written."""
        for text in _split(environ.get(PIN, "")):
            pin = re.fullmatch(rf"({words}):\s*([^=\s][^=]*?)\s*=\s*(\S.*)", text)
            if pin is None:
                raise PluginSettingError(
                    f"{PIN} has the entry {text!r}; expected kind:name=distribution with a kind of "
                    f"{words.replace('|', ', ')}, for example engines:nccl=acme-wt"
                )
            self.pins[pin[1], fold(pin[2])] = pin[3]
        self.files: list[tuple[str, Path, str]] = []
        """(kind, file, name of the class)."""
        for text in _split(environ.get(FILES, "")):
            place = re.fullmatch(rf"({words}):(/.*\.py):(\w+)", text)
            if place is None:
                raise PluginSettingError(
                    f"{FILES} has the entry {text!r}; expected kind:/path/file.py:Class with a "
                    f"kind of {words.replace('|', ', ')}"
                )
            self.files.append((place[1], Path(place[2]), place[3]))
        self._blocked = _entries(BLOCK, environ.get(BLOCK, ""))
        self._allowed = _entries(ALLOW, environ[ALLOW]) if ALLOW in environ else None
        timeout = environ.get(LOAD_TIMEOUT, str(DEFAULT_LOAD_TIMEOUT_S))
        try:
            self.load_timeout_s = float(timeout)
        except ValueError:
            self.load_timeout_s = math.nan
        if not 0 <= self.load_timeout_s < math.inf:
            raise PluginSettingError(f"{LOAD_TIMEOUT} is {timeout!r}; expected seconds, 0 or more")

    def refusal(self, record: Record) -> str | None:
        """Return why a backend may not be used, and what to do; None if it may."""
        entry = _find_entry(self._blocked, record)
        if entry is not None:
            return f"{BLOCK} names {entry!r}; remove it there to use it"
        if self._allowed is None or record.origin == "built-in":
            return None
        if _find_entry(self._allowed, record) is not None:
            return None
        return f"{ALLOW} does not list it; add {record.distribution!r} there to use it"

    def unmatched(self, catalog: Catalog) -> Iterator[Diagnostic]:
        """Yield the entries that mean nothing that is installed: misspelt, or not here."""
        known = {canonical(each.distribution): str(each.distribution) for each in catalog.records}
        entries = [(ALLOW, text, *rest) for text, *rest in self._allowed or ()]
        entries += [(BLOCK, text, *rest) for text, *rest in self._blocked]
        for (kind, name), pinned in self.pins.items():
            entries.append((PIN, f"{kind}:{name}={pinned}", canonical(pinned), name))
        for variable, text, distribution, name in entries:
            own = [each for each in catalog.records if canonical(each.distribution) == distribution]
            if any(name in ("", fold(each.name)) for each in own):
                continue
            names = {fold(each.name): each.name for each in own} or known
            close = difflib.get_close_matches(name if own else distribution, names, n=1)
            hint = f"; did you mean {names[close[0]]!r}?" if close else ""
            said = f"has no backend {name!r}" if own else "has no backend here"
            yield Diagnostic(variable, f"{text!r} has no effect: that distribution {said}{hint}")


def _split(text: str) -> list[str]:
    return [part for part in map(str.strip, text.split(",")) if part]


def _entries(variable: str, text: str) -> list[tuple[str, str, str]]:
    """Return the entries of a list: as written, distribution, folded name ("": all of it)."""
    entries = []
    for part in _split(text):
        entry = re.fullmatch(r"([^:]*[^:\s])\s*(?::\s*(\S.*))?", part)
        if entry is None:
            raise PluginSettingError(
                f"{variable} has the entry {part!r}; expected distribution or distribution:name"
            )
        entries.append((part, canonical(entry[1]), fold(entry[2] or "")))
    return entries


def _find_entry(entries: list[tuple[str, str, str]], record: Record) -> str | None:
    """Return the entry that matches a backend, as written."""
    own_distribution, own_name = canonical(record.distribution), fold(record.name)
    for text, distribution, name in entries:
        if distribution == own_distribution and name in ("", own_name):
            return text
    return None


class Listed(NamedTuple):
    """A discovered backend, as ``wtransfer plugins list`` shows it."""

    record: Record
    address: str | None
    """Shortest name that resolves to it; None where it is blocked."""
    status: str
    """Effect of using its name."""


class Registry:
    """The backends of one kind.

    Args:
        kind: The kind.
        host: Host with the catalog of installed backends, and their loader.
    """

    def __init__(self, kind: Kind, host: Host) -> None:
        self.kind = kind
        self._host = host
        self._lock = threading.Lock()
        self._loaded: dict[str, type[Any]] = {}
        self._registered: dict[str, Record] = {}
        self._answered: dict[str, Record] = {}
        self._warned: set[str] = set()

    def get(self, name: str) -> type[Any]:
        """Return the class that a name means; loaded on first use.

        Raises:
            UnknownBackendError: No backend has this name (`PluginNotInstalledError`: one of a
                known distribution that is not installed).
            PluginBlockedError: The environment variables exclude it.
            PluginAmbiguousError: Several distributions offer it.
            PluginBrokenError: The backend cannot be imported.
            PluginTypeError: The backend does not meet the requirements of the kind.
            PluginIncompatibleError: The backend requires another version of wtransfer.

        Cost:
            A repeated look-up is one dictionary access.
        """
        cls = self._loaded.get(name)
        return self._get_first(name) if cls is None else cls

    def get_or_import(self, name: str, module_path: str | None) -> type[Any]:
        """Return the class that a name means, else the class of that name in a module.

        Args:
            name: The name; as the name of a class it is used exactly as written.
            module_path: Module to look in if no backend has the name; None: none.

        Raises:
            PluginError: As for `get`.
        """
        try:
            return self.get(name)
        except UnknownBackendError:
            if not module_path:
                raise
        value = f"{module_path}:{name}"
        return self.load(Record(self.kind, name, value, None, None, "module path"))

    def load(self, record: Record) -> type[Any]:
        """Load a record of this kind, guarded and remembered; raises as `get` does."""
        return self._host.loader.load(record)

    def names(self) -> list[str]:
        """Return every name that can be used, without importing anything."""
        discovered = {each.address for each in self.listed() if each.address is not None}
        return sorted({*self._registered, *discovered})

    def listed(self) -> Iterator[Listed]:
        """Return every discovered backend, also blocked ones, without importing anything."""
        settings = self._host.settings
        for folded, same_name in self._discovered.items():
            pin = settings.pins.get((self.kind.word, folded))
            found = self._candidates(folded, pin)
            meant = {each.distribution for each in found if settings.refusal(each) is None}
            for record in same_name:
                refusal = settings.refusal(record)
                if refusal is not None:
                    yield Listed(record, None, f"blocked: {refusal}")
                elif meant == {record.distribution}:
                    status = "found" if pin is None else f"found, pinned by {PIN}"
                    yield Listed(record, record.name, status)
                else:
                    address = f"{record.distribution}:{record.name}"
                    yield Listed(record, address, f"conflict: address it as {address}")

    def register(
        self, name: str, module_path_or_cls: str | type, class_name: str | None = None
    ) -> None:
        """Register a backend at run time; the name is compared exactly as written.

        Args:
            name: Its name.
            module_path_or_cls: The class, or the module that holds it, imported on first use.
            class_name: Name of the class, with a module path.

        Raises:
            AlreadyRegisteredError: The name is registered, reserved, or a built-in's.
            RegistrationError: The class is not named.
        """
        kind, place = self.kind, module_path_or_cls
        facts = {"kind": kind.word, "name": name}
        if not isinstance(name, str) or not isinstance(place, (str, type)):
            raise RegistrationError(
                f"{kind.word} takes a name with a class or a module path; got {name!r} with "
                f"{place!r}",
                **facts,
            )
        if isinstance(place, type):
            value = f"{place.__module__}:{place.__qualname__}"
            record = Record(kind, name, value, None, None, "run time", target=place)
        elif class_name is None:
            raise RegistrationError(
                "class_name is required when registering with module path", **facts
            )
        else:
            record = Record(kind, name, f"{place}:{class_name}", None, None, "run time")
        same_name = self._discovered.get(fold(name), ())
        built_in = any(each.name == name and each.origin == "built-in" for each in same_name)
        with self._lock:
            if built_in or name in kind.reserved or name in self._registered:
                raise AlreadyRegisteredError(kind.taken.format(name=name), **facts)
            self._registered[name] = record
            # Drop the former meaning of the name, if any.
            self._loaded.pop(name, None)
            self._answered.pop(name, None)

    def registered(self, name: str) -> bool:
        """Return whether the name was registered at run time."""
        return name in self._registered

    def record(self, name: str) -> Record:
        """Return the record of a name without importing anything.

        Discovered names compare folded; where one distribution declares two that fold alike, the
        name must be written as declared.

        Raises:
            UnknownBackendError: No backend has this name.
            PluginBlockedError: The environment variables exclude it.
            PluginAmbiguousError: Several distributions offer it.
        """
        name = str(name)  # a config's backend may be anything; the error shall say what it is
        answered = self._answered.get(name)
        if answered is not None:
            return answered
        settings = self._host.settings
        plain, distribution = name, settings.pins.get((self.kind.word, fold(name)))
        if distribution is None:
            if name in self._registered:
                return self._registered[name]
            left, colon, right = name.rpartition(":")
            if colon:
                plain, distribution = right, left
        found = self._candidates(plain, distribution)
        if not found:
            raise self._unknown(name, plain, distribution)
        usable = [each for each in found if settings.refusal(each) is None]
        if not usable:
            reasons = "; ".join(f"{each}: {settings.refusal(each)}" for each in found)
            raise PluginBlockedError(
                f"The {self.kind.noun} {name!r} is installed and blocked here. {reasons}.",
                **{**found[0].facts, "name": name},
            )
        if len({each.distribution for each in usable}) > 1:
            pins = " or ".join(map(_pin_line, usable))
            addresses = " or ".join(repr(f"{each.distribution}:{each.name}") for each in usable)
            raise PluginAmbiguousError(
                f"The {self.kind.noun} {name!r} is offered by several distributions: "
                f"{', '.join(map(str, usable))}. Choose one: set {pins}, or address it as "
                f"{addresses}.",
                kind=self.kind.word,
                name=name,
            )
        record, *more = [each for each in usable if each.name == plain] or usable
        if more:
            values = ", ".join(f"{each.name!r} = {each.value!r}" for each in (record, *more))
            mend = "only the distribution's author can mend it"
            if record.origin == "file":
                mend = f"they are two entries of {FILES}; keep one"
            raise PluginAmbiguousError(
                f"The {self.kind.noun} {name!r} is declared more than once by "
                f"{record.distribution} {record.version}: {values}. Write the name exactly as "
                f"declared; where two are equal, {mend}.",
                **{**record.facts, "name": name},
            )
        if distribution is None and record.origin == "built-in":
            self._warn_of_hidden(record)
        return record

    def explain(self, name: str) -> list[str]:
        """Return how a name resolves, step by step, without importing anything."""
        settings = self._host.settings
        pin = settings.pins.get((self.kind.word, fold(name)))
        plain, _, distribution = name.rpartition(":")[::-1]
        steps = [f"{PIN}: {f'chooses {pin!r}' if pin else 'says nothing of this name'}"]
        if name in self._registered and pin is None:
            return [*steps, f"registered at run time: {self._registered[name].value}, is used"]
        same_name = self._discovered.get(fold(plain if distribution and pin is None else name), [])
        steps.append(f"installed under this name: {', '.join(map(str, same_name)) or 'nothing'}")
        refusals = {each: settings.refusal(each) for each in same_name}
        steps += [f"blocked: {each}: {refusal}" for each, refusal in refusals.items() if refusal]
        try:
            record = self.record(name)
        except PluginError as error:
            return [*steps, f"{type(error).__name__}: {error}"]
        others = [each for each in same_name if each is not record and not refusals[each]]
        if others and record.origin == "built-in":
            steps.append("a built-in goes before what others install under its name")
        return [*steps, f"used: {record}, {record.value}"]

    @cached_property
    def _discovered(self) -> dict[str, list[Record]]:
        """Folded name -> backends of this name."""
        by_name: dict[str, list[Record]] = {}
        for record in self._host.catalog.records:
            if record.kind is self.kind:
                by_name.setdefault(fold(record.name), []).append(record)
        return by_name

    def _candidates(self, name: str, distribution: str | None) -> list[Record]:
        """Return the backends of a name: of one distribution, else the built-in, else all."""
        same_name = self._discovered.get(fold(name), [])
        if distribution is None:
            return [each for each in same_name if each.origin == "built-in"] or same_name
        wanted = canonical(distribution)
        return [each for each in same_name if canonical(each.distribution) == wanted]

    def _unknown(self, name: str, plain: str, distribution: str | None) -> UnknownBackendError:
        """Return the error for a name that no backend has; `distribution`: pinned or addressed."""
        available = self.names()
        start = self.kind.unknown.format(name=name, available=available)
        facts = {"kind": self.kind.word, "name": name, "available": tuple(available)}
        provider = self.kind.first_party.get(fold(plain))
        if provider and (distribution is None or canonical(distribution) == provider):
            return PluginNotInstalledError(
                f"{start}. It is provided by {provider!r}, which is not installed here: "
                f"pip install {provider}",
                distribution=provider,
                **facts,
            )
        if distribution is None:
            by_fold = {fold(each): each for each in available}
            close = difflib.get_close_matches(fold(name), by_fold, n=1)
            hint = f" Did you mean {by_fold[close[0]]!r}?" if close else ""
            return UnknownBackendError(
                f"{start}.{hint} Install the distribution that provides it, or register it at run "
                "time.",
                **facts,
            )
        pinned = f" ({PIN} asks for it)" if plain == name else ""
        others = ", ".join(map(str, self._discovered.get(fold(plain), [])))
        offered = f" Offered by: {others}." if others else ""
        return UnknownBackendError(
            f"{start}. No distribution {distribution!r} that is installed here offers it{pinned}."
            f"{offered}",
            **facts,
        )

    def _warn_of_hidden(self, built_in: Record) -> None:
        """Warn once that other distributions declare the name of a built-in."""
        folded = fold(built_in.name)
        hidden = [
            each
            for each in self._discovered[folded]
            if each.origin != "built-in" and self._host.settings.refusal(each) is None
        ]
        if hidden and folded not in self._warned:
            self._warned.add(folded)
            logger.warning(
                "The built-in %s %s is used, though %s would answer to this name, too: "
                "set %s, or address it as %r",
                self.kind.noun,
                built_in,
                " and ".join(map(str, hidden)),
                _pin_line(hidden[0]),
                f"{hidden[0].distribution}:{hidden[0].name}",
            )

    def _get_first(self, name: str) -> type[Any]:
        before = self._registered.get(name)
        cls, answered = self._host.loader.ask(self.kind, name)
        with self._lock:
            # Registered meanwhile: this answer was right when it was asked for, and is not kept.
            if self._registered.get(name) is before:
                self._loaded[name] = cls
                if answered is not None:
                    self._answered[name] = answered
        return cls


def _pin_line(record: Record) -> str:
    return f'{PIN}="{record.kind.word}:{record.name}={record.distribution}"'


class Host:
    """Settings of a process and backends that it can find; both are read once, when needed.

    Args:
        environ: Holds the settings; the process's environment if None.
        distributions: Returns the distributions to read.
        board: Hooks to notify and ask; the process's own if None. One host for each board.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        distributions: Distributions = installed,
        board: PluginManager | None = None,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        self._distributions = distributions
        self._board = board
        self._lock = threading.Lock()
        self._loader: Loader | None = None
        self._registries = {kind.word: Registry(kind, self) for kind in (*DISCOVERED, TRAINERS)}

    def registry(self, word: str) -> Registry:
        """Return the registry of a kind: engines, connectors, specs or trainers."""
        return self._registries[word]

    @cached_property
    def settings(self) -> Settings:
        """The operator's decisions.

        Raises:
            PluginSettingError: A variable cannot be read.
        """
        return Settings(self._environ)

    @cached_property
    def catalog(self) -> Catalog:
        """Catalog of the installed backends, and of those in files that the operator names.

        Raises:
            PluginSettingError: A variable cannot be read.
        """
        catalog = discover(self._distributions)
        for word, path, name in self.settings.files:
            # Peers compare it: both must have the same file. A file that cannot be read costs its
            # own name only: its import fails, and says why.
            try:
                version = digest_of(path.read_bytes())
            except OSError:
                version = "unreadable"
            kind = self.registry(word).kind
            catalog.records.append(Record(kind, name, f"{path}:{name}", path.name, version, "file"))
        return catalog

    def reread(self) -> None:
        """Read settings and distributions anew when they are next needed."""
        vars(self).pop("settings", None)
        vars(self).pop("catalog", None)
        for registry in self._registries.values():
            vars(registry).pop("_discovered", None)

    @property
    def loader(self) -> Loader:
        """Loader of backends. Made on first use: listing needs neither it nor pluggy."""
        with self._lock:
            if self._loader is None:
                from wtransfer.registry import hooks
                from wtransfer.registry.loading import Loader

                board, timeout_s = self._board or hooks.board, self.settings.load_timeout_s

                def record(kind: str, name: str) -> Record:
                    return self.registry(kind).record(name)

                for each in self.settings.unmatched(self.catalog):
                    logger.warning("%s: %s", each.distribution, each.problem)
                self._loader = Loader(board, record, timeout_s, self.catalog)
                board.register(self._loader)
            return self._loader


host = Host()
"""Host of this process; reads nothing before it is asked."""


def registry(word: str) -> Registry:
    """Return the process's registry of a kind: engines, connectors, specs or trainers."""
    return host.registry(word)


def add_file(kind: str, place: str) -> str:
    """Let a class of a file be a backend, here and in the processes that this one will start.

    It is imported when its name is first used, as any other; pins and lists hold for it.

    Args:
        kind: ``engines``, ``connectors`` or ``specs``.
        place: ``path/file.py:Class``.

    Returns:
        The name of the backend: that of the class.

    Raises:
        PluginSettingError: The place has another form, there is no such file, its path cannot stand
            in the variable, or the name is another backend's.
    """
    found = re.fullmatch(r"(.+\.py):(\w+)", place)
    if found is None:
        raise PluginSettingError(
            f"{place!r:.200} names no class of a file; expected for example ./my_engine.py:MyEngine"
        )
    try:
        path = Path(found[1]).resolve()
        is_file = path.is_file()
    except (OSError, ValueError, RuntimeError) as error:
        # Too long a path, one with a null character, or a circle of links.
        raise PluginSettingError(
            f"no file can have the path {place!r:.200}: {error!s:.200}"
        ) from error
    if not is_file:
        raise PluginSettingError(f"there is no file {path}")
    if "," in str(path) or not str(path).isprintable():
        raise PluginSettingError(
            f"the path {str(path)!r} has a comma or a control character, which {FILES} cannot hold"
        )
    name = found[2]
    owner = _owner(host.registry(kind), name, path.name)
    if owner is not None:
        raise PluginSettingError(
            f"{name!r} of {path} has the name of {owner}, which would be used: rename the class"
        )
    known = _split(os.environ.get(FILES, ""))
    os.environ[FILES] = ",".join(dict.fromkeys([*known, f"{kind}:{path}:{name}"]))
    host.reread()
    return name


def _owner(registry: Registry, name: str, file: str) -> str | None:
    """Return what a name means already, unless that is a file or a pin chooses this one."""
    if registry.registered(name):
        return f"a {registry.kind.noun} that is registered at run time"
    pin = host.settings.pins.get((registry.kind.word, fold(name)))
    if pin is not None and canonical(pin) == canonical(file):
        return None
    for record, address, _ in registry.listed():
        if record.origin != "file" and address is not None and fold(record.name) == fold(name):
            return f"the {record.origin} {registry.kind.noun} {record}"
    return None
