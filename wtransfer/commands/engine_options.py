"""``-o key=value``: options of an engine, in the types that its options class declares."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, get_type_hints

import click
import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence


def typed_options(engine: str, info_cls: Any, pairs: Sequence[str]) -> dict[str, Any]:
    """Read options.

    Args:
        engine: Engine name, for errors.
        info_cls: Class of its options.
        pairs: ``key=value``, each.

    Returns:
        Option -> value.

    Raises:
        click.UsageError: Not a pair, a field that the engine does not have, a value of another
            type, or a field that must be given and is not; the text lists the fields.
    """
    hints = _hints(info_cls)
    options: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or name not in hints:
            problem = "has no such option" if equals else "wants options as key=value"
            raise click.UsageError(f"-o {pair}: engine {engine!r} {problem}; {_fields(info_cls)}")
        options[name] = _value(pair, text, hints[name], info_cls)
    missing = [f"-o {name}=..." for name in _required(info_cls) if name not in options]
    if missing:
        raise click.UsageError(f"engine {engine!r} needs {', '.join(missing)}; {_fields(info_cls)}")
    return options


def _required(info_cls: Any) -> list[str]:
    none = dataclasses.MISSING
    return [
        each.name for each in _settable(info_cls) if each.default is each.default_factory is none
    ]


def _value(pair: str, text: str, hint: Any, info_cls: Any) -> Any:
    try:
        return msgspec.convert(text, hint, strict=False)
    except msgspec.ValidationError as error:
        raise click.UsageError(f"-o {pair}: {error}; {_fields(info_cls)}") from error
    except TypeError:
        # A type that only the engine knows how to make of a text.
        return text


def _hints(info_cls: Any) -> dict[str, Any]:
    try:
        known = get_type_hints(info_cls)
    except (NameError, TypeError):
        # Hints that exist for type checkers only.
        known = {}
    return {field.name: known.get(field.name, str) for field in _settable(info_cls)}


def _settable(info_cls: Any) -> list[dataclasses.Field[Any]]:
    fields = dataclasses.fields(info_cls) if dataclasses.is_dataclass(info_cls) else ()
    # The one process that pushes is rank 0, which sends.
    return [field for field in fields if field.init and field.name != "rank"]


def _fields(info_cls: Any) -> str:
    hints = _hints(info_cls)
    shown = (f"{name} ({getattr(hint, '__name__', hint)})" for name, hint in hints.items())
    return f"it has: {', '.join(shown) or 'none'}"
