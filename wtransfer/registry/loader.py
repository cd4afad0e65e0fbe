"""Load a backend: once, within a deadline, checked, and so that its failure harms nobody else.

What cannot be survived: a plug-in that ends the process while it is imported (``os._exit``, a
crash in native code), and one that hangs there while it holds the interpreter lock.
"""

from __future__ import annotations

import copy
import sys
import threading
from typing import TYPE_CHECKING, Protocol

from wtransfer.errors import PluginBrokenError, PluginError, PluginTypeError, WTransferError
from wtransfer.registry.checks import check_class, check_requirements
from wtransfer.registry.discovery import Record
from wtransfer.registry.hooks import Board, hookimpl
from wtransfer.registry.imports import import_within

if TYPE_CHECKING:
    from wtransfer.registry.kinds import Kind


class Finder(Protocol):
    """Whoever knows which record a name means."""

    @property
    def kind(self) -> Kind:
        """The kind of what it finds."""

    def record(self, name: str) -> Record:
        """Return the record; raises `PluginError`."""


class Loader:
    """Loads records and remembers the outcome, be it a class or a failure.

    Args:
        board: Who is told, and where modules of backends are registered.
        timeout_s: Seconds that an import may take; 0: no deadline.
        core_version: Our own version, for what plug-ins require; None: not checked.
    """

    def __init__(self, board: Board, timeout_s: float, core_version: str | None) -> None:
        self._board = board
        self._timeout_s = timeout_s
        self._core_version = core_version
        self._outcomes: dict[Record, type | PluginError] = {}
        self._locks: dict[Record, threading.RLock] = {}

    def ask(self, finder: Finder, name: str) -> tuple[type, Record | None]:
        """Let the hook decide which class a name means.

        Returns:
            The class, and a record where an application's hook gave the answer.

        Raises:
            PluginError: Nobody can load it, for one of the six reasons.
        """
        kind = finder.kind
        try:
            answer = self._board.manager.hook.wtransfer_load(kind=kind.word, name=name)
        except WTransferError:
            raise
        except Exception as error:
            raise PluginBrokenError(
                f"The application's wtransfer_load hook failed for the {kind.noun} {name!r}: "
                f"{type(error).__name__}: {error}.",
                kind=kind.word,
                name=name,
            ) from error
        if any(answer is outcome for outcome in self._outcomes.values()):
            return answer, None
        record = Record(kind.word, name, _place(answer), None, None, "application", answer)
        check_class(kind, record, answer)
        return self.load(kind, record), record

    def load(self, kind: Kind, record: Record) -> type:
        """Load what a record names; repeats give the same class, or fail with the same cause.

        Raises:
            PluginIncompatibleError: Its distribution wants another version of wtransfer.
            PluginBrokenError: It cannot be imported, or not in time.
            PluginTypeError: It is not what its kind requires.
        """
        # One lock for each record: a plug-in that hangs holds up those who ask for it, within the
        # deadline, and nobody else. setdefault is atomic, so all threads see one lock.
        with self._locks.setdefault(record, threading.RLock()):
            first = record not in self._outcomes
            if first:
                self._outcomes[record] = self._attempt(kind, record)
            outcome = self._outcomes[record]
        if isinstance(outcome, PluginError):
            # A copy: raising one object in several threads would mix their tracebacks.
            raise copy.copy(outcome) from outcome.__cause__
        if first:
            self._tell(record, outcome)
        return outcome

    def _attempt(self, kind: Kind, record: Record) -> type | PluginError:
        try:
            return self._load(kind, record)
        except PluginError as error:
            # The traceback would keep our own frames alive; the cause keeps the plug-in's.
            return error.with_traceback(None)

    def _load(self, kind: Kind, record: Record) -> type:
        check_requirements(kind, record, self._core_version)
        if record.target is not None:
            return check_class(kind, record, record.target)
        cls = check_class(kind, record, import_within(kind, record, self._timeout_s))
        self._let_module_listen(kind, record, cls)
        return cls

    def _let_module_listen(self, kind: Kind, record: Record, cls: type) -> None:
        # The module, never the class: of a class, `self` would count as an argument of the hook.
        module = sys.modules.get(cls.__module__)
        if module is None:
            return
        try:
            self._board.register_backend(module)
        except PluginTypeError as error:
            raise PluginTypeError(
                f"The {kind.noun} {record} cannot be used: {error.message}.", **record.facts
            ) from error

    def _tell(self, record: Record, cls: type) -> None:
        self._board.notify(
            "wtransfer_backend_loaded",
            kind=record.kind,
            name=record.name,
            cls=cls,
            distribution=record.distribution,
            version=record.version,
        )


class Answerer:
    """The plug-in object that answers ``wtransfer_load`` with what is registered or installed.

    Args:
        loader: Loads.
        finders: Kind's word -> whoever knows its records.
    """

    def __init__(self, loader: Loader, finders: dict[str, Finder]) -> None:
        self._loader = loader
        self._finders = finders

    @hookimpl(trylast=True)
    def wtransfer_load(self, kind: str, name: str) -> type:
        """Load the backend, or raise what is known about why it cannot be."""
        finder = self._finders[kind]
        return self._loader.load(finder.kind, finder.record(name))


def _place(answer: object) -> str:
    if isinstance(answer, type):
        return f"{answer.__module__}:{answer.__qualname__}"
    return repr(answer)
