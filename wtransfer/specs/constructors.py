"""Which arguments a spec's constructor takes: read off its signature, never found out by trial.

A trial would run the constructor, and would take a `TypeError` of its own for an answer.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from inspect import Parameter
from typing import TYPE_CHECKING, Any, Literal

from wtransfer.errors import PluginTypeError
from wtransfer.specs.interface import OffloadingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_FIRST = ("config", "vllm_config")
_SECOND = "kv_cache_config"
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_BOTH = 2

Style = Literal["seed", "today"]
"""``(config, kv_cache_config)``, or an `OffloadingConfig` alone."""


@dataclass(frozen=True)
class Constructor:
    """How a class is called."""

    style: Style
    """What it takes."""
    keywords: tuple[str, ...] = ()
    """Those of its arguments, the last ones, that go by name."""

    def call(self, cls: type[OffloadingSpec], arguments: Sequence[Any]) -> OffloadingSpec:
        """Make an object.

        Args:
            cls: The class.
            arguments: One or two, as the style is.
        """
        num_positional = len(arguments) - len(self.keywords)
        named = dict(zip(self.keywords, arguments[num_positional:], strict=True))
        return cls(*arguments[:num_positional], **named)


def constructor_of(cls: type[OffloadingSpec]) -> Constructor:
    """Return how a class of specs is called.

    A constructor that only hands its arguments on (``*args, **kwargs``), or cannot be read, is
    judged by the one that it inherits. Where none says anything, a spec with ``get_handlers`` is of
    the seed's style, and any other of today's.

    Raises:
        PluginTypeError: It wants more than specs are given.
    """
    for parameters in _signatures(cls):
        found = _judge(cls, parameters)
        if found is not None:
            return found
    return Constructor("seed" if hasattr(cls, "get_handlers") else "today")


def _signatures(cls: type) -> Iterator[list[Parameter]]:
    """Yield the parameters of whatever is called, from the class itself to what it inherits."""
    own: list[Callable[..., Any]] = []
    for base in cls.__mro__[: cls.__mro__.index(OffloadingSpec)]:
        own += [vars(base)[name] for name in ("__new__", "__init__") if name in vars(base)]
    if own or type(cls).__call__ is not type.__call__:
        # A metaclass or a decorator may say something else than the constructors.
        yield from _read(cls, skip=0)
    for function in own:
        yield from _read(getattr(function, "__func__", function), skip=1)


def _read(function: Callable[..., Any], skip: int) -> Iterator[list[Parameter]]:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return
    yield list(signature.parameters.values())[skip:]


def _judge(cls: type, parameters: list[Parameter]) -> Constructor | None:
    """Return how to call it; None where the signature does not say."""
    positional = [each for each in parameters if each.kind in _POSITIONAL]
    required = [each for each in positional if each.default is Parameter.empty]
    by_name = {each.name: each for each in parameters if each.kind is Parameter.KEYWORD_ONLY}
    keywords = tuple(name for name in (*_FIRST, _SECOND) if name in by_name)
    unknown = [
        name
        for name, each in by_name.items()
        if each.default is Parameter.empty and name not in keywords
    ]
    if unknown or len(required) > _BOTH:
        raise _unusable(cls, parameters)
    if len(required) == _BOTH or (len(positional) >= _BOTH and positional[1].name == _SECOND):
        return Constructor("seed")
    if _SECOND in by_name:
        return Constructor("seed", keywords[-1:] if positional else keywords)
    if any(each.kind is Parameter.VAR_POSITIONAL for each in parameters):
        return None
    if positional or keywords:
        return Constructor("today", () if positional else keywords[:1])
    if any(each.kind is Parameter.VAR_KEYWORD for each in parameters):
        return None
    raise _unusable(cls, parameters)


def _unusable(cls: type, parameters: list[Parameter]) -> PluginTypeError:
    names = ", ".join(str(each) for each in parameters)
    return PluginTypeError(
        f"The constructor of the offloading spec {cls.__module__}.{cls.__qualname__} takes "
        f"({names}); expected (config) with an OffloadingConfig, or (config, kv_cache_config).",
        kind="specs",
        name=cls.__qualname__,
    )
