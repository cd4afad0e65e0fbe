"""Calls on other threads: in order, given up at a deadline, beside a transfer; close at exit."""

from __future__ import annotations

import atexit
import concurrent.futures
import contextlib
import contextvars
import logging
import os
import queue
import threading
import traceback
import weakref
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from wtransfer.deadline import Deadline
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
"""Time between two checks of whether a call is still worth waiting for."""


class Call:
    """A call on another thread, and its outcome.

    Args:
        function: What is called.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self.done = threading.Event()
        """Set when the call has returned or raised."""
        self.result: Any = None
        self.error: BaseException | None = None
        self._function: Callable[[], Any] | None = function

    def run(self) -> None:
        """Make the call; an error is kept, not raised."""
        function, self._function = self._function, None
        try:
            self.result = function() if function is not None else None
        except BaseException as error:
            self.error = error
            # Translating formats the error, whose own code may raise.
            with contextlib.suppress(Exception):
                self.error = self.translate(error)
        finally:
            # It may hold tensors, and the call may be kept for its outcome.
            del function
            self.done.set()

    def translate(self, error: BaseException) -> BaseException:
        """Return the error that is kept for one that was raised."""
        return error


class SerialThread:
    """One daemon thread that makes calls in order, started by the first one.

    A thread cannot be killed. One that hangs in foreign code can be left behind: it ends when that
    code returns, and dies with the process at the latest. Either its successor takes over
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
        self._overdue: tuple[threading.Event, str] | None = None

    def runs_here(self) -> bool:
        """Return whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

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
                    thread.start()
                except BaseException:
                    # "can't start new thread", or an interrupt: the next call tries again.
                    self._thread = thread if thread.is_alive() else None
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
            what: What it does, for errors.
            timeout_s: Longest wait, in seconds.
            check: Made now and then meanwhile; ends the wait by raising.

        Raises:
            StallError: It has not returned in time, or an earlier one has not returned yet.
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
        # Until it has returned: also where an interruption ends the wait. The call itself is not
        # kept: its result may be a tensor.
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
            # Safe against the thread itself: each entry is taken by one of us.
            while (call := self._calls.get_nowait()) is not None:
                waiting.append(call)
        self.stop()
        return waiting

    def stop(self) -> None:
        """Let the thread end after what was submitted."""
        self._stopped = True
        self._calls.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end, for at most `timeout_s` seconds."""
        if self._thread is not None and not self.runs_here():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            # It may hold tensors: not kept during the next wait.
            del call


def start_call(function: Callable[[], Any], name: str) -> Call:
    """Make a call on a daemon thread of its own."""
    call = Call(function)
    threading.Thread(target=call.run, name=name, daemon=True).start()
    return call


def start_future(function: Callable[[], T], name: str) -> Future[T]:
    """Make a call on a daemon thread of its own; return its future.

    The threads of executors and event loops are joined when the interpreter ends: there, a call
    that waits for a peer would hold up the program for its whole deadline.
    """
    future: Future[T] = Future()
    # From here on a cancelled waiter cannot cancel the call, whose result is set in any case.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    start_call(run, name)
    return future


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
    futures = {name: start_future(call, f"wtransfer-host {name}") for name, call in calls.items()}
    deadline = Deadline(timeout_s)
    # In slices: a signal that comes just before a wait, or to another thread, does not end it.
    while not all(future.done() for future in futures.values()) and not deadline.expired:
        concurrent.futures.wait(futures.values(), min(CHECK_S, deadline.remaining()))
    failed: dict[str, WTransferError] = {}
    for name, future in futures.items():
        if not future.done():
            text = f"{name} did not answer within {timeout_s:g} s"
            failed[name] = StallError(text, seconds=timeout_s, worker=name)
        elif isinstance(error := future.exception(), WTransferError):
            failed[name] = error
        elif error is not None:
            failed[name] = RemoteError(f"{name}: {type(error).__name__}: {error}", worker=name)
            failed[name].__cause__ = error
    results = {name: future.result() for name, future in futures.items() if name not in failed}
    return results, failed


def raise_failed(failed: dict[str, WTransferError], num_calls: int) -> None:
    """Raise what has failed in `map_concurrently`, if anything has.

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
        self._changed = threading.Condition()
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
            self._changed.notify()
        if self._num_threads:
            self._num_threads -= 1
            # Daemon: at the interpreter's exit nothing waits for a worker that has stalled.
            threading.Thread(target=self._run, name="wtransfer-announce", daemon=True).start()

    def wait(self) -> None:
        """Wait for every announcement; raise the first error."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_open == 0 or self._error is not None)
        self.check()

    def check(self) -> None:
        """Raise the first error of an announcement, if there is one."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._ended)
                if not self._queue:
                    return
                context, info = self._queue.popleft()
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
        pid: Of the process that has made it.
        what: Its class, for the error.

    Raises:
        ForkedError: This is another process.
    """
    if os.getpid() != pid:
        raise ForkedError(f"this {what} belongs to the parent process; after fork() make a new one")


class Closable(Protocol):
    """An object with threads behind it."""

    def close(self) -> None:
        """End them; a second call does nothing."""


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
