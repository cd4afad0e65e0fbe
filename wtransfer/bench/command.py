"""``wtransfer bench``: measure here what the design promises."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wtransfer.bench.nbytes import parse_many, parse_nbytes
from wtransfer.bench.settings import COMMITS, Settings
from wtransfer.errors import WTransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from wtransfer.bench.connectors import ConnectorSettings
    from wtransfer.bench.machine import Machine
    from wtransfer.bench.offload import OffloadSettings
    from wtransfer.bench.row import Failed, Measure, Row

TKVSettings = TypeVar("TKVSettings", "OffloadSettings", "ConnectorSettings")


def _parsed(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a click callback that reads a text; None stays None."""

    def callback(_ctx: click.Context, _param: click.Parameter, text: str | None) -> Any:
        try:
            return None if text is None else parse(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(parse_nbytes, text.split(",")))


def _workers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(each.isdecimal() and int(each) for each in parts):
        raise ValueError(f"{text!r} are no numbers above 0; write 1,4")
    return tuple(map(int, parts))


def _commits(text: str) -> tuple[str, ...]:
    chosen = tuple(text.split(","))
    unknown = [each for each in chosen if each not in COMMITS]
    if unknown:
        raise ValueError(f"there is no commit {unknown[0]!r}; there are {', '.join(COMMITS)}")
    return chosen


_rounds = click.option(
    "--rounds", "num_rounds", type=click.IntRange(min=1), help="Rounds that count, per row [7]."
)
_only = click.option("--only", multiple=True, metavar="ROW", help="Only this row. Repeat for more.")
_quick = click.option(
    "--quick", is_flag=True, help="Small sizes: to see all rows, not their numbers."
)
_json = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON document, nothing else."
)


@click.group()
def bench() -> None:
    """Measure here what is promised, each number beside its goal and its neighbours."""


@bench.command()
@click.option("--engine", metavar="NAME", help="shm, gloo, or any that needs no option [shm].")
@click.option(
    "--nbytes", callback=_parsed(parse_nbytes), metavar="SIZE", help="Of an update [2GiB]."
)
@click.option(
    "--workers",
    callback=_parsed(_workers),
    metavar="N,M",
    help="Numbers of workers; the first one for all rows but those that compare [1,4].",
)
@_rounds
@click.option(
    "--small",
    callback=_parsed(parse_many),
    metavar="NxSIZE",
    help="How many small tensors of what size [20000x4KiB].",
)
@click.option(
    "--commit", "commits", callback=_parsed(_commits), metavar="MODES", help="[adopt,copy]"
)
@_only
@_quick
@_json
def weights(only: tuple[str, ...], quick: bool, as_json: bool, **asked: Any) -> None:
    """Measure rounds of weights: speed, pauses, memory, and how soon a death is noticed.

    Every number is a median of rounds that bring other values each time and whose receipts are
    checked, with its least and greatest, beside a plain copy of the same bytes and beside other
    ways to send them, all in this run. Only ratios can be compared between machines; a machine
    that others use at the same time measures them as well.

    The exit status is 1 if a row could not be measured; a goal that is not reached is told.
    """
    from wtransfer.bench.machine import Machine
    from wtransfer.bench.run import measure, rows_named

    settings = _settings(quick, asked)
    machine = Machine.here()
    try:
        chosen = rows_named(only, settings)
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--only") from error
    try:
        found = measure(chosen, settings, lambda text: click.echo(f"  {text} ...", err=True))
    except WTransferError as error:
        raise click.ClickException(str(error)) from error
    _tell(found, settings, machine, as_json)


def _settings(quick: bool, asked: dict[str, Any]) -> Settings:
    given = {name: value for name, value in asked.items() if value is not None}
    if "small" in given:
        given["num_small"], given["small_nbytes"] = given.pop("small")
    return replace(Settings.quick() if quick else Settings(), **given)


@bench.command()
@click.option(
    "--nbytes",
    callback=_parsed(parse_nbytes),
    metavar="SIZE",
    help="That one round copies [256MiB].",
)
@click.option(
    "--blocks",
    "block_nbytes",
    callback=_parsed(_sizes),
    metavar="SIZE,SIZE",
    help="Sizes of a block, over its 32 layers [2MiB,128KiB,16KiB].",
)
@click.option(
    "--kept",
    "num_blocks",
    callback=_parsed(_workers),
    metavar="N,M",
    help="How many blocks managers have; the last number for most rows [1000,10000,100000].",
)
@_rounds
@_only
@_quick
@_json
def offload(only: tuple[str, ...], quick: bool, as_json: bool, **asked: Any) -> None:
    """Measure KV cache in host memory: copies into the arena and back, and its manager.

    Every number is a median of rounds, with its least and greatest. Copies stand beside a plain
    copy of the same bytes, and are compared with what was stored. Managers stand beside vLLM's,
    where vLLM is installed. Only ratios can be compared between machines; a machine that others use
    at the same time measures them as well.

    The exit status is 1 if a row could not be measured; a goal that is not reached is told.
    """
    from wtransfer.bench.offload import OffloadSettings, offload_measures

    given = {name: value for name, value in asked.items() if value is not None}
    settings = replace(OffloadSettings.quick() if quick else OffloadSettings(), **given)
    _measure(settings, offload_measures, only, as_json)


@bench.command()
@click.option(
    "--nbytes",
    callback=_parsed(parse_nbytes),
    metavar="SIZE",
    help="That one round saves and loads [256MiB].",
)
@click.option(
    "--blocks",
    "block_nbytes",
    callback=_parsed(_sizes),
    metavar="SIZE,SIZE",
    help="Sizes of a block, over its 32 layers [2MiB,128KiB].",
)
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, writable=True),
    help="Where files are kept meanwhile, in a folder of their own [/dev/shm].",
)
@_rounds
@_only
@_quick
@_json
def connectors(only: tuple[str, ...], quick: bool, as_json: bool, **asked: Any) -> None:
    """Measure KV cache on its way from prefill to decode, and what it costs the scheduler.

    Two processes, as two serving instances: one saves, the other one loads. Every number is a
    median of rounds, with its least and greatest; each round has other bytes, stands beside plain
    copies of as many, and every byte that has come is compared with what was sent. Only ratios can
    be compared between machines; a machine that others use at the same time measures them as well.

    The exit status is 1 if a row could not be measured; a goal that is not reached is told.
    """
    from wtransfer.bench.connectors import ConnectorSettings, connector_measures

    given = {name: value for name, value in asked.items() if value is not None}
    settings = replace(ConnectorSettings.quick() if quick else ConnectorSettings(), **given)
    _measure(settings, connector_measures, only, as_json)


def _measure(
    settings: TKVSettings,
    measures: Callable[[TKVSettings], Iterable[Measure]],
    only: tuple[str, ...],
    as_json: bool,
) -> None:
    from wtransfer.bench.machine import Machine
    from wtransfer.bench.run import chosen_of, measure_rows
    from wtransfer.transport.memory import require_memory

    machine = Machine.here()
    try:
        settings.check()
        chosen = chosen_of(measures(settings), only)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        require_memory(settings.needed_nbytes, "this run")
        found = measure_rows(chosen, Settings(), lambda text: click.echo(f"  {text} ...", err=True))
    except WTransferError as error:
        raise click.ClickException(str(error)) from error
    _tell(found, settings, machine, as_json)


def _tell(
    found: Sequence[Row | Failed],
    settings: Settings | OffloadSettings | ConnectorSettings,
    machine: Machine,
    as_json: bool,
) -> None:
    from wtransfer.bench.document import document
    from wtransfer.bench.row import Row

    if as_json:
        click.echo(json.dumps(document(found, settings, machine), indent=2))
    else:
        from wtransfer.bench.table import show

        show(found, machine)
    sys.exit(0 if all(isinstance(each, Row) for each in found) else 1)
