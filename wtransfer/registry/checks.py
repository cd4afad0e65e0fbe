"""Judge a backend: does its distribution fit this wtransfer, and is it what its kind requires."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import TYPE_CHECKING

from wtransfer.errors import PluginBrokenError, PluginIncompatibleError, PluginTypeError
from wtransfer.registry.discovery import Record, canonical
from wtransfer.registry.kinds import CORE, Kind

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def check_requirements(kind: Kind, record: Record, core_version: str | None) -> None:
    """Compare what the plug-in's distribution requires of us with what is installed.

    Done before its import, which could only fail in a less helpful way.

    Raises:
        PluginIncompatibleError: It wants another version.
        PluginBrokenError: What it requires cannot be read.
    """
    if record.source is None or core_version is None:
        return
    for text in record.source.requires or []:
        requirement = _ours(kind, record, text)
        if requirement and not requirement.specifier.contains(core_version, prereleases=True):
            raise PluginIncompatibleError(
                f"The {kind.noun} {record} needs wtransfer{requirement.specifier}, and wtransfer "
                f"{core_version} is installed: install a release of {record.distribution!r} that "
                "fits, or that wtransfer.",
                **record.facts,
            )


def _ours(kind: Kind, record: Record, text: str) -> Requirement | None:
    """Return the requirement if it is about us and holds in this environment."""
    from packaging.requirements import InvalidRequirement, Requirement

    named = re.match(r"\s*([\w.-]+)", text)
    if named is None or canonical(named[1]) != CORE:
        return None
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise PluginBrokenError(
            f"The {kind.noun} {record} cannot be used: its requirement {text!r} cannot be read.",
            **record.facts,
        ) from error
    applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    return requirement if applies else None


def check_class(kind: Kind, record: Record, loaded: object) -> type:
    """Return what was loaded, if it is a class that its kind can use.

    Raises:
        PluginTypeError: It is no class, misses methods or the base, or has abstract methods left.
    """
    problem = _problem(kind, loaded)
    if problem is not None:
        raise PluginTypeError(
            f"The {kind.noun} {record} cannot be used: {record.value!r} is {problem}.",
            **record.facts,
        )
    assert isinstance(loaded, type)
    return loaded


def _problem(kind: Kind, loaded: object) -> str | None:
    if not isinstance(loaded, type):
        return f"an object of type {type(loaded).__name__}; expected a class like {kind.base}"
    missing = [name for name in kind.methods if not callable(getattr(loaded, name, None))]
    if missing:
        return (
            f"the class {loaded.__qualname__} without {', '.join(missing)}; expected "
            f"{', '.join(kind.methods)}, as in {kind.base}"
        )
    if not kind.methods and not issubclass(loaded, _base(kind)):
        return f"the class {loaded.__qualname__}; expected a subclass of {kind.base}"
    left = sorted(getattr(loaded, "__abstractmethods__", ())) if inspect.isabstract(loaded) else []
    if left:
        return f"the class {loaded.__qualname__} with abstract methods left: {', '.join(left)}"
    return None


def _base(kind: Kind) -> type:
    module, _, name = kind.base.partition(":")
    base = getattr(importlib.import_module(module), name)
    assert isinstance(base, type)
    return base
