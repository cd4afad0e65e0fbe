"""Common parts of commands: their end on a signal, and some options."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

import click

from wtransfer.errors import PluginError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

token_file_option = click.option(
    "--token-file", metavar="FILE", help="Owner-only file with the shared secret."
)


def _add_engine(_ctx: click.Context, _param: click.Parameter, place: str | None) -> None:
    from wtransfer.registry.resolve import add_file

    if place is not None:
        try:
            add_file("engines", place)
        except PluginError as error:
            raise click.BadParameter(str(error)) from error


plugin_option = click.option(
    "--plugin",
    metavar="FILE.py:CLASS",
    expose_value=False,
    callback=_add_engine,
    help="Let a class of a file be an engine, by its name: for a first try.",
)
deadline_option = click.option(
    "--deadline",
    "deadline_s",
    type=click.FloatRange(min=0, min_open=True),
    default=30.0,
    metavar="SECONDS",
    show_default=True,
    help="Longest time without progress.",
)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class EndSignal(BaseException):
    """SIGINT or SIGTERM.

    Args:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.exit_code = 128 + number
        """Exit code that shells report of a command that this signal ended."""


class EndSignals:
    """Control of the signals, as `end_signals` yields it."""

    def __init__(self) -> None:
        self.is_held_back = False
        """True while a signal is only noted."""
        self.noted: EndSignal | None = None
        """Signal that came while signals were held back."""

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Raise a signal that comes within the block at its end.

        A wait for a condition cannot be left at any place: its lock may be another thread's.
        """
        self.is_held_back = True
        try:
            yield
        finally:
            self.is_held_back = False
            if self.noted is not None:
                raise self.noted


@contextlib.contextmanager
def end_signals() -> Iterator[EndSignals]:
    """Raise `EndSignal` in the main thread on the first signal; the second ends the process.

    So open resources are closed in order. A signal that was ignored from the start, as SIGINT is in
    the background, stays so.
    """
    signals = EndSignals()

    def end(number: int, _frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        error = EndSignal(number)
        if not signals.is_held_back:
            raise error
        signals.noted = error

    before = {
        each: signal.getsignal(each)
        for each in _SIGNALS
        if signal.getsignal(each) is not signal.SIG_IGN
    }
    for each in before:
        signal.signal(each, end)
    try:
        yield signals
    except RuntimeError as error:
        # "cannot release un-acquired lock": the signal came within a condition's wait.
        if isinstance(error.__context__, EndSignal):
            raise error.__context__ from None
        raise
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
