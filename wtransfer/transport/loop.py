"""One thread that waits for many sockets, and what becomes of its descriptors after a fork."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import os
import selectors
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from wtransfer.errors import ClosedError, ForkedError

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

log = logging.getLogger(__name__)

READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE

_JOIN_S = 5.0

# Held while a descriptor is made and noted down, and by whoever forks: no child is born between
# the two, so none inherits a connection that it does not know and would keep open for ever.
# Reentrant, for a signal handler that forks.
_fork_lock = threading.RLock()
_loops: set[Loop] = set()


class Timer:
    """A call that is due later and may be cancelled."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Forget the call; harmless when it has been made."""
        self.call = None


class Loop:
    """Run callbacks for sockets, timers and other threads, all on one thread.

    Within one turn, sockets come before timers: bytes that arrived while this process was stopped
    or starved count before a deadline is judged.

    Args:
        name: Name of the thread.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._selector = selectors.DefaultSelector()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._sockets: set[socket.socket] = set()
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_numbers = itertools.count()
        self._stopping = False
        self._disposed = False
        self._forked = False
        # Reentrant: a signal handler may send while its thread is in here.
        self._lock = threading.RLock()
        self._selector.register(self._wake_fd, READ, self._woken)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        with _fork_lock:
            _loops.add(self)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def check_process(self) -> None:
        """Refuse to work in a child of the process that made this loop.

        Raises:
            ForkedError: This is such a child.
        """
        if self._forked:
            raise ForkedError(
                f"{self._name} belongs to the process that made it; this is a fork()ed child, "
                "where its connections are closed: make a new one here"
            )

    @property
    def forked(self) -> bool:
        """Whether this is a fork()ed child, in which nothing of this loop is open."""
        return self._forked

    def call_soon(self, call: Callable[[], None]) -> bool:
        """Have a call made on the loop's thread.

        Returns:
            False if the loop has ended and the call will not be made.
        """
        self.check_process()
        # The lock keeps the descriptor from being closed, and its number reused, before the write.
        with self._lock:
            if self._disposed:
                return False
            self._calls.append(call)
            os.eventfd_write(self._wake_fd, 1)
            return True

    def is_current(self) -> bool:
        """Return whether the caller runs on the loop's thread."""
        return threading.current_thread() is self._thread

    def join(self) -> None:
        """Wait for the thread to end, unless called on it."""
        if self.is_current() or self._thread.ident is None:
            return
        self._thread.join(_JOIN_S)
        if self._thread.is_alive():
            log.error("%s did not end within %g s: a callback blocks", self._name, _JOIN_S)

    def dispose(self) -> None:
        """Close everything; for a loop that was never started, and for its thread at the end."""
        with self._lock, _fork_lock:
            if self._disposed:
                return
            self._disposed = True
            _loops.discard(self)
            self._close_descriptors()

    def adopt(self, make: Callable[[], socket.socket]) -> socket.socket:
        """Make a socket that is closed in fork()ed children and at the end of the loop.

        Args:
            make: Makes the socket; must not block.
        """
        with _fork_lock:
            if self._disposed:
                raise ClosedError(f"{self._name} is closed")
            sock = make()
            self._sockets.add(sock)
        return sock

    def watch(self, sock: socket.socket, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler(mask)` whenever one of `events` is possible; 0 to stop.

        Level-triggered: a handler need not exhaust what is there.
        """
        # By number: for a socket that is not there selectors formats its address, also of bytes.
        known = sock.fileno() in self._selector.get_map()
        if not events:
            if known:
                self._selector.unregister(sock)
        elif known:
            self._selector.modify(sock, events, handler)
        else:
            self._selector.register(sock, events, handler)

    def release(self, sock: socket.socket) -> None:
        """Stop watching a socket and close it."""
        if sock.fileno() in self._selector.get_map():
            self._selector.unregister(sock)
        with _fork_lock:
            sock.close()
            self._sockets.discard(sock)

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Have a call made on the loop's thread in `seconds`."""
        timer = Timer(call)
        due = time.monotonic() + seconds
        heapq.heappush(self._timers, (due, next(self._timer_numbers), timer))
        return timer

    def stop(self) -> None:
        """End the thread after this turn."""
        self._stopping = True

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, mask in self._selector.select(self._patience()):
                    self._guard(key.data, mask)
                self._make_calls()
                self._make_due_calls()
        finally:
            self.dispose()

    def _patience(self) -> float | None:
        if self._calls:
            return 0.0
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _woken(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _make_calls(self) -> None:
        # Only those that wait now: calls that make calls must not keep sockets waiting.
        for _ in range(len(self._calls)):
            self._guard(self._calls.popleft())

    def _make_due_calls(self) -> None:
        now = time.monotonic()
        while self._timers and self._timers[0][0] <= now:
            _, _, timer = heapq.heappop(self._timers)
            call, timer.call = timer.call, None
            if call is not None:
                self._guard(call)

    def _guard(self, call: Callable[..., None], *args: int) -> None:
        try:
            call(*args)
        except BaseException:  # a callback may well raise CancelledError; all peers hang on us
            log.exception("%s: a handler failed; the loop goes on", self._name)

    def _close_descriptors(self) -> None:
        for sock in tuple(self._sockets):
            sock.close()
        self._sockets.clear()
        self._selector.close()
        os.close(self._wake_fd)

    def abandon(self) -> None:
        """Close this child's copies of all descriptors; the parent's stay as they are.

        Only `close`: a `shutdown` would end the parent's connections, and `unregister` would take
        them out of the epoll object, which parent and child share.
        """
        self._forked = True
        self._stopping = True  # a callback that forks goes on in the child, on this loop's thread
        if not self._disposed:
            self._disposed = True
            self._close_descriptors()


def _after_fork_in_child() -> None:
    try:
        # No lock of a loop is taken: its holder does not exist in the child.
        for loop in _loops:
            loop.abandon()
        _loops.clear()
    finally:
        _fork_lock.release()


os.register_at_fork(
    before=_fork_lock.acquire,
    after_in_parent=_fork_lock.release,
    after_in_child=_after_fork_in_child,
)
