"""Do something with a module when it is imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType


def on_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with a module: now if it is there, else when somebody has imported it.

    vLLM's front end runs its plug-ins before it imports the engine core, and may fork that from
    itself, where plug-ins are not run again. Importing it here would cost every process seconds.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Steps in once: finds the module as the others do, and has its loader tell us."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002  # the finder's contract
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _tell_after(spec.loader, self._then)
        return spec


def _tell_after(loader: importlib.abc.Loader, then: Callable[[ModuleType], None]) -> None:
    execute = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        execute(module)
        then(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]
