"""Progress of a round on standard error: bars on a terminal, else lines with a clock."""

from __future__ import annotations

import functools
import logging
import sys
import time
from typing import TYPE_CHECKING

from wtransfer.calls import INTERRUPT_GRACE_S, start_call
from wtransfer.weight_sync.report import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID
    from typing_extensions import Self

    from wtransfer.weight_sync.trainer.round_handle import Round

logger = logging.getLogger(__name__)

_QUIET_S = 1.0
"""Seconds of a round of which nothing is shown."""
_REFRESH_S = 0.1
_FIRST_LINE_S = 10.0
_LINE_S = 60.0
"""Longest time between two lines, in seconds, where nothing moves."""
MAX_BARS = 4
"""Workers that have a bar of their own; of more, the slowest is shown."""


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
    """Return the bytes that each worker has, by its name, beside its host as the user wrote it.

    Names are `printable`.
    """
    progress = round_.progress()
    # Before `prepare` every worker has received everything; its last message may say less.
    verified = round_.phase in ("prepare", "commit") or (
        round_.phase == "over" and not round_.failed
    )
    hosts = round_.host_by_worker
    return {
        printable(f"{hosts[name]} ({name})" if name in hosts else name): (
            round_.nbytes if verified else nbytes
        )
        for name, nbytes in progress.items()
    }


class Bars:
    """A bar per worker, or one for the slowest of many, redrawn in place.

    Args:
        console: The terminal.
    """

    def __init__(self, console: Console) -> None:
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TaskProgressColumn,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.progress import TransferSpeedColumn as SpeedColumn

        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            # Names are text: a host in brackets is no style.
            TextColumn("{task.description}", markup=False),
            TextColumn("{task.fields[phase]}", style="dim"),
            BarColumn(bar_width=20),
            TaskProgressColumn(),
            DownloadColumn(),
            SpeedColumn(),
            TimeRemainingColumn(),
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
        total, shown = round_.nbytes or None, staged(round_)
        is_one = len(shown) > MAX_BARS
        for name, nbytes in [_slowest(shown)] if is_one else shown.items():
            label, key = (f"slowest of {len(shown)}: {name}", "") if is_one else (name, name)
            if key not in self._tasks:
                self._tasks[key] = self._progress.add_task(label, total=total, phase="")
            self._progress.update(
                self._tasks[key],
                description=label,
                completed=nbytes,
                total=total,
                phase=round_.phase,
            )
        self._progress.refresh()


class Lines:
    """Writes a line when a round is 10 s old, and then at each phase and each tenth of its bytes.

    Where nothing moves, a line a minute.
    """

    def __init__(self) -> None:
        self._begun = time.monotonic() - _QUIET_S
        self._written_at = float("-inf")
        self._place: tuple[str, int] | None = None
        """Phase and tenth of the last line."""
        self._moving: tuple[float, int] | None = None
        """When bytes were first seen, and how many: where the rate counts from."""

    def show(self, round_: Round) -> None:
        """Write a line if it is time."""
        phase, total, now = round_.phase, round_.nbytes, time.monotonic()
        shown = staged(round_)
        name, nbytes = _slowest(shown) if shown else ("", 0)
        if phase == "transfer" and self._moving is None:
            self._moving = now, nbytes
        place = phase, 10 * nbytes // total if total else 0
        is_due = place != self._place or now - self._written_at >= _LINE_S
        if phase == "over" or now - self._begun < _FIRST_LINE_S or not is_due:
            return
        self._place, self._written_at = place, now
        amount = f"  {total / 1e6:.1f} MB" if total else ""
        if phase == "transfer" and total and shown:
            amount = f" {100 * nbytes // total} %  {nbytes / 1e6:.1f} of {total / 1e6:.1f} MB at "
            amount += name if len(shown) == 1 else f"{name}, the slowest of {len(shown)}"
            amount += self._rate(nbytes, total, now)
        sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {phase}{amount}\n")
        sys.stderr.flush()

    def _rate(self, nbytes: int, total: int, now: float) -> str:
        assert self._moving is not None
        since, before = self._moving
        if nbytes <= before or now <= since:
            return ""
        rate = (nbytes - before) / (now - since)
        return f"  {rate / 1e6:.1f} MB/s  {(total - nbytes) / rate:.0f} s left"


def _slowest(shown: dict[str, int]) -> tuple[str, int]:
    return min(shown.items(), key=lambda each: each[1])
