"""Close sessions and publishers at the exit of the interpreter.

Daemon threads go on while the interpreter is taken down, and one that lets go of a tensor in that
moment ends the process with an abort. So sessions and publishers are closed before.
"""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import Protocol

logger = logging.getLogger(__name__)


class Closable(Protocol):
    """Something with threads behind it."""

    def close(self) -> None:
        """End them; a second call does nothing."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_at_exit(what: Closable) -> None:
    """Close `what` when the interpreter ends, if it still exists then."""
    _open.add(what)


def _close(what: Closable) -> None:
    try:
        what.close()
    except Exception:
        logger.exception("%s could not be closed at exit", type(what).__name__)


@atexit.register
def _close_all() -> None:
    for each in list(_open):
        _close(each)
