"""End a command on SIGINT and SIGTERM as on an exception: what is open is closed in order."""

from __future__ import annotations

import contextlib
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class EndSignal(BaseException):
    """Somebody asked this process to end.

    Args:
        number: The signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """What shells report of a command that this signal ended."""
        return 128 + self.number


@contextlib.contextmanager
def end_signals() -> Iterator[None]:
    """Raise `EndSignal` in the main thread on the first signal; the second ends the process.

    A signal that was ignored from the start, as SIGINT is in the background, stays so.
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
