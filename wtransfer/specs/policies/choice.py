"""From what a user writes to a policy's class."""

from __future__ import annotations

import difflib
import importlib
import inspect

from wtransfer.errors import OffloadingOptionError
from wtransfer.specs.policies.arc import ARCCachePolicy
from wtransfer.specs.policies.interface import CachePolicy
from wtransfer.specs.policies.lru import LRUCachePolicy

POLICIES: dict[str, type[CachePolicy]] = {"lru": LRUCachePolicy, "arc": ARCCachePolicy}
"""The built-in ones by name."""

_EXPECTED = f"expected one of {sorted(POLICIES)}, or 'module:Class'"


def policy_class(name: str) -> type[CachePolicy]:
    """Return the class that an option ``eviction_policy`` means.

    Args:
        name: ``lru``, ``arc``, or the place of a class of one's own, ``module:Class``.

    Raises:
        OffloadingOptionError: There is no such policy, or it is none.
    """
    if not isinstance(name, str):
        raise OffloadingOptionError(f"The eviction policy is {name!r}; {_EXPECTED}.")
    if name in POLICIES:
        return POLICIES[name]
    if ":" not in name:
        close = difflib.get_close_matches(name.lower(), POLICIES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise OffloadingOptionError(f"Unknown eviction policy {name!r}; {_EXPECTED}.{hint}")
    return _checked(name, _imported(name))


def _imported(name: str) -> object:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:
        raise OffloadingOptionError(
            f"The eviction policy {name!r} cannot be loaded: {type(error).__name__}: {error}."
        ) from error


def _checked(name: str, found: object) -> type[CachePolicy]:
    if not (isinstance(found, type) and issubclass(found, CachePolicy)):
        raise OffloadingOptionError(
            f"The eviction policy {name!r} is {found!r}; expected a subclass of "
            f"{CachePolicy.__module__}.{CachePolicy.__qualname__}."
        )
    if inspect.isabstract(found):
        left = ", ".join(sorted(found.__abstractmethods__))
        raise OffloadingOptionError(
            f"The eviction policy {name!r} has abstract methods left: {left}."
        )
    return found
