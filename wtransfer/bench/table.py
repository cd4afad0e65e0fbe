"""A run as people read it: a table, and under it what each number is and stands beside."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from wtransfer.bench.nbytes import in_words
from wtransfer.bench.row import Failed

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wtransfer.bench.machine import Machine
    from wtransfer.bench.row import Row

_COLUMNS = ("row", "median", "min .. max", "goal", "")
_LEFT = ("row", "")
_FILE_WIDTH = 110
_VERDICTS = {True: ("reached", "green"), False: ("not reached", "yellow"), None: ("", "")}
# Suffix of a neighbour's name -> factor and unit in which people read it.
_UNITS = {
    "_gb_per_s": (1.0, "GB/s"),
    "_us": (1.0, "us"),
    "_s": (1e3, "ms"),
}


def show(found: Sequence[Row | Failed], machine: Machine) -> None:
    """Print a run."""
    console = Console(highlight=False)
    if not console.is_terminal:
        # Else it takes a file to be as narrow as the narrowest screen.
        console.width = _FILE_WIDTH
    console.print(Text(str(machine)))
    console.print(_table(found))
    for each in found:
        console.print(Text(f"{each.name}: {each.what}"))
        for line in _lines(each):
            console.print(Padding(Text(line, style="dim"), (0, 0, 0, 4)))


def _table(found: Sequence[Row | Failed]) -> Table:
    table = Table(box=SIMPLE_HEAD)
    for column in _COLUMNS:
        justify: Literal["left", "right"] = "left" if column in _LEFT else "right"
        table.add_column(column, justify=justify, no_wrap=True)
    for each in found:
        table.add_row(*_cells(each))
    return table


def _cells(row: Row | Failed) -> tuple[str | Text, ...]:
    if isinstance(row, Failed):
        return row.name, "-", "-", "-", Text("failed", style="red")
    median, low, high = (number(value) for value in row.spread)
    unit = f" {row.unit}" if row.unit else ""
    goal = "-" if row.goal is None else f"{row.goal}{unit}"
    if row.limit is not None:
        goal += f", all <= {number(row.limit)}{unit}"
    verdict, style = _VERDICTS[row.reached]
    return row.name, f"{median}{unit}", f"{low} .. {high}", goal, Text(verdict, style=style)


def _lines(row: Row | Failed) -> Iterator[str]:
    if isinstance(row, Failed):
        yield row.error
        return
    if row.note:
        yield row.note
    for title, facts in (("beside", row.beside), ("stages", row.stages)):
        if facts:
            yield f"{title}: " + ", ".join(neighbour(*each) for each in facts.items())


def neighbour(name: str, value: float) -> str:
    """Return a neighbour with its unit, which is the end of its name."""
    if name.endswith("_nbytes"):
        return f"{name.removesuffix('_nbytes')} {in_words(int(value))}"
    for suffix, (factor, unit) in _UNITS.items():
        if name.endswith(suffix) and name != suffix:
            return f"{name.removesuffix(suffix).replace('_', ' ')} {number(value * factor)} {unit}"
    return f"{name.replace('_', ' ')} {number(value)}"


def number(value: float) -> str:
    """Return a number with as many digits as are worth reading."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"  # noqa: PLR2004
