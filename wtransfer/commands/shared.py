"""Common parts of commands: their end on a signal, some options, and tables."""

from __future__ import annotations

import contextlib
import logging
import signal
from typing import TYPE_CHECKING, Any

import click

from wtransfer.errors import WTransferError
from wtransfer.transport.handshake import resolve_token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from types import FrameType

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
"""A line of the log, as commands write it."""
_IS_LOGGING = f"{__name__}.is_logging"

token_file_option = click.option(
    "--token-file", metavar="FILE", help="Owner-only file with the shared secret."
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


def given_token(token_file: str | None) -> str | None:
    """Return the token of ``--token-file``, else that of the environment; None: none is given.

    Raises:
        AuthenticationError: The file cannot be trusted or read, or is empty.
    """
    if token_file is None:
        return resolve_token(None)
    return resolve_token(None, {"WTRANSFER_TOKEN_FILE": token_file})


@contextlib.contextmanager
def usage_errors(*classes: type[WTransferError]) -> Iterator[None]:
    """Report these errors as usage errors, and ValueErrors that no class of ours is."""
    try:
        yield
    except classes as error:
        raise click.UsageError(str(error)) from error
    except ValueError as error:
        if isinstance(error, WTransferError):
            raise
        raise click.UsageError(str(error)) from error


def table(rows: Sequence[Sequence[str]], num_text_columns: int) -> Iterator[str]:
    """Yield the lines of a table.

    Args:
        rows: Cells, the head first.
        num_text_columns: Columns from the left that hold text; further ones hold numbers.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if index < num_text_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def logging_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--log-level`` and ``-v``, which write the package's log to standard error."""

    def begin(context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
        if not value or context.resilient_parsing or _IS_LOGGING in context.meta:
            return
        context.meta[_IS_LOGGING] = True
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(LOG_FORMAT))
        log = logging.getLogger(__name__.partition(".")[0])
        before = log.level
        log.addHandler(handler)
        log.setLevel(value.upper())

        def end() -> None:
            log.removeHandler(handler)
            log.setLevel(before)

        context.call_on_close(end)

    verbose = click.option(
        "-v",
        is_flag=True,
        flag_value="info",
        expose_value=False,
        callback=begin,
        help="As --log-level info.",
    )
    level = click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        # Called before the other, whose place it takes.
        is_eager=True,
        expose_value=False,
        callback=begin,
        help="Write the log to standard error, from this level on.",
    )
    return level(verbose(command))


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
