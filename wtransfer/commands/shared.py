"""What several commands share: their end on a signal, and some options."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

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


@contextlib.contextmanager
def end_signals() -> Iterator[None]:
    """Raise `EndSignal` in the main thread on the first signal; the second ends the process.

    So what is open is closed in order. A signal that was ignored from the start, as SIGINT is in
    the background, stays so.
    """

    def end(number: int, _frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        raise EndSignal(number)

    before = {
        each: signal.getsignal(each)
        for each in _SIGNALS
        if signal.getsignal(each) is not signal.SIG_IGN
    }
    for each in before:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
