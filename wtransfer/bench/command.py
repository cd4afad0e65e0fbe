"""``wtransfer bench``: measure on this machine what the design promises."""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import os
import platform
import re
import sys
import textwrap
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from wtransfer.errors import WTransferError
from wtransfer.registry.option import plugin_option

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from wtransfer.bench.harness import Result, Row

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9} | {
    "KIB": 1 << 10,
    "MIB": 1 << 20,
    "GIB": 1 << 30,
}
WIDTH = 110
_NUM_CELLS = 16
"""Width of a bar beside a goal, which is in its middle."""

_BAR = "goal at |"
_COLUMNS = ("row", "median", "min .. max", "goal", _BAR, "")

TCommand = TypeVar("TCommand", bound="Callable[..., Any]")


# -- options ---------------------------------------------------------------------------------------


def parse_nbytes(text: str) -> int:
    """Return a size in bytes: ``4096``, ``4KiB``, ``1.5 GiB``, ``2GB``.

    Raises:
        click.BadParameter: It is no size, or not above 0.
    """
    matched = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(matched[2].upper()) if matched else None
    if matched is None or unit is None or float(matched[1]) * unit < 1:
        raise click.BadParameter(
            f"{text!r} is no size; write a number and a unit: 512MiB, 2GiB, 4096"
        )
    return int(float(matched[1]) * unit)


def _parse_sizes(text: str) -> tuple[int, ...]:
    return tuple(map(parse_nbytes, text.split(",")))


def _parse_numbers(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(each.isdecimal() and int(each) for each in parts):
        raise click.BadParameter(f"{text!r} are no numbers above 0; write 1,4")
    return tuple(map(int, parts))


def _parse_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise click.BadParameter(f"{text!r} is no option; write NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _size(text: str) -> Callable[[TCommand], TCommand]:
    return click.option("--nbytes", type=parse_nbytes, metavar="SIZE", help=text)


def _blocks(default: str) -> Callable[[TCommand], TCommand]:
    text = f"Sizes of a block, over its 32 layers [{default}]."
    return click.option(
        "--blocks", "block_nbytes", type=_parse_sizes, metavar="SIZE,SIZE", help=text
    )


def _common_options(command: Callable[..., None]) -> Callable[..., None]:
    words = {
        "json": "Print one JSON document, nothing else.",
        "quick": "Small sizes: to see all rows, not their numbers.",
        "html": "Write the rows as plots, too: one page, which needs no network.",
        "only": "Only this row. Repeat for more.",
        "rounds": "Rounds that count, per row [7].",
    }
    for option in (
        click.option("--json", "as_json", is_flag=True, help=words["json"]),
        click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help=words["html"]),
        click.option("--quick", is_flag=True, help=words["quick"]),
        click.option("--only", multiple=True, metavar="ROW", help=words["only"]),
        click.option("--rounds", "num_rounds", type=click.IntRange(1), help=words["rounds"]),
    ):
        command = option(command)
    return command


# -- commands --------------------------------------------------------------------------------------


@click.group()
def bench() -> None:
    """Measure here what is promised, each number beside its goal and what it compares with."""


@bench.command()
@click.option("--engine", metavar="NAME", help="shm, gloo, or any that needs no option [shm].")
@plugin_option("engines")
@_size("Of an update [2GiB].")
@click.option(
    "--workers",
    type=_parse_numbers,
    metavar="N,M",
    help="Numbers of workers; the first one for all rows but those that compare [1,4].",
)
@_common_options
def weights(**asked: Any) -> None:
    """Measure rounds of weights: speed, pauses, memory, and how soon a death is noticed.

    Every number is a median of rounds that bring other values each time and whose receipts are
    checked, with its least and greatest, beside a plain copy of the same bytes and beside other
    ways to send them, all in this run. Only ratios can be compared between machines; other work on
    the machine is measured as well.

    The exit status is 1 if a row could not be measured; a goal that is not reached is only shown.
    """
    _measure("weights", **asked)


@bench.command()
@_size("That one round copies [256MiB].")
@_blocks("2MiB,128KiB,16KiB")
@click.option("--tier", metavar="NAME", help="Measure this tier in place of the arena.")
@plugin_option("specs")
@click.option(
    "--tier-option",
    "tier_options",
    type=_parse_option,
    multiple=True,
    metavar="NAME=VALUE",
    help="Of the tier, its value as JSON or text. Repeat for more.",
)
@_common_options
def offload(tier_options: tuple[tuple[str, Any], ...], **asked: Any) -> None:
    """Measure KV cache in host memory: copies into the arena and back, and its manager.

    Every number is a median of rounds, with its least and greatest. Copies stand beside a plain
    copy of the same bytes, and are compared with what was stored. Managers stand beside vLLM's,
    where vLLM is installed. Only ratios can be compared between machines; other work on the machine
    is measured as well.

    With --tier, copies go to a tier, beside its own client's calls and beside computing the same
    block. The tier "file" is measured in memory unless its folder is given.

    The exit status is 1 if a row could not be measured; a goal that is not reached is only shown.
    """
    verb = "offload" if asked["tier"] is None else "tiers"
    _measure(verb, tier_options=dict(tier_options), **asked)


@bench.command()
@_size("That one round saves and loads [256MiB].")
@_blocks("2MiB,128KiB")
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, writable=True),
    help="Where files are kept meanwhile, in a folder of their own [/dev/shm].",
)
@_common_options
def connectors(**asked: Any) -> None:
    """Measure KV cache on its way from prefill to decode, and what it costs the scheduler.

    Two processes, as two serving instances: one saves, the other one loads. Every number is a
    median of rounds, with its least and greatest; each round has other bytes, stands beside plain
    copies of as many, and every byte that has come is compared with what was sent. Only ratios can
    be compared between machines; other work on the machine is measured as well.

    The exit status is 1 if a row could not be measured; a goal that is not reached is only shown.
    """
    _measure("connectors", **asked)


def _measure(
    verb: str,
    *,
    only: tuple[str, ...],
    quick: bool,
    as_json: bool,
    html: Path | None,
    **asked: Any,
) -> None:
    from wtransfer.bench.harness import Runner, measure_rows
    from wtransfer.bench.page import page
    from wtransfer.transport.memory import require_memory

    machine = describe_machine()
    module: Any = importlib.import_module(f"wtransfer.bench.{verb}")
    given = {name: value for name, value in asked.items() if value is not None}
    try:
        settings = replace(module.Settings.quick() if quick else module.Settings(), **given)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    rows: dict[str, Row] = {row.name: row for row in module.rows(settings)}
    for name in only:
        if name not in rows:
            raise click.UsageError(f"there is no row {name!r}; there are {', '.join(rows)}")
    chosen = [row for name, row in rows.items() if not only or name in only]

    def report(text: str) -> None:
        click.echo(text, err=True)

    with _reserved(html):
        try:
            require_memory(settings.needed_nbytes, "this run")
            modules, folder = [module.__name__], asked.get("folder")
            with Runner(modules, folder, lambda name: report(f"    {name} ...")) as runner:
                results = measure_rows(chosen, runner, report)
        except WTransferError as error:
            raise click.ClickException(str(error)) from error
        if as_json:
            found = {row.name: document(row, result) for row, result in results.items()}
            run = {"machine": machine, "settings": asdict(settings), "rows": found}
            click.echo(json.dumps(run, indent=2))
        else:
            show(results, machine)
        if html is not None:
            # Last: a page that cannot be written does not cost the numbers.
            text = page(f"wtransfer bench {verb}", results, machine_in_words(machine))
            try:
                html.write_text(text, "utf-8")
            except OSError as error:
                raise click.ClickException(f"--html {html}: {error.strerror}") from error
    sys.exit(1 if any(isinstance(each, str) for each in results.values()) else 0)


@contextlib.contextmanager
def _reserved(path: Path | None) -> Iterator[None]:
    """Make a file before minutes are spent on what is to be there; remove it if that fails."""
    if path is None:
        yield
        return
    is_new = not os.path.lexists(path)
    try:
        # Not what would be allowed: it is opened.
        path.open("a", encoding="utf-8").close()
    except OSError as error:
        raise click.UsageError(f"--html {path} cannot be written: {error.strerror}") from error
    try:
        yield
    except BaseException:
        if is_new:
            path.unlink(missing_ok=True)
        raise


# -- what is printed -------------------------------------------------------------------------------


def describe_machine() -> dict[str, str | int | float]:
    """Return the machine that the numbers belong to."""
    cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text("utf-8"))
    return {
        "cpu": cpu[1] if cpu else platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "wtransfer": metadata.version("wtransfer"),
        # Of the last minute, before the run; high: the processors had other work, too.
        "load": os.getloadavg()[0],
    }


def machine_in_words(machine: Mapping[str, Any]) -> str:
    """Return one line for the machine."""
    return (
        "{cpu}, {num_cores} cores, {gib:.0f} GiB, {kernel}; Python {python}, torch {torch}, "
        "wtransfer {wtransfer}; load {load:.2f}"
    ).format(gib=machine["memory_nbytes"] / (1 << 30), **machine)


def document(row: Row, result: Result | str) -> dict[str, Any]:
    """Return a row as plain data for ``--json``; its keys are stable."""
    if isinstance(result, str):
        return {"what": row.what, "error": result}
    found = asdict(result) | result.spread._asdict()
    del found["spread"]
    goal = result.goal._asdict() if result.goal else None
    return {"what": row.what, **found, "goal": goal, "reached": result.reached, "error": None}


def show(results: Mapping[Row, Result | str], machine: Mapping[str, Any]) -> None:
    """Print a run as a table, and under it what each number is and stands beside."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from wtransfer.bench.harness import format_number

    click.echo(machine_in_words(machine))
    table = Table(box=SIMPLE_HEAD)
    for column in _COLUMNS:
        is_number = column in ("median", "min .. max", "goal")
        table.add_column(column, justify="right" if is_number else "left", no_wrap=True)
    for row, result in results.items():
        if isinstance(result, str):
            table.add_row(row.name, "-", "-", "-", "", "[red]failed")
            continue
        median, low, high = map(format_number, result.spread)
        unit = f" {result.unit}" if result.unit else ""
        goal = f"{result.goal.relation} {result.goal.value:g}{unit}" if result.goal else "-"
        if result.limit is not None:
            goal += f", all <= {format_number(result.limit)}{unit}"
        verdict = {True: "[green]reached", False: "[yellow]not reached", None: ""}[result.reached]
        drawn = goal_bar(result.spread.median, result.goal.value) if result.goal else ""
        table.add_row(row.name, f"{median}{unit}", f"{low} .. {high}", goal, drawn, verdict)
    console = Console(highlight=False)
    if not console.is_terminal:
        # rich takes a file to be as narrow as the narrowest screen.
        console.width = WIDTH
    if console.measure(table, options=console.options.update(width=1000)).maximum > console.width:
        # In a narrow terminal: the bars, not digits of the numbers.
        del table.columns[_COLUMNS.index(_BAR)]
    console.print(table)
    for row, result in results.items():
        click.echo(f"{row.name}: {row.what}")
        for line in [result] if isinstance(result, str) else _details(result):
            indent = "    "
            text = textwrap.fill(line, WIDTH, initial_indent=indent, subsequent_indent=indent)
            click.secho(text, dim=True)


def goal_bar(value: float, goal: float) -> str:
    """Return a bar as long as the value, with the goal as ``|`` in its middle; ``>``: far beyond.

    Args:
        value: The number that was reached; none is drawn for NaN or infinity.
        goal: The goal; none is drawn unless it is above 0.
    """
    middle = _NUM_CELLS // 2
    length = middle * value / goal if goal > 0 else math.nan
    if not math.isfinite(length):
        return ""
    # Away from the goal: a bar that only just misses it does not touch it.
    num = math.floor(length) if value < goal else math.ceil(length)
    cells = ("#" * min(num, _NUM_CELLS)).ljust(_NUM_CELLS)
    return f"{cells[:middle]}|{cells[middle:]}".rstrip() + (">" if num > _NUM_CELLS else "")


def _details(result: Result) -> Iterator[str]:
    from wtransfer.bench.harness import format_numbers

    if result.note:
        yield result.note
    for title, numbers in (("beside", result.beside), ("stages", result.stages)):
        if numbers:
            yield f"{title}: {format_numbers(numbers)}"
