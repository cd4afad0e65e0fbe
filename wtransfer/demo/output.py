"""Output of the demo: lines while it runs, then its checks, or one JSON document."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import click
from rich.console import Console

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import Self


class Check(NamedTuple):
    """A promise, and the evidence for it."""

    promise: str
    kept: bool
    seen: str


class Result(NamedTuple):
    """The outcome of a run."""

    checks: list[Check]
    facts: dict[str, Any]
    """Everything else in the JSON document."""

    @property
    def ok(self) -> bool:
        """True if every promise was kept."""
        return all(check.kept for check in self.checks)

    def print(self, *, as_json: bool) -> None:
        """Print the checks, which the run has not printed yet, or everything as JSON."""
        if as_json:
            checks = [check._asdict() for check in self.checks]
            click.echo(json.dumps({"ok": self.ok, **self.facts, "checks": checks}, indent=2))
            return
        click.echo()
        for check in self.checks:
            click.echo(f"[{'ok' if check.kept else 'FAILED'}] {check.promise}\n     {check.seen}")
        num_kept = sum(check.kept for check in self.checks)
        click.echo(f"\n{num_kept} of {len(self.checks)} promises kept")


class Progress:
    """Prints rows and events as they come. Use as a context manager.

    On a terminal the last line shows the current activity.

    Args:
        header: Names of the columns, each right-aligned in its width.
        legend: Printed at the end of a run that does not fail.
        quiet: Print nothing.
    """

    def __init__(self, header: str, legend: str, *, quiet: bool) -> None:
        self._console = Console(quiet=quiet)
        self._status = self._console.status("starting")
        self._header, self._legend = header, legend
        self.events: list[str] = []
        """Lines printed between the rows."""

    def __enter__(self) -> Self:
        if self._console.is_terminal and not self._console.quiet:
            self._status.start()
        self._print(self._header)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._status.stop()
        if kind is None:
            self._print(self._legend)

    def row(self, cells: Sequence[str]) -> None:
        """Print a row of the table."""
        columns = re.findall(r" *\S+", self._header)
        texts = [text.rjust(len(name)) for text, name in zip(cells, columns, strict=True)]
        self._print("".join(texts))

    def event(self, text: str) -> None:
        """Print a line."""
        self.events.append(text)
        self._print(text, "yellow")

    def status(self, text: str) -> None:
        """Show the current activity."""
        self._status.update(text)

    def _print(self, text: str, style: str = "none") -> None:
        self._console.out(text, style=style, highlight=False)


def cell(value: float | None, digits: int, factor: float = 1.0) -> str:
    """Format a cell; a dash for None."""
    return "-" if value is None else f"{value * factor:.{digits}f}"
