"""``wtransfer demo``: show the promises kept by real processes, and judge what was seen."""

from __future__ import annotations

import json
import sys
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from wtransfer.errors import WTransferError

NAMED_SIZES = {"tiny": 4.0, "small": 9.0, "medium": 40.0, "large": 150.0}
"""Word -> million parameters."""
MAX_MILLIONS = 10_000
"""Largest model, in million parameters."""
MIN_ROUNDS = 4
"""A round for an old version, one to kill in, one without the killed worker, one to rejoin."""
_WEIGHTS_OPTIONS = ("rounds", "millions")
_KV_OPTIONS = ("connector", "options")


def _millions(_ctx: click.Context, _param: click.Parameter, size: str) -> float:
    try:
        millions = NAMED_SIZES.get(size) or float(size)
    except ValueError:
        millions = float("nan")
    if not 0 < millions <= MAX_MILLIONS:  # false for nan as well
        raise click.BadParameter(
            f"model size {size!r} is neither one of {', '.join(NAMED_SIZES)} nor a number of "
            f"million parameters between 0 and {MAX_MILLIONS}"
        )
    return millions


def _key_values(_ctx: click.Context, _param: click.Parameter, pairs: tuple[str, ...]) -> Any:
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise click.UsageError(f"-o {pair}: options are key=value")
        try:
            options[key] = msgspec.json.decode(text)
        except msgspec.DecodeError:
            options[key] = text
    return options


@click.command()
@click.option(
    "--rounds",
    type=click.IntRange(min=MIN_ROUNDS),
    default=8,
    help="Number of rounds.",
    show_default=True,
)
@click.option(
    "--model-size",
    "millions",
    callback=_millions,
    default="small",
    metavar="SIZE",
    help="tiny, small, medium, large, or a number of million parameters.",
    show_default=True,
)
@click.option("--kv", is_flag=True, help="Move KV cache from a prefill to a decode instance.")
@click.option(
    "--connector",
    default="SharedMemoryConnector",
    metavar="NAME",
    help="Connector for the KV cache, with --kv: any that is installed.",
    show_default=True,
)
@click.option(
    "-o",
    "options",
    multiple=True,
    callback=_key_values,
    metavar="KEY=VALUE",
    help="Option of the connector, with --kv. Repeat.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, nothing else.")
@click.pass_context
def demo(
    ctx: click.Context,
    *,
    rounds: int,
    millions: float,
    kv: bool,
    connector: str,
    options: dict[str, Any],
    as_json: bool,
) -> None:
    """Train a small transformer while two worker processes generate text with it.

    Every round publishes the weights to both workers while they generate. In one round a worker is
    killed half way through the transfer. The exit status is 0 only if every receipt was right and
    every promise kept.

    With --kv, a prefill instance computes a long document, and a decode instance answers questions
    about it with the keys and values of the first, moved by a connector. The prefill instance is
    killed, and started again. The exit status is 0 only if every answer equals that of an instance
    that computes everything itself.
    """
    for param in ctx.command.params:
        is_foreign = param.name in (_WEIGHTS_OPTIONS if kv else _KV_OPTIONS)
        if is_foreign and ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"{param.opts[-1]} is an option of the demo {'without' if kv else 'with'} --kv"
            )
    try:
        if kv:
            from wtransfer.demo.kv import run_kv

            result = run_kv(connector, options, quiet=as_json)
        else:
            from wtransfer.demo.weights import run_weights

            result = run_weights(millions, rounds, quiet=as_json)
    except WTransferError as error:
        if as_json:
            click.echo(json.dumps({"ok": False, "error": str(error)}, indent=2))
        else:
            click.echo(f"the demo failed: {error}", err=True)
        sys.exit(1)
    result.print(as_json=as_json)
    sys.exit(0 if result.ok else 1)
