"""The option ``--plugin`` of commands: a class of a file, without packaging."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import click

from wtransfer.errors import PluginError
from wtransfer.registry.resolve import add_file

if TYPE_CHECKING:
    from collections.abc import Callable

TCommand = TypeVar("TCommand", bound="Callable[..., Any]")


def plugin_option(kind: str) -> Callable[[TCommand], TCommand]:
    """Add ``--plugin``, which lets a class of a file be found by its name.

    Args:
        kind: ``engines``, ``connectors`` or ``specs``.
    """

    def add(_ctx: click.Context, _param: click.Parameter, place: str | None) -> None:
        if place is not None:
            try:
                add_file(kind, place)
            except PluginError as error:
                raise click.BadParameter(str(error)) from error

    return click.option(
        "--plugin",
        metavar="FILE.py:CLASS",
        expose_value=False,
        callback=add,
        help="Let a class of a file be found by its name: for a first try.",
    )
