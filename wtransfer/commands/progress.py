"""What people see while a push is under way: a bar per worker, or lines, or nothing."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TYPE_CHECKING, Protocol

import click

from wtransfer.errors import StallError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from typing_extensions import Self

    from wtransfer.weight_sync.trainer.round import Round

_REFRESH_S = 0.1
_LINE_S = 1.0
_ARRIVED = ("seal", "commit")


class View(Protocol):
    """Shows a round. A context manager."""

    def __enter__(self) -> Self:
        """Begin."""

    def __exit__(self, *_: object) -> None:
        """Leave the screen in order."""

    def show(self, round_: Round) -> None:
        """Show how far it is."""


def watch(round_: Round, view: View) -> None:
    """Show a round until it is over."""
    while not round_.done:
        view.show(round_)
        # Not a sleep: the end is seen at once, and an interrupt ends the round.
        with contextlib.suppress(StallError):
            round_.result(timeout_s=_REFRESH_S)
    view.show(round_)


def view_of(*, silent: bool) -> View:
    """Return the view that fits the terminal, if there is one. It writes to standard error."""
    if silent:
        return Silence()
    if not sys.stderr.isatty():
        return Lines()
    from rich.console import Console

    return Bars(Console(stderr=True))


def arrived(round_: Round) -> dict[str, int]:
    """Return the bytes that each worker has, by its name."""
    progress = round_.progress()
    # Before the seal every worker has received everything; its last message may say less.
    complete = round_.phase in _ARRIVED or (round_.phase == "over" and not round_.failed)
    return dict.fromkeys(progress, round_.nbytes) if complete else progress


class Bars:
    """A bar per worker, redrawn in place.

    Args:
        console: The terminal.
    """

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
        from rich.progress import TransferSpeedColumn as SpeedColumn

        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            TextColumn("{task.fields[phase]}", style="dim"),
            BarColumn(),
            DownloadColumn(),
            SpeedColumn(),
            console=console,
            # Redrawn by `show`: no thread of its own that an interrupt could meet.
            auto_refresh=False,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, round_: Round) -> None:
        """Redraw."""
        total = round_.nbytes or None
        for name, nbytes in arrived(round_).items():
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=total, phase="")
            task = self._tasks[name]
            self._progress.update(task, completed=nbytes, total=total, phase=round_.phase)
        self._progress.refresh()


class Lines:
    """A line for each phase, and one a second while bytes travel."""

    def __init__(self) -> None:
        self._phase = ""
        self._written_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, round_: Round) -> None:
        """Write a line if there is something new."""
        phase = round_.phase
        late = phase == "transfer" and time.monotonic() - self._written_at > _LINE_S
        if phase == "over" or (phase == self._phase and not late):
            return
        self._phase, self._written_at = phase, time.monotonic()
        behind = min(arrived(round_).items(), key=lambda each: each[1], default=None)
        amount = f"{round_.nbytes / 1e6:.1f} MB"
        if late and behind is not None:
            amount = f"{behind[1] / 1e6:.1f} of {amount} at {behind[0]}"
        click.echo(f"{phase}  {amount}" if round_.nbytes else phase, err=True)


class Silence:
    """Shows nothing, where one JSON document is all that is wanted."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, round_: Round) -> None:
        """Show nothing."""
