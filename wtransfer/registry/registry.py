"""From a name to a class: one registry for each kind, all of them over one host.

The order: an explicit class, which needs no registry, then the pin, what was registered at run
time, the built-in, the only one discovered.
"""

from __future__ import annotations

import os
import threading
from functools import cached_property
from typing import TYPE_CHECKING, Any

from wtransfer.errors import AlreadyRegisteredError, RegistrationError, UnknownBackendError
from wtransfer.registry.discovery import Catalog, Record, discover, installed
from wtransfer.registry.kinds import KINDS, Kind
from wtransfer.registry.policy import Policy
from wtransfer.registry.shelf import Shelf

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer.registry.discovery import Distributions
    from wtransfer.registry.hooks import Board
    from wtransfer.registry.loader import Loader


class Host:
    """What this process can find, under the operator's policy; both are read once, when needed.

    Args:
        environ: Where the policy stands; the process's environment if None.
        distributions: Returns the distributions to read.
        board: Who is told and asked; the process's own if None. One host for each board.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        distributions: Distributions = installed,
        board: Board | None = None,
    ) -> None:
        self._environ = os.environ if environ is None else environ
        self._distributions = distributions
        self._board = board
        self._lock = threading.RLock()
        self._loader: Loader | None = None
        self._registries = {word: Registry(kind, self) for word, kind in KINDS.items()}

    def registry(self, word: str) -> Registry:
        """Return the registry of a kind: engines, connectors, specs or trainers."""
        return self._registries[word]

    @cached_property
    def policy(self) -> Policy:
        """The operator's decisions.

        Raises:
            PluginSettingError: They cannot be read.
        """
        return Policy.read(self._environ)

    @cached_property
    def catalog(self) -> Catalog:
        """What is installed."""
        return discover(self._distributions)

    @property
    def loader(self) -> Loader:
        """Whoever loads. Made on first use: listing needs neither it nor pluggy."""
        with self._lock:
            if self._loader is None:
                self._loader = self._make_loader()
            return self._loader

    def _make_loader(self) -> Loader:
        from wtransfer.registry import hooks
        from wtransfer.registry.loader import Answerer, Loader

        board = self._board or hooks.board
        loader = Loader(board, self.policy.load_timeout_s, self.catalog.core_version)
        board.register(Answerer(loader, dict(self._registries)))
        return loader


class Registry:
    """The backends of one kind.

    Args:
        kind: The kind.
        host: What is installed, and who loads it.
    """

    def __init__(self, kind: Kind, host: Host) -> None:
        self.kind = kind
        self._host = host
        self._lock = threading.Lock()
        self._loaded: dict[str, type[Any]] = {}
        self._registered: dict[str, Record] = {}
        self._answered: dict[str, Record] = {}

    def get(self, name: str) -> type[Any]:
        """Return the class that a name means; loaded on first use.

        Raises:
            UnknownBackendError: Nobody offers it (`PluginNotInstalledError`: we know who would).
            PluginBlockedError: The operator excludes it.
            PluginAmbiguousError: Several distributions offer it.
            PluginBrokenError: It cannot be imported.
            PluginTypeError: It is not what the kind requires.
            PluginIncompatibleError: It wants another version of wtransfer.

        Cost:
            A repeated look-up is one dictionary access.
        """
        cls = self._loaded.get(name)
        return self._first(name) if cls is None else cls

    def get_or_import(self, name: str, module_path: str | None) -> type[Any]:
        """Return the class that a name means, else the class of that name in a module.

        Args:
            name: The name; as the name of a class it is used exactly as written.
            module_path: Where to look if nobody offers the name; None: nowhere.

        Raises:
            PluginError: As for `get`.
        """
        try:
            return self.get(name)
        except UnknownBackendError:
            if not module_path:
                raise
        place = f"{module_path}:{name}"
        return self.load(Record(self.kind.word, name, place, None, None, "module path"))

    def record(self, name: str) -> Record:
        """Return what is known of a name without importing anything.

        Raises:
            UnknownBackendError: Nobody offers it.
            PluginBlockedError: The operator excludes it.
            PluginAmbiguousError: Several distributions offer it.
        """
        name = str(name)  # a config's backend may be anything; the error shall say what it is
        return (
            self._answered.get(name)
            or self.shelf.pinned(name, self._registered)
            or self._registered.get(name)
            or self.shelf.find(name, self._registered)
        )

    def names(self) -> list[str]:
        """Return every name that can be used, without importing anything."""
        return sorted({*self._registered, *self.shelf.names()})

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
        record = self._described(name, module_path_or_cls, class_name)
        with self._lock:
            if name in self._taken():
                raise AlreadyRegisteredError(
                    self.kind.taken.format(name=name), kind=self.kind.word, name=name
                )
            self._registered[name] = record
            # What the name meant before, if anything, it means no more.
            self._loaded.pop(name, None)
            self._answered.pop(name, None)

    def registered(self, name: str) -> bool:
        """Return whether the name was registered at run time."""
        return name in self._registered

    def load(self, record: Record) -> type[Any]:
        """Load what a record of this kind names, guarded and remembered; raises as `get` does."""
        return self._host.loader.load(self.kind, record)

    @cached_property
    def shelf(self) -> Shelf:
        """What is discovered."""
        return Shelf(self.kind, self._host.catalog.of(self.kind), self._host.policy)

    def _first(self, name: str) -> type[Any]:
        before = self._registered.get(name)
        cls, answered = self._host.loader.ask(self, name)
        with self._lock:
            # Registered meanwhile: this answer was right when it was asked for, and is not kept.
            if self._registered.get(name) is before:
                self._loaded[name] = cls
                if answered is not None:
                    self._answered[name] = answered
        return cls

    def _taken(self) -> set[str]:
        built_in = (r.name for r in self._host.catalog.of(self.kind) if r.origin == "built-in")
        return {*self._registered, *self.kind.reserved, *built_in}

    def _described(self, name: str, place: str | type, class_name: str | None) -> Record:
        facts = {"kind": self.kind.word, "name": name}
        if not isinstance(name, str) or not isinstance(place, (str, type)):
            raise RegistrationError(
                f"{self.kind.word} takes a name with a class or a module path; got {name!r} with "
                f"{place!r}",
                **facts,
            )
        if isinstance(place, type):
            value = f"{place.__module__}:{place.__qualname__}"
            return Record(self.kind.word, name, value, None, None, "run time", place)
        if class_name is None:
            raise RegistrationError(
                "class_name is required when registering with module path", **facts
            )
        return Record(self.kind.word, name, f"{place}:{class_name}", None, None, "run time")


host = Host()
"""The process's own; it reads nothing before it is asked."""


def registry(word: str) -> Registry:
    """Return the process's registry of a kind: engines, connectors, specs or trainers."""
    return host.registry(word)
