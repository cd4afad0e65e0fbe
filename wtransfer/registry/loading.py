"""Load a backend: once, within a deadline, checked, so that its failure affects no other.

A plug-in is imported on a thread of its own. An import cannot be interrupted: one that does not end
is left behind. A hanging import holds the import locks of its own modules only, so that all others
can still be imported, and its daemon thread ends with the process at the latest. A plug-in must
therefore not rely on being imported in the main thread. A plug-in that does (to install a signal
handler, say) needs ``WTRANSFER_LOAD_TIMEOUT_S=0``: then it is imported in the calling thread,
without a deadline.

Beyond protection: a plug-in that ends the process while it is imported (``os._exit``, a crash in
native code), and one that hangs there while it holds the interpreter lock.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import pkgutil
import re
import sys
import threading
import traceback
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import InvalidRequirement, Requirement

from wtransfer.errors import (
    PluginBrokenError,
    PluginError,
    PluginIncompatibleError,
    PluginTypeError,
    StallError,
    WTransferError,
)
from wtransfer.registry.discovery import CORE, Record, canonical, digest_of, installed
from wtransfer.registry.hooks import hookimpl

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.registry.discovery import Catalog, Kind
    from wtransfer.registry.hooks import PluginManager

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""Environment variable that keeps torch from loading device backends of other distributions."""

_VALUE = re.compile(r"(?P<module>\w+(\.\w+)*)\s*:\s*(?P<attr>\w+(\.\w+)*)\s*(\[[^\]]*\])?")


class Loader:
    """Loads records and remembers the outcome, be it a class or a failure.

    The loader is itself registered for hooks, and answers ``wtransfer_load`` after every
    application.

    Args:
        board: Asked and notified; modules of backends are registered with it.
        record: Returns the record of a kind and a name.
        timeout_s: Seconds that an import may take; 0: no deadline.
        catalog: Catalog of the installed: our own version, to check what plug-ins require (None:
            not checked), and the distributions that could not be read.
    """

    def __init__(
        self,
        board: PluginManager,
        record: Callable[[str, str], Record],
        timeout_s: float,
        catalog: Catalog,
    ) -> None:
        self._board = board
        self._record = record
        self._timeout_s = timeout_s
        self._catalog = catalog
        self._outcomes: dict[Record, type | PluginError] = {}
        self._locks: dict[Record, threading.RLock] = {}
        self._own_answers: dict[tuple[str, str], type] = {}
        self._torch_error: BaseException | None = None

    @hookimpl(trylast=True)
    def wtransfer_load(self, kind: str, name: str) -> type:
        """Load the backend that is registered or installed under a name."""
        cls = self.load(self._record(kind, name))
        self._own_answers[kind, name] = cls
        return cls

    def ask(self, kind: Kind, name: str) -> tuple[type, Record | None]:
        """Call the hook ``wtransfer_load``.

        Returns:
            The class, and a record where an application's hook gave the answer.

        Raises:
            PluginError: There is no such class, for one of the six reasons.
        """
        try:
            answer = self._board.hook.wtransfer_load(kind=kind.word, name=name)
        except WTransferError:
            raise
        except Exception as error:
            raise PluginBrokenError(
                f"The application's wtransfer_load hook failed for the {kind.noun} {name!r}: "
                f"{type(error).__name__}: {error}.",
                kind=kind.word,
                name=name,
            ) from error
        own = self._own_answers.get((kind.word, name))
        if own is not None and answer is own:
            return own, None
        is_class = isinstance(answer, type)
        value = f"{answer.__module__}:{answer.__qualname__}" if is_class else repr(answer)
        record = Record(kind, name, value, None, None, "application", target=answer)
        _check_class(record, answer)  # before `load`: another object may have no hash
        return self.load(record), record

    def load(self, record: Record) -> type:
        """Load the class of a record; repeats give the same class, or fail with the same cause.

        Raises:
            PluginIncompatibleError: Its distribution requires another version of wtransfer.
            PluginBrokenError: The backend cannot be imported, or not in time.
            PluginTypeError: The backend does not meet the requirements of its kind.
        """
        # One lock for each record: a plug-in that hangs delays callers of its own name, within the
        # deadline, and no others. setdefault is atomic, so all threads get one lock.
        with self._locks.setdefault(record, threading.RLock()):
            first = record not in self._outcomes
            if first:
                try:
                    self._outcomes[record] = self._load(record)
                except PluginError as error:
                    # The traceback would keep our frames alive; the cause keeps the plug-in's.
                    self._outcomes[record] = error.with_traceback(None)
            outcome = self._outcomes[record]
        if isinstance(outcome, PluginError):
            # A copy: raising one object in several threads would mix their tracebacks.
            raise copy.copy(outcome) from outcome.__cause__
        if first:
            self._board.notify(
                "wtransfer_backend_loaded",
                kind=record.kind.word,
                name=record.name,
                cls=outcome,
                distribution=record.distribution,
                version=record.version,
            )
        return outcome

    def check_torch(self, record: Record) -> None:
        """Import torch for a backend that was loaded: one may be loaded without, and not used.

        Raises:
            PluginBrokenError: Torch cannot be imported, or not in time.
        """
        self._import(replace(record, value="torch:Tensor"))

    def _load(self, record: Record) -> type:
        self._check_requirements(record)
        if record.target is not None:
            return _check_class(record, record.target)
        cls = _check_class(record, self._import(record))
        # The module, never the class: of a class, `self` would count as an argument of the hook.
        module = sys.modules.get(cls.__module__)
        if module is not None:
            try:
                self._board.register_backend(module)
            except PluginTypeError as error:
                raise record.error(PluginTypeError, f"cannot be used: {error.message}.") from error
        return cls

    def _check_requirements(self, record: Record) -> None:
        """Compare our version with the requirements of the plug-in's distribution.

        Done before the import, which could only fail in a less helpful way.
        """
        installed_version = self._catalog.core_version
        if record.source is None or installed_version is None:
            return
        for text in record.source.requires or []:
            named = re.match(r"\s*([\w.-]*)", text)
            if named is None or canonical(named[1]) != CORE:
                continue
            try:
                requirement = Requirement(text)
            except InvalidRequirement as error:
                problem = f"cannot be used: its requirement {text!r} cannot be read."
                raise record.error(PluginBrokenError, problem) from error
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            if not requirement.specifier.contains(installed_version, prereleases=True):
                raise record.error(
                    PluginIncompatibleError,
                    f"needs wtransfer{requirement.specifier}, and wtransfer {installed_version} is "
                    f"installed: install a release of {record.distribution!r} that fits, or that "
                    "wtransfer.",
                )

    def _import(self, record: Record) -> object:
        """Import the object that a record names.

        Raises:
            PluginBrokenError: The value names no object; the import raised any exception, exited,
                or did not end.
        """
        place = _VALUE.fullmatch(record.value.strip())
        if place is None and record.origin != "file":
            problem = f"its place {record.value!r} is not of the form 'module:Class'."
            raise record.error(PluginBrokenError, f"cannot be loaded: {problem}")
        found: object = None
        error: BaseException | None = None

        def run() -> None:
            nonlocal found, error
            try:
                if place is None:
                    found = _from_file(record)
                else:
                    found = pkgutil.resolve_name(f"{place['module']}:{place['attr']}")
            except BaseException as raised:  # SystemExit, too: a plug-in must not end the process
                error = raised

        if self._timeout_s == 0:
            run()
        else:
            thread = threading.Thread(
                target=run, name=f"wtransfer-import-{record.name}", daemon=True
            )
            thread.start()
            thread.join(self._timeout_s)
            if thread.is_alive():
                frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001
                stack = traceback.extract_stack(frame)[-1:] if frame else []
                where = "".join(f"{at.filename}:{at.lineno} in {at.name}" for at in stack)
                raise record.error(
                    PluginBrokenError,
                    f"did not finish importing {record.value!r} within {self._timeout_s:g} s "
                    f"(WTRANSFER_LOAD_TIMEOUT_S); it is at {where or 'its end'}. It is not tried "
                    "again in this process.",
                ) from StallError(
                    f"importing {record.value!r} did not end", seconds=self._timeout_s
                )
        if error is None:
            return found
        is_missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
        if is_missing or "<module>" in _functions_of_torch(error):
            # Torch cannot be imported twice: later tries fail for reasons that mislead.
            error = self._torch_error = self._torch_error or error
            problem = _explain_torch(error, self._catalog)
            raise record.error(PluginBrokenError, f"cannot be loaded: {problem}") from error
        problem = f"from {record.value!r}: {type(error).__name__}: {error}."
        raise record.error(
            PluginBrokenError, f"cannot be loaded {problem} Only this name is affected."
        ) from error


def _from_file(record: Record) -> object:
    """Import the file of a record, and return the object that the record names.

    The module has a name of its own, which no other import can mean: a file may be called as a
    module of Python is. Its code is that of the recorded digest, which peers compare.

    Raises:
        ImportError: The file cannot be read, or has changed since its digest was recorded.
    """
    path, _, attr = record.value.rpartition(":")
    name = f"wtransfer_file_{re.sub(r'[^0-9A-Za-z]', '_', Path(path).stem)}_{record.version}"
    module = sys.modules.get(name)
    if module is None:
        try:
            content = Path(path).read_bytes()
        except OSError as error:
            problem = f"WTRANSFER_PLUGIN_FILES names a file that cannot be read: {error}"
            raise ImportError(problem) from error
        if digest_of(content) != record.version:
            raise ImportError(f"{path} has changed since it was named: start the process again")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            exec(compile(content, path, "exec", dont_inherit=True), vars(module))  # noqa: S102
        except BaseException:
            del sys.modules[name]
            raise
    return getattr(module, attr)


def _check_class(record: Record, loaded: object) -> type:
    """Return the loaded object, if it is a class that its kind can use.

    Raises:
        PluginTypeError: Not a class, methods or the base missing, or abstract methods left.
    """
    kind, problem = record.kind, ""
    base = " or ".join(kind.bases)
    if not isinstance(loaded, type):
        problem = f"an object of type {type(loaded).__name__}; expected a class like {base}"
    elif missing := [each for each in kind.methods if not callable(getattr(loaded, each, None))]:
        problem = (
            f"the class {loaded.__qualname__} without {', '.join(missing)}; expected "
            f"{', '.join(kind.methods)}, as in {base}"
        )
    elif not kind.methods and not issubclass(loaded, tuple(map(pkgutil.resolve_name, kind.bases))):
        problem = f"the class {loaded.__qualname__}; expected a subclass of {base}"
    elif inspect.isabstract(loaded):
        left = ", ".join(sorted(getattr(loaded, "__abstractmethods__", ())))
        problem = f"the class {loaded.__qualname__} with abstract methods left: {left}"
    else:
        return loaded
    raise record.error(PluginTypeError, f"cannot be used: {record.value!r} is {problem}.")


def _functions_of_torch(error: BaseException) -> set[str]:
    """Return the functions of torch's top module through which an error passed."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return {each.f_code.co_name for each in frames if each.f_globals.get("__name__") == "torch"}


def _explain_torch(error: BaseException, catalog: Catalog) -> str:
    """Return why torch cannot be imported, and what to do."""
    cause = error.__cause__ or error
    spelled = f"{type(cause).__name__}: {cause}"
    if "_import_device_backends" not in _functions_of_torch(error):
        return f"`import torch` itself fails: {spelled}. Every backend that needs it is affected."
    # Entry points that cannot be read make torch fail, too.
    suspects = [each.distribution for each in catalog.diagnostics]
    for distribution in installed():
        with contextlib.suppress(Exception):
            if any(point.group == "torch.backends" for point in distribution.entry_points):
                suspects.append(distribution.name)
    return (
        "`import torch` itself fails while torch loads the device backends of other "
        f"distributions: {spelled}. Concerned: {', '.join(dict.fromkeys(suspects))}. Every backend "
        f"that needs torch is affected. Repair or uninstall the distribution, or set {AUTOLOAD}=0, "
        "and start the process again."
    )
