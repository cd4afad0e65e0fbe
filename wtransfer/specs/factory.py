"""Make offloading specs by name. A thin face over the registry.

Source: names, signatures and texts are those of vLLM's factory, of the seed and the current one.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from typing import TYPE_CHECKING, Any

from wtransfer.errors import OffloadingOptionError
from wtransfer.registry import hooks
from wtransfer.registry.resolve import registry
from wtransfer.specs.interface import Tier
from wtransfer.specs.seed_adapter import (
    adapt_spec,
    construct,
    extra_config_of,
    is_serving_config,
)
from wtransfer.specs.tier_spec import tier_spec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wtransfer.specs.interface import OffloadingSpec

logger = logging.getLogger(__name__)

DEFAULT = "CPUOffloadingSpec"
"""Name of the spec where none is given."""
TIERING = "TieringOffloadingSpec"
"""Name of the spec over the tier that the option ``tier`` names."""


class OffloadingSpecFactory:
    """Offloading specs by name."""

    @classmethod
    def register_spec(cls, name: str, module_path: str, class_name: str) -> None:
        """Register a spec at run time; its module is imported on first use.

        Args:
            name: Its name, compared exactly as written.
            module_path: Module of the class.
            class_name: Name of the class.

        Raises:
            AlreadyRegisteredError: The name is registered or a built-in's; a `ValueError`.
        """
        registry("specs").register(name, module_path, class_name)

    @classmethod
    def get_spec_cls(cls, extra_config: Mapping[str, Any]) -> type[OffloadingSpec]:
        """Return the class that options name; for a tier, the spec over it.

        Args:
            extra_config: ``spec_name``, by default ``CPUOffloadingSpec``, is looked up; where
                no backend has the name, a class of that name in ``spec_module_path`` is taken.
                ``tier`` with no ``spec_name``, or ``TieringOffloadingSpec``, is the name of a tier.

        Raises:
            UnknownBackendError: No backend has this name, no module is named; a `ValueError`.
            PluginTypeError: The class is no subclass of `OffloadingSpec` or `Tier`; an
                `AssertionError`, too.
            PluginError: The class cannot be loaded, for one of the other reasons.
            OffloadingOptionError: ``tier`` names a spec, or another tier than ``spec_name``.
        """
        return _spec_cls(extra_config, DEFAULT)

    @classmethod
    def create_spec(cls, config: Any, kv_cache_config: Any = None) -> OffloadingSpec:
        """Make the spec that a config names.

        The signature of the constructor decides its arguments; either kind of config is
        converted into the other where that is needed. Hooks of the spec, and of the manager and the
        worker that it makes, are called until their ``shutdown``.

        Args:
            config: A serving engine's config, with ``kv_transfer_config``, as in the seed; or an
                `OffloadingConfig`, as in the current vLLM.
            kv_cache_config: Shape of the KV cache, with the former.

        Returns:
            The spec. A host that gives an `OffloadingConfig` gets one of the current API, also
            where the class has the seed's; any other host gets the object as it was made.

        Raises:
            KVTransferConfigError: The config has no ``kv_transfer_config``; an `AssertionError`,
                too.
            PluginError: As for `get_spec_cls`.
        """
        return create_spec(config, kv_cache_config, DEFAULT)


def create_spec(config: Any, kv_cache_config: Any, default: str) -> OffloadingSpec:
    """Make a spec as `OffloadingSpecFactory.create_spec` does, with another default name."""
    extra_config = extra_config_of(config)
    spec_cls = _spec_cls(extra_config, default)
    logger.info("Creating offloading spec with name: %s", extra_config.get("spec_name", default))
    spec = construct(spec_cls, config, kv_cache_config)
    _observe(spec)
    return spec if is_serving_config(config) else adapt_spec(spec, config)


def _spec_cls(extra_config: Mapping[str, Any], default: str) -> type[OffloadingSpec]:
    name: Any = extra_config.get("spec_name", default)
    tier: Any = extra_config.get("tier")
    by_tier = tier is not None and extra_config.get("spec_name", TIERING) == TIERING
    found = registry("specs").get_or_import(
        tier if by_tier else name, extra_config.get("spec_module_path")
    )
    if by_tier and not issubclass(found, Tier):
        raise OffloadingOptionError(f"tier={tier!r} is an offloading spec, and no tier")
    if not issubclass(found, Tier):
        return found
    if tier is not None and not by_tier and tier != name:
        raise OffloadingOptionError(f"spec_name={name!r} and tier={tier!r}: name one of the two")
    return tier_spec(found)


def _observe(spec: Any) -> None:
    """Call the hooks of a spec and of its sides, of each side until its ``shutdown``.

    Hooks of the spec are called until the ``shutdown`` of either side.
    """
    if hooks.board.hears(spec):
        hooks.board.register_backend(spec)

    def observed(make: Callable[..., Any]) -> Callable[..., Any]:
        known: list[Any] = []

        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            side = make(*args, **kwargs)
            # The same object in every call: its shutdown is replaced once.
            if hasattr(side, "shutdown") and not any(side is each for each in known):
                known.append(side)
                hooks.board.attach(side)
                hooks.board.attach(side, spec)
            return side

        return made

    for name in ("get_manager", "get_worker"):
        # An object without a dictionary cannot have its sides registered.
        with contextlib.suppress(AttributeError):
            setattr(spec, name, observed(getattr(spec, name)))
