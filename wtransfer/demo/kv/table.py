"""What people see while the story runs: a table that grows prompt by prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from typing_extensions import Self

    from wtransfer.demo.kv.story import KvStory, Row

_NOTHING = "-"
_WHOLE_MS = 10.0  # from here on parts of a millisecond say nothing
_COLUMNS = (
    "no.",
    "prefill",
    "tokens",
    "loaded",
    "computed",
    "MB",
    "prefill ms",
    "first token ms",
    "alone ms",
    "load ms",
    "memcpy",
    "same",
)
_WIDTHS = (3, 7, 6, 6, 8, 4, 10, 14, 8, 7, 6, 4)
LEGEND = (
    "tokens: of the prompt. loaded: those whose keys and values came from prefill. computed: those "
    "that decode has computed itself. prefill ms: time there, with what it has of earlier prompts. "
    "first token ms: time of decode from then on. alone ms: to the first token of an instance that "
    "loads nothing. memcpy: a plain copy of as many bytes, as a share of the load. same: the "
    "answer is that of the instance that loads nothing."
)


def cells(row: Row) -> tuple[str, ...]:
    """Return a row as text, one cell per column."""
    return (
        str(row.number),
        row.prefill,
        str(row.num_prompt),
        str(row.num_loaded),
        str(row.num_recomputed),
        f"{row.nbytes / 1e6:.1f}" if row.nbytes else _NOTHING,
        _milliseconds(row.prefill_s),
        _milliseconds(row.first_token_s),
        _milliseconds(row.fresh_s),
        _milliseconds(row.load_s),
        _NOTHING if row.memcpy_share is None else f"{row.memcpy_share:.3f}",
        "yes" if row.is_same else "NO",
    )


def _milliseconds(seconds: float | None) -> str:
    if seconds is None:
        return _NOTHING
    milliseconds = seconds * 1e3
    return f"{milliseconds:.{0 if milliseconds >= _WHOLE_MS else 1}f}"


def drawn(story: KvStory) -> Group:
    """Return table and events as one drawing."""
    # Within 80 columns: what a heading has to say in full, stands in the legend.
    table = Table(box=SIMPLE_HEAD, padding=0, caption=LEGEND, caption_justify="left")
    for column in _COLUMNS:
        table.add_column(column.replace(" ", "\n"), justify="right")
    for row in story.rows:
        table.add_row(*cells(row), style=None if row.prefill == "alive" else "yellow")
    return Group(table, *(Text(event, style="yellow") for event in story.events))


class KvTable:
    """Redraws the table in place, on a terminal. Use as a context manager.

    Args:
        console: The terminal.
    """

    def __init__(self, console: Console) -> None:
        # Redrawn by `show` alone: rich's own thread would read a story that is being written.
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="visible")

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def show(self, story: KvStory) -> None:
        """Redraw."""
        self._live.update(drawn(story), refresh=True)


class KvLines:
    """Writes a line for each prompt and event, where the output is no terminal.

    Args:
        write: Takes one line.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._num_rows = 0
        self._num_events = 0

    def __enter__(self) -> Self:
        self._write(_line(_COLUMNS))
        return self

    def __exit__(self, *_: object) -> None:
        self._write(LEGEND)

    def show(self, story: KvStory) -> None:
        """Write what is new."""
        for row in story.rows[self._num_rows :]:
            self._write(_line(cells(row)))
        for event in story.events[self._num_events :]:
            self._write(event)
        self._num_rows, self._num_events = len(story.rows), len(story.events)


def _line(texts: Sequence[str]) -> str:
    return "  ".join(text.rjust(width) for text, width in zip(texts, _WIDTHS, strict=True))
