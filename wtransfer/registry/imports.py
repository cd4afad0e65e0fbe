"""Import what a plug-in names, on a thread of its own, so that nothing it does there stops us.

An import cannot be interrupted. One that does not end is left behind: it holds the import locks of
its own modules only, so that all others can still be imported, and its daemon thread ends with the
process at the latest.

A plug-in must therefore not rely on being imported in the main thread. One that does (it installs
a signal handler, say) needs ``WTRANSFER_LOAD_TIMEOUT_S=0``: then it is imported in the calling
thread, without a deadline.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
import threading
import traceback
from typing import TYPE_CHECKING

from wtransfer.errors import PluginBrokenError, StallError
from wtransfer.registry.policy import LOAD_TIMEOUT

if TYPE_CHECKING:
    from wtransfer.registry.discovery import Record
    from wtransfer.registry.kinds import Kind

_VALUE = re.compile(r"(?P<module>\w+(\.\w+)*)\s*:\s*(?P<attr>\w+(\.\w+)*)\s*(\[[^\]]*\])?")


def import_within(kind: Kind, record: Record, timeout_s: float) -> object:
    """Import what the record names.

    Args:
        kind: Its kind, for the error.
        record: What to import.
        timeout_s: Seconds allowed; 0: import in this thread, for as long as it takes.

    Raises:
        PluginBrokenError: The value names no object; importing raised, whatever it was, exited, or
            did not end.
    """
    place = _VALUE.fullmatch(record.value.strip())
    if place is None:
        raise PluginBrokenError(
            f"The {kind.noun} {record} cannot be loaded: its place {record.value!r} is not of the "
            "form 'module:Class'.",
            **record.facts,
        )
    attempt = _Attempt(place["module"], place["attr"])
    if timeout_s == 0:
        attempt.run()
    elif (stuck_at := attempt.run_within(timeout_s, record)) is not None:
        raise PluginBrokenError(
            f"The {kind.noun} {record} did not finish importing {record.value!r} within "
            f"{timeout_s:g} s ({LOAD_TIMEOUT}); it is at {stuck_at}. It is not tried again in "
            "this process.",
            **record.facts,
        ) from StallError(f"importing {record.value!r} did not end", seconds=timeout_s)
    if attempt.error is not None:
        raise PluginBrokenError(
            f"The {kind.noun} {record} cannot be loaded from {record.value!r}: "
            f"{type(attempt.error).__name__}: {attempt.error}. Only this name is affected.",
            **record.facts,
        ) from attempt.error
    return attempt.found


class _Attempt:
    def __init__(self, module: str, attr: str) -> None:
        self._module = module
        self._attr = attr
        self.found: object = None
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            module: object = importlib.import_module(self._module)
            self.found = functools.reduce(getattr, self._attr.split("."), module)
        except BaseException as error:  # SystemExit, too: a plug-in must not end the process
            self.error = error

    def run_within(self, timeout_s: float, record: Record) -> str | None:
        """Run on a thread; return where it is if it has not ended in time."""
        thread = threading.Thread(target=self.run, name=f"wtransfer-import-{record.name}")
        thread.daemon = True
        thread.start()
        thread.join(timeout_s)
        return _position(thread) if thread.is_alive() else None


def _position(thread: threading.Thread) -> str:
    frame = sys._current_frames().get(thread.ident or 0)  # noqa: SLF001
    if frame is None:
        return "its end"
    place = traceback.extract_stack(frame)[-1]
    return f"{place.filename}:{place.lineno} in {place.name}"
