"""What people see while the demo runs: a table that grows round by round."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from wtransfer.demo.row import longest, usual_gap

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from typing_extensions import Self

    from wtransfer.demo.row import Row
    from wtransfer.demo.story import Story

_REFRESH_S = 0.15
_NOTHING = "-"
_COLUMNS = (
    "round",
    "loss",
    "version",
    "weights",
    "MB",
    "GB/s",
    "memcpy",
    "pause",
    "longest gaps, ms",
    "equal",
)
_WIDTHS = (5, 5, 9, 8, 7, 6, 6, 6, 24, 5)
LEGEND = (
    "weights: fingerprint. GB/s: bytes / (publish -> last receipt). memcpy: that, as a share of a "
    "plain copy measured just before. pause: longest commit, ms. gaps between two tokens: while "
    "nothing happens / from publish to commit / around the commit. equal: live models with the "
    "trainer's digest."
)


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as text, one cell per column."""
    gaps = (row.gap_normal_s, row.gap_transfer_s, row.gap_commit_s)
    return (
        str(row.number),
        f"{row.loss:.2f}",
        row.version,
        row.fingerprint[:8] if row.fingerprint else row.outcome,
        f"{row.nbytes / 1e6:.1f}" if row.nbytes else _NOTHING,
        _number(row.gb_per_s, 2),
        _number(row.memcpy_share, 2),
        _milliseconds(row.commit_pause_s),
        " / ".join(map(_milliseconds, gaps)),
        f"{row.num_equal}/{row.num_receipts}" if row.num_receipts else _NOTHING,
    )


def status(story: Story) -> str:
    """Return what goes on just now."""
    training = story.trained
    parts = [f"step {training.step}, loss {training.loss:.2f}" if training else "starting"]
    parts += [
        f"{worker}: {lives[-1].num_tokens} tokens, {lives[-1].version or 'untrained'}"
        for worker, lives in story.lives.items()
    ]
    return "  |  ".join(parts)


def gaps_in_words(story: Story) -> str:
    """Return how long readers waited for a token: usually, and at worst in each phase."""
    rows = story.rows
    return (
        f"between two tokens: usually {_milliseconds(usual_gap(story))} ms; at most "
        f"{_milliseconds(longest(row.gap_normal_s for row in rows))} ms between the rounds, "
        f"{_milliseconds(longest(row.gap_transfer_s for row in rows))} ms during a transfer, "
        f"{_milliseconds(longest(row.gap_commit_s for row in rows))} ms around a commit"
    )


def _number(value: float | None, digits: int) -> str:
    return _NOTHING if value is None else f"{value:.{digits}f}"


def _milliseconds(seconds: float | None) -> str:
    return _number(None if seconds is None else seconds * 1e3, 1)


class LiveTable:
    """Redraws the table in place, on a terminal. Use as a context manager.

    Args:
        console: The terminal.
    """

    def __init__(self, console: Console) -> None:
        # Redrawn by `show` alone: rich's own thread would read a story that is being written.
        self._live = Live(console=console, auto_refresh=False)
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, story: Story) -> None:
        """Redraw, unless that was done a moment ago."""
        if time.monotonic() - self._shown_at > _REFRESH_S:
            self._shown_at = time.monotonic()
            self._live.update(drawn(story), refresh=True)

    def close(self, story: Story) -> None:
        """Draw the whole story for the last time, also where it is longer than the screen."""
        self._live.vertical_overflow = "visible"
        self._live.update(drawn(story), refresh=True)


def drawn(story: Story) -> Group:
    """Return table, events and status as one drawing."""
    table = Table(box=SIMPLE_HEAD, caption=LEGEND, caption_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for row in story.rows:
        table.add_row(*cells(row), style="yellow" if row.outcome == "aborted" else None)
    events = [Text(event, style="yellow") for event in story.events]
    return Group(table, *events, Text(status(story), style="dim"))


class Lines:
    """Writes a line for each round and event, where the output is no terminal.

    Args:
        write: Takes one line.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._num_rows = 0
        self._num_events = 0
        write(_line(_COLUMNS))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, story: Story) -> None:
        """Write what is new and complete."""
        for row in story.rows[self._num_rows :]:
            self._num_rows += 1
            self._write(_line(cells(row)))
        for event in story.events[self._num_events :]:
            self._num_events += 1
            self._write(event)

    def close(self, story: Story) -> None:
        """Write what is left."""
        self.show(story)
        self._write(LEGEND)


def _line(texts: Sequence[str]) -> str:
    columns = zip(texts, _WIDTHS, strict=True)
    return "  ".join(text.rjust(width) for text, width in columns)


class Silence:
    """Shows nothing, where one JSON document is all that is wanted."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def show(self, story: Story) -> None:
        """Show nothing."""

    def close(self, story: Story) -> None:
        """Show nothing."""
