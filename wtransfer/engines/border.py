"""Calls into an engine of either side: errors named, bounded, left behind where the engine hangs.

Every exception of an engine becomes a `WTransferError`. An engine that does not return in time is
left behind with the thread that it hangs on (`EngineThread`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

from wtransfer.calls import Call, Flag, SerialThread, start_call
from wtransfer.errors import (
    ClosedError,
    EngineError,
    RoundAbortedError,
    WTransferError,
    raised_at,
)
from wtransfer.transport.memory import is_out_of_memory, out_of_memory

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(__name__)

T = TypeVar("T")

UNBLOCK_GRACE_S = 1.0
"""Seconds an engine gets to return after ``abort_weight_update`` before its thread is abandoned."""


def call_engine(method: str, call: Callable[[], T], plugin: str) -> T:
    """Call a method of an engine.

    Args:
        method: Name of the method, for errors.
        call: The call.
        plugin: The engine, for errors.

    Raises:
        WTransferError: The engine has raised; exceptions of other classes are translated.
    """
    try:
        return call()
    except WTransferError as error:
        error.add_facts(plugin=plugin)
        raise
    except BaseException as error:
        raise engine_error(method, error, plugin) from error


def engine_error(method: str, error: BaseException, plugin: str) -> WTransferError:
    """Return our error for an exception that an engine raised."""
    # The text of an error is code of the plug-in as well, which may raise.
    with contextlib.suppress(Exception):
        if is_out_of_memory(error):
            shortage = out_of_memory("the update's", error)
            shortage.add_facts(plugin=plugin)
            return shortage
        place = raised_at(error)
        return EngineError(
            f"{method} raised {type(error).__name__}: {error}{place and f' (at {place})'}",
            plugin=plugin,
        )
    return EngineError(
        f"{method} raised {type(error).__name__}: its text cannot be shown", plugin=plugin
    )


def guarded(what: str, call: Callable[[], object] | None) -> None:
    """Call into an engine where a failure must not stop the caller: failures are logged."""
    if call is None:
        return
    try:
        call()
    except BaseException:
        logger.exception("an engine failed in %s", what)


class EngineThread:
    """An engine, and the thread that it is called on: left behind together where a call hangs.

    A call into an engine cannot be ended from outside. `abort` asks the engine to return; one that
    does not is shut down on a thread of its own, for a hung engine may hang in this call, too. A
    new thread takes the later calls, and the next engine.

    Args:
        log: Takes a line about each engine that is left behind.
        engine: The first engine, and the one in place of an engine that was left behind.
    """

    def __init__(self, log: logging.Logger, engine: Any = None) -> None:
        self.has_left = False
        """True once an engine was left behind."""
        self._log = log
        self._first = engine
        self._engine = engine
        self._lock = threading.Lock()
        self._calls = SerialThread("wtransfer-engine")
        self._given_up: weakref.WeakSet[Flag] = weakref.WeakSet()
        self._closed = False

    # -- from any thread

    @property
    def engine(self) -> Any:
        """The engine; None: there is none."""
        return self._engine

    def submit(self, call: Call) -> Call:
        """Make a call on the engine's thread, after those submitted before.

        After `shutdown` the call is not made, and ends at once with a `ClosedError`.
        """
        with self._lock:
            if not self._closed:
                return self._calls.resubmit(call)
        # No thread is left to make it, and the engine may still hang on the one that was stopped.
        if call.call_off():
            call.fail(ClosedError("the engine was shut down"))
            call.done.set()
        return call

    def abort(self, running: Flag, name: str | None, after: str) -> None:
        """Ask the engine to return from a call; `leave` it if it does not.

        Args:
            running: Set when the call that must end has ended.
            name: Name of the engine, for the log.
            after: The event after which the engine must return, for the log.
        """
        with self._lock:
            # In this order: an engine that was there before the call's end is not a later call's.
            engine = self._engine
            if running.is_set() or running in self._given_up:
                return
        guarded("abort_weight_update", getattr(engine, "abort_weight_update", None))
        self.leave(running, name, after)

    def leave(self, running: Flag, name: str | None, after: str) -> None:
        """Leave the engine behind, with its thread, unless the call ends in `UNBLOCK_GRACE_S`.

        Args: As for `abort`.

        Raises:
            RuntimeError: There is no thread for the engine's shutdown; the engine was left all the
                same.
        """
        if running.wait(UNBLOCK_GRACE_S):
            return
        with self._lock:
            # A second abort of the same call must not take the thread that came after it.
            if running.is_set() or running in self._given_up:
                return
            then = "it is left behind" if self._closed else "rebuilding it"
            self._log.warning("engine %s does not return after %s; %s", name, after, then)
            # Calls queued behind the hanging one belong to later rounds: move them along.
            waiting = self._calls.abandon()
            if all(call.done is not running for call in waiting):
                self._given_up.add(running)
            self._calls = SerialThread("wtransfer-engine")
            # An engine that was replaced meanwhile has been shut down by its successor's maker.
            left, self._engine = self._engine, self._first
            self.has_left = True
            for call in waiting:
                self._calls.resubmit(call)
            if self._closed:
                # `shutdown` has stopped the hanging thread, or is about to; stop the new one here.
                self._calls.stop()
        if left is not None:
            down = start_call(
                lambda: guarded("shutdown", getattr(left, "shutdown", None)), "wtransfer-shutdown"
            )
            down.done.wait(UNBLOCK_GRACE_S)

    def shutdown(self) -> None:
        """Shut the engine down and end its thread; one that hangs meanwhile is left behind."""
        with self._lock:
            # From here on `seat` takes no engine, and `leave` no thread that waits for calls.
            self._closed = True
            # Without a thread there is no engine but the first, which is the caller's.
            dropped = self._calls.submit(self.drop) if self._calls.started else None
        if dropped is not None:
            dropped.done.wait(UNBLOCK_GRACE_S)
            self._calls.stop()

    # -- on the engine's thread

    def own(self) -> Any:
        """Return the engine.

        Raises:
            RoundAbortedError: The thread was left behind, and no longer owns an engine.
        """
        with self._lock:
            if not self._calls.runs_here():
                raise RoundAbortedError("this round's thread was given up; its engine is gone")
            return self._engine

    def seat(self, engine: Any, name: str, note: Callable[[], None]) -> None:
        """Take over the engine that was made here; one that takes no place is shut down.

        Args:
            engine: The engine.
            name: Its name, for the error.
            note: Called in the same step, under a lock; if it raises, the engine takes no place.

        Raises:
            RoundAbortedError: This thread was left behind while it made the engine, or closed.
        """
        try:
            with self._lock:
                # A thread that was left behind meanwhile must not replace a later engine.
                if self._closed or not self._calls.runs_here():
                    raise RoundAbortedError(f"engine {name!r} took too long to be made")
                note()
                self._engine = engine
        except BaseException:
            # Without the lock: an engine may take its time to shut down.
            guarded("shutdown", getattr(engine, "shutdown", None))
            raise

    def drop(self) -> None:
        """Shut the engine down, if this thread still owns one."""
        with self._lock:
            # Under one lock: a thread left behind just now must not take its successor's engine.
            engine = self._engine if self._calls.runs_here() else None
            if engine is not None:
                self._engine = None
        if engine is not None:
            guarded("shutdown", getattr(engine, "shutdown", None))
