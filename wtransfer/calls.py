"""Threads of this package: calls in order, bounded calls, waits, interrupts, close at exit.

`Changed` is the one lock and notice between threads, and argues why no signal handler leaves it
taken. `Call` is a call on a thread, `SerialThread` a thread of calls in order, `call_apart` a call
that an interrupt of its caller does not tear, `Announcer` a trainer's announcements of buckets
beside its copies.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import contextlib
import contextvars
import logging
import os
import queue
import threading
import traceback
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from wtransfer.deadline import LONGEST_S, Deadline
from wtransfer.errors import (
    ClosedError,
    ForkedError,
    HostsError,
    RemoteError,
    StallError,
    WTransferError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import FrameType

    from typing_extensions import Self


logger = logging.getLogger(__name__)

T = TypeVar("T")

CHECK_S = 0.1
"""Longest time between two checks of an awaited condition, in seconds."""
INTERRUPT_GRACE_S = 1.0
"""Seconds that an interrupted caller waits for the cancelled call to wind down."""


class Changed(_thread.RLock):  # type: ignore[misc]  # final in the stubs only
    """A lock, and notice to other threads that the guarded state has changed.

    The one means by which threads here wait for each other wherever one of them may be a caller's:
    on the main thread a signal handler may raise at almost any place, as Ctrl-C does.

    Why this leaves no lock taken. CPython runs handlers as a Python function is entered, after a
    call of a C function has returned, and at a jump back. No handler runs between entering ``with``
    and the block, nor between the block's end and the exit, if both are C: this class inherits
    them. Where they are Python code (`threading.Event`, `threading.Condition`, futures, generators
    as context managers), a handler can raise as that code returns, with the lock taken and no block
    that would release it. A condition moreover gives its lock up within the block while it waits,
    and a handler that raises there makes the block release a lock that it does not hold.

    So a wait holds nothing: the waiter leaves a ticket under the lock (a lock of its own, taken)
    and sleeps on that; the next notification releases every ticket. A notification between the look
    and the sleep finds the ticket and makes the sleep end at once. A wait that is interrupted
    leaves a ticket behind at most, which the next notification takes away.

    Every wait looks again after `CHECK_S`, on whichever thread. A signal that comes just before a
    sleep of the main thread does not end it. A notification of the main thread may be interrupted
    as it begins, with the state changed and every ticket in place, and those may be of any thread.
    And a condition may depend on the time, which notifies no thread.

    CPython 3.10 also runs handlers as an error reaches the end of its block, before the exit. No
    method raises within the block on a caller's thread, so this takes two signals at once.

    Guarded state may be half changed when a handler raises. A change that must be atomic is a call
    of its own on another thread (`call_apart`), or one assignment.
    """

    def __init__(self) -> None:
        self._tickets: deque[_thread.LockType] = deque()
        self._watchers: list[Callable[[], object]] = []

    def is_held_here(self) -> bool:
        """Return whether the calling thread holds the lock."""
        return bool(self._is_owned())  # type: ignore[attr-defined]  # as conditions ask it

    def notify_all(self) -> None:
        """Let every wait look again."""
        with self:
            while self._tickets:
                self._tickets.pop().release()
            for watcher in self._watchers:
                watcher()

    def wait_for(self, done: Callable[[], T], timeout_s: float | None = None) -> T:
        """Wait until `done` returns a true value; return its last result.

        Args:
            done: Called under the lock; may raise, but not on a caller's thread.
            timeout_s: Longest wait, in seconds; None: no limit. The lock must not be held: the
                change that is waited for could not come.
        """
        assert not self.is_held_here()
        deadline = Deadline(LONGEST_S if timeout_s is None else timeout_s)
        ticket = _thread.allocate_lock()
        ticket.acquire()
        is_left = False
        try:
            while True:
                with self:
                    if (found := done()) or deadline.expired:
                        return found
                    if not is_left:
                        self._tickets.append(ticket)
                is_left = not ticket.acquire(timeout=min(deadline.remaining(), CHECK_S))
        finally:
            if is_left:
                with self, contextlib.suppress(ValueError):  # released since
                    self._tickets.remove(ticket)

    async def wait_for_async(self, done: Callable[[], T], timeout_s: float | None = None) -> T:
        """Wait as `wait_for`, without blocking the event loop."""
        deadline = Deadline(LONGEST_S if timeout_s is None else timeout_s)
        loop, come = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            # A loop that was closed in the middle of the wait has no task left to wake.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(come.set)

        try:
            with self:
                self._watchers.append(wake)
            while True:
                with self:
                    if (found := done()) or deadline.expired:
                        return found
                # asyncio logs what a signal handler raises in a callback, and goes on. So a second
                # one follows; the event is cleared first, for one that was half set stays as it is.
                # `asyncio.wait_for` would drop a cancellation that comes along with the event.
                pause_s = min(deadline.remaining(), CHECK_S)
                steps = (come.set, come.clear, come.set)
                timers = [loop.call_later(at * pause_s, step) for at, step in enumerate(steps, 1)]
                try:
                    await come.wait()
                finally:
                    for timer in timers:
                        timer.cancel()
                come.clear()
        finally:
            with self:
                if wake in self._watchers:
                    self._watchers.remove(wake)


class Flag:
    """A `threading.Event` for callers' threads; see `Changed`."""

    def __init__(self) -> None:
        self._changed = Changed()
        self._is_set = False

    def is_set(self) -> bool:
        """Return whether the flag is set."""
        return self._is_set

    def set(self) -> None:
        """Set the flag, for good, and end every wait."""
        self._is_set = True
        self._changed.notify_all()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the flag is set, for at most `timeout_s` seconds; return whether it is."""
        return self._changed.wait_for(self.is_set, timeout_s)

    async def wait_async(self) -> None:
        """Wait until the flag is set, without blocking the event loop."""
        await self._changed.wait_for_async(self.is_set)


class Call:
    """A call on another thread, and its outcome.

    Args:
        function: The function to call.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.done = Flag()
        """Set when the call has returned or raised."""
        self.result: Any = None
        self.error: BaseException | None = None
        self._function = [function]

    def run(self) -> None:
        """Make the call, unless it was begun already; an error is kept, not raised."""
        try:
            function = self._function.pop()
        except IndexError:
            return
        try:
            self.result = function()
        except BaseException as error:
            self.fail(error)
        finally:
            # The function may hold tensors, and the call may be kept for its outcome.
            del function
            self.done.set()

    def start(self, name: str) -> None:
        """Make the call on a daemon thread of its own.

        The threads of executors and event loops are joined when the interpreter ends: there, a call
        that waits for a peer would hold up the program for its whole deadline.

        Raises:
            RuntimeError: No thread can be started.
        """
        start_thread(threading.Thread(target=self.run, name=name, daemon=True))

    def call_off(self) -> bool:
        """Cancel the call if it has not begun; return whether it was cancelled."""
        try:
            self._function.pop()
        except IndexError:
            return False
        return True

    def fail(self, error: BaseException) -> None:
        """Keep the error that the call has raised."""
        self.error = error

    def outcome(self) -> Any:
        """Return the result, or raise the error; once, for neither is kept.

        A kept error keeps the frames that it has passed through, and those keep this call.
        """
        error, self.error = self.error, None
        result, self.result = self.result, None
        try:
            if error is not None:
                raise error
            return result
        finally:
            del error, result


class SerialThread:
    """One daemon thread that makes calls in order, started by the first one.

    A thread cannot be killed. A thread that hangs in foreign code can be left behind: it ends when
    that code returns, and dies with the process at the latest. Either its successor takes over
    (`abandon`), or no further call is made until it has returned (`call`).

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()
        self._stopped = False
        self._overdue: tuple[Flag, str] | None = None

    @property
    def started(self) -> bool:
        """True if a call was submitted, and had a thread."""
        return self._thread is not None

    def runs_here(self) -> bool:
        """Return whether the caller runs on this thread."""
        return self.runs(threading.current_thread())

    def runs(self, thread: threading.Thread) -> bool:
        """Return whether this is the thread."""
        return thread is self._thread

    def given_up(self) -> str | None:
        """Return the description of a given-up call that has not returned; None: no such call."""
        if self._overdue is None or self._overdue[0].is_set():
            return None
        return self._overdue[1]

    def submit(self, function: Callable[[], Any]) -> Call:
        """Make a call after those submitted before."""
        return self.resubmit(Call(function))

    def resubmit(self, call: Call) -> Call:
        """Take over a call that another thread did not get to."""
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread = thread
                try:
                    start_thread(thread)
                except BaseException:
                    # "can't start new thread", or an interrupt: the next call tries again.
                    self._thread = None
                    raise
            self._calls.put(call)
        return call

    def call(
        self,
        function: Callable[[], T],
        what: str,
        timeout_s: float,
        check: Callable[[], None] = lambda: None,
    ) -> T:
        """Make a call and return its result.

        While a call that was given up still runs, further ones are refused: collectives that
        overtake each other are worse than none.

        Args:
            function: The call.
            what: Description of the call, for errors.
            timeout_s: Longest wait, in seconds.
            check: Made now and then meanwhile; ends the wait by raising.

        Raises:
            StallError: The call has not returned in time, or an earlier one has not returned yet.
            ClosedError: The thread was stopped.
        """
        deadline = Deadline(timeout_s)
        if self._overdue is not None:
            done, its_name = self._overdue
            if not done.wait(deadline.remaining()):
                raise StallError(
                    f"cannot begin {what}: {its_name} was given up and has not returned yet",
                    seconds=timeout_s,
                )
        if self._stopped:
            raise ClosedError(f"cannot begin {what}: this was closed")
        call = self.submit(function)
        # Overdue until the call has returned, also where an interruption ends the wait. The call
        # itself is not kept: its result may be a tensor.
        self._overdue = (call.done, what)
        while not call.done.wait(min(deadline.remaining(), CHECK_S)):
            if deadline.expired:
                raise StallError(
                    f"no progress on {what} within {timeout_s:g} s; the call is left behind, and "
                    "its peer may be gone",
                    seconds=timeout_s,
                )
            check()
        self._overdue = None
        if call.error is not None:
            raise call.error
        result: T = call.result
        return result

    def abandon(self) -> list[Call]:
        """Leave the thread behind in its present call; return the calls after it."""
        waiting = []
        with contextlib.suppress(queue.Empty):
            # Safe against the thread itself: each entry is taken by one side only.
            while (call := self._calls.get_nowait()) is not None:
                waiting.append(call)
        self.stop()
        return waiting

    def stop(self) -> None:
        """Let the thread end after the submitted calls."""
        self._stopped = True
        self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, for at most `timeout_s` seconds."""
        if self._thread is not None and not self.runs_here():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        with self._starting:
            if not self.runs_here():
                return  # its start was interrupted; another one may have been started since
        while (call := self._calls.get()) is not None:
            call.run()
            # The call may hold tensors: not kept during the next wait.
            del call


def start_thread(thread: threading.Thread) -> None:
    """Start a thread as `Thread.start` does, safe against signal handlers that raise meanwhile.

    `Thread.start` waits for the new thread by an event: interrupted there, it could keep the
    event's lock from the new thread, which would never run. So the main thread, where handlers run,
    has another thread make the call, started by one call of C.

    Raises:
        RuntimeError: No thread can be started.
    """
    if threading.current_thread() is not threading.main_thread():
        thread.start()
        return
    started, errors = Flag(), list[BaseException]()

    def start() -> None:
        try:
            thread.start()
        except BaseException as error:
            errors.append(error)
        finally:
            started.set()

    _thread.start_new_thread(start, ())
    started.wait()
    if errors:
        raise errors.pop()


def start_in_finaliser(function: Callable[[], Any], name: str) -> None:
    """Make a call on a daemon thread of its own, from a finaliser: takes no lock and never waits.

    The collector runs finalisers wherever a thread happens to be, within `Thread.start` as well,
    whose lock is not reentrant. So only C runs here, and another thread makes that call.

    Raises:
        RuntimeError: No thread can be started.
    """
    _thread.start_new_thread(
        lambda: threading.Thread(target=function, name=name, daemon=True).start(), ()
    )


def start_call(function: Callable[[], Any], name: str) -> Call:
    """Make a call on a daemon thread of its own; see `Call.start`."""
    call = Call(function)
    call.start(name)
    return call


def call_apart(
    function: Callable[[], T],
    name: str,
    on_interrupt: Callable[[BaseException], object] = lambda _error: None,
) -> T:
    """Make a call on a thread of its own and return its result.

    Signal handlers run on the main thread. A handler that raises meanwhile ends the wait and not
    the call: the state that the call changes is never left half changed. Where no thread can be
    started, as at the end of the interpreter, the call is made here.

    Args:
        function: The call; made in the caller's context.
        name: Name of the thread.
        on_interrupt: Called with the exception that has interrupted the wait, to let a call that
            has begun end; the call has `INTERRUPT_GRACE_S` for that.
    """
    context = contextvars.copy_context()
    call = Call(lambda: context.run(function))
    try:
        try:
            call.start(name)
        except RuntimeError:
            call.run()
        call.done.wait()
    except BaseException as error:
        on_interrupt(error)
        if not call.call_off():
            call.done.wait(INTERRUPT_GRACE_S)
        raise
    result: T = call.outcome()
    return result


def map_concurrently(
    calls: Mapping[str, Callable[[], T]], timeout_s: float
) -> tuple[dict[str, T], dict[str, WTransferError]]:
    """Make all calls at the same time, and wait until every one has returned or time is up.

    Args:
        calls: Host -> call.
        timeout_s: Longest wait, in seconds. Calls that still run then are left to their own
            time-outs.

    Returns:
        Host -> result, and host -> error.
    """
    begun = {name: start_call(call, f"wtransfer-host {name}") for name, call in calls.items()}
    deadline = Deadline(timeout_s)
    results: dict[str, T] = {}
    failed: dict[str, WTransferError] = {}
    for name, call in begun.items():
        if not call.done.wait(deadline.remaining()):
            text = f"{name} did not answer within {timeout_s:g} s"
            failed[name] = StallError(text, seconds=timeout_s, worker=name)
        elif call.error is not None:
            failed[name] = host_error(name, call.error)
        else:
            results[name] = call.result
    return results, failed


def host_error(name: str, error: BaseException) -> WTransferError:
    """Return what a call to a host has raised as an error of ours, which names the host."""
    if isinstance(error, WTransferError):
        return error
    # Clients of other projects raise without what the server has said.
    said = getattr(getattr(error, "response", None), "text", None)
    text = f"{name}: {type(error).__name__}: {error}{f' ({said:.2000})' if said else ''}"
    ours = RemoteError(text, worker=name)
    ours.__cause__ = error
    return ours


def raise_failed(failed: dict[str, WTransferError], num_calls: int) -> None:
    """Raise the failures of `map_concurrently`, if there are any.

    Raises:
        WTransferError: The only failure.
        HostsError: Several calls failed.
    """
    if len(failed) == 1:
        raise next(iter(failed.values()))
    if failed:
        lines = "".join(f"\n  {name}: {error}" for name, error in failed.items())
        raise HostsError(f"{len(failed)} of {num_calls} hosts failed:{lines}", errors=failed)


def on_callers_stream(function: Callable[[], T]) -> Callable[[], T]:
    """Return the function, to be called on another thread with this thread's CUDA stream.

    Each thread begins with the first device and its default stream, which waits for no other: a
    tensor that is gathered there could be read here before its bytes have arrived.
    """
    import torch

    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return function
    stream = torch.cuda.current_stream()

    def call() -> T:
        with torch.cuda.stream(stream):
            return function()

    return call


class Announcer:
    """Announces buckets on daemon threads, so that trainer and workers overlap.

    A context manager: leaving it waits for every announcement and raises the first error. Leaving
    it on an error waits for none: workers may be waiting for bytes that will not come now.

    Args:
        tell: Announces one bucket; returns when every worker has received it.
        num_under_way: Announcements under way at a time.
    """

    def __init__(self, tell: Callable[[dict[str, Any]], None], num_under_way: int = 1) -> None:
        self._tell = tell
        self._changed = Changed()
        self._queue: deque[tuple[contextvars.Context, dict[str, Any]]] = deque()
        self._num_open = 0
        self._error: BaseException | None = None
        self._ended = False
        self._num_threads = num_under_way

    def announce(self, info: dict[str, Any]) -> None:
        """Queue an announcement; raise if an earlier one has failed.

        The caller's context goes with it: a late announcement cannot reach the next round.
        """
        self.check()
        with self._changed:
            self._queue.append((contextvars.copy_context(), info))
            self._num_open += 1
        self._changed.notify_all()
        if self._num_threads:
            self._num_threads -= 1
            # Daemon: at the interpreter's exit nothing waits for a worker that has stalled.
            start_call(self._run, "wtransfer-announce")

    def wait(self) -> None:
        """Wait for every announcement; raise the first error."""
        self._changed.wait_for(lambda: self._num_open == 0 or self._error is not None)
        self.check()

    def check(self) -> None:
        """Raise the first error of an announcement, if there is one."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        def next_one() -> tuple[contextvars.Context, dict[str, Any]] | bool:
            return self._queue.popleft() if self._queue else self._ended

        while not isinstance(found := self._changed.wait_for(next_one), bool):
            context, info = found
            error = None
            try:
                context.run(self._tell, info)
            except BaseException as raised:
                error = raised
            with self._changed:
                self._num_open -= 1
                self._error = self._error or error
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            with self._changed:
                self._ended = True
                self._num_open -= len(self._queue)
                self._queue.clear()
            self._changed.notify_all()


def forget_frames(error: BaseException | None) -> None:
    """Clear the frames that an error has passed through, so that keeping it keeps no tensors.

    Frames that still run keep their variables, so call this where none of them matters.
    """
    left, seen = [error], set[int]()
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        traceback.clear_frames(each.__traceback__)
        if each.__traceback__ is not None:
            _clear_callers(each.__traceback__.tb_frame)
        left += [each.__cause__, each.__context__]


def _clear_callers(frame: FrameType) -> None:
    # A frame keeps its caller, also after both have returned.
    with contextlib.suppress(RuntimeError):
        while (caller := frame.f_back) is not None:
            frame = caller
            frame.clear()


def check_process(pid: int, what: str) -> None:
    """Raise in a child of the process that has made an object.

    Threads that would end a wait, and that might hold a lock, are not in a child.

    Args:
        pid: Process that has made the object.
        what: Class of the object, for the error.

    Raises:
        ForkedError: The calling process is another one.
    """
    if os.getpid() != pid:
        raise ForkedError(f"this {what} belongs to the parent process; after fork() make a new one")


class Closable(Protocol):
    """An object with threads behind it."""

    def close(self) -> None:
        """End the threads; a second call does nothing."""


_open: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_at_exit(what: Closable) -> None:
    """Close `what` when the interpreter ends, if it still exists then.

    Daemon threads go on while the interpreter is taken down, and one that releases a tensor or a
    process group in that moment ends the process with an abort.
    """
    _open.add(what)


@atexit.register
def _close_all() -> None:
    for each in list(_open):
        _close(each)


def _close(what: Closable) -> None:
    try:
        what.close()
    except Exception:
        logger.exception("%s could not be closed at exit", type(what).__name__)
