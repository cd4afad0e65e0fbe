"""Progress of a round on standard error: a bar per worker on a terminal, else lines."""

from __future__ import annotations

import functools
import logging
import sys
import time
from typing import TYPE_CHECKING

from wtransfer.calls import INTERRUPT_GRACE_S, start_call

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from typing_extensions import Self

    from wtransfer.weight_sync.trainer.round_handle import Round

logger = logging.getLogger(__name__)

_QUIET_S = 1.0
"""Seconds of a round of which nothing is shown."""
_REFRESH_S = 0.1
_LINE_S = 1.0


def watch(round_: Round, progress: bool | None) -> None:
    """Wait until a round is over, and show meanwhile how far it is.

    Args:
        round_: The round; its result is left to the caller.
        progress: False: nothing is shown. True: bars on a terminal, else lines. None: bars on a
            terminal, else nothing.
    """
    if progress is False or (progress is None and not _is_terminal()):
        round_.wait()
        return
    # On a thread of its own, since a terminal may hang or be gone: the round does not end for that,
    # and an interrupt of the caller meets no display.
    display = start_call(functools.partial(_show, round_), "wtransfer-progress")
    round_.wait()
    display.done.wait(INTERRUPT_GRACE_S)
    if display.error is not None:
        logger.info("the progress of the round could not be shown: %r", display.error)


def _is_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    # There is none, or it is closed.
    except (AttributeError, ValueError):
        return False


def _show(round_: Round) -> None:
    if round_.wait(_QUIET_S):
        return
    if not _is_terminal():
        lines = Lines()
        while not round_.wait(_REFRESH_S):
            lines.show(round_)
        return
    from rich.console import Console

    with Bars(Console(stderr=True)) as bars:
        bars.show(round_)
        while not round_.wait(_REFRESH_S):
            bars.show(round_)
        bars.show(round_)


def staged(round_: Round) -> dict[str, int]:
    """Return the bytes that each worker has, by its name."""
    progress = round_.progress()
    # Before `prepare` every worker has received everything; its last message may say less.
    verified = round_.phase in ("prepare", "commit") or (
        round_.phase == "over" and not round_.failed
    )
    return dict.fromkeys(progress, round_.nbytes) if verified else progress


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
            auto_refresh=False,
            # Else what the program prints meanwhile, to a file perhaps, would go to the terminal.
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, round_: Round) -> None:
        """Redraw."""
        total = round_.nbytes or None
        for name, nbytes in staged(round_).items():
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=total, phase="")
            task = self._tasks[name]
            self._progress.update(task, completed=nbytes, total=total, phase=round_.phase)
        self._progress.refresh()


class Lines:
    """Writes a line of progress, and the next one a second later."""

    def __init__(self) -> None:
        self._written_at = float("-inf")

    def show(self, round_: Round) -> None:
        """Write a line if it is time."""
        if round_.phase == "over" or time.monotonic() - self._written_at <= _LINE_S:
            return
        self._written_at = time.monotonic()
        amount = f"  {round_.nbytes / 1e6:.1f} MB" if round_.nbytes else ""
        behind = min(staged(round_).items(), key=lambda each: each[1], default=None)
        if round_.phase == "transfer" and behind is not None:
            amount = f"  {behind[1] / 1e6:.1f} of {round_.nbytes / 1e6:.1f} MB at {behind[0]}"
        sys.stderr.write(f"{round_.phase}{amount}\n")
        sys.stderr.flush()
