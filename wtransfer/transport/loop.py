"""The process's channel thread: it waits for sockets and timers, and survives a fork.

Listeners, dialers and connections of a process all share one loop. The loop starts with its first
user and ends with its last.
"""

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
from wtransfer.transport.address import descriptor_errors

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

log = logging.getLogger(__name__)

SLICE_NBYTES = 1 << 18
"""Bytes that are read from one socket at a time."""
READ = selectors.EVENT_READ
WRITE = selectors.EVENT_WRITE

_WAIT_S = 5.0

# Held while a descriptor is made and recorded, and during every fork: no child is born between the
# two, so no child inherits a socket that it does not know and would keep open for ever. Reentrant,
# for a signal handler that forks.
_fork_lock = threading.RLock()
_shared: Loop | None = None
_alive: set[Loop] = set()


class Timer:
    """A call that is due later and may be cancelled."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """Forget the call; harmless after it has been made."""
        self.call = None


class Loop:
    """Run callbacks for sockets, timers and other threads, all on one thread.

    `enter` returns the process's loop. `call_soon`, `adopt`, `release` and `wait` may be called
    from any thread, everything else only on the loop's own.

    Within one turn, sockets come before timers: bytes that arrived while this process was stopped
    or starved count before a deadline is judged.
    """

    @staticmethod
    def enter(user: object) -> Loop:
        """Return the process's loop, running; it runs until every user has called `leave`.

        Raises:
            DescriptorLimitError: No descriptor is left.
        """
        global _shared  # noqa: PLW0603 (one loop per process is the point)
        with _fork_lock:
            if _shared is None:
                loop = Loop()
                try:
                    loop._thread.start()
                except BaseException:
                    loop._dispose()
                    raise
                _shared = loop
                _alive.add(loop)
            _shared._users.add(user)  # noqa: SLF001 (same class)
            return _shared

    def __init__(self) -> None:
        self.forked = False
        """True in a fork()ed child, in which no descriptor of this loop is open."""
        self.buffer = memoryview(bytearray(SLICE_NBYTES))
        """Buffer that handlers read to: one for all sockets, valid until the handler returns."""
        self._users: set[object] = set()
        self._sockets: set[socket.socket] = set()
        self._calls: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, int, Timer]] = []
        self._timer_numbers = itertools.count()
        self._stopping = False
        self._disposed = False
        # Reentrant: a signal handler may send while its thread is in here.
        self._lock = threading.RLock()
        with descriptor_errors("starting the channel's thread"), contextlib.ExitStack() as undo:
            self._selector = undo.enter_context(selectors.DefaultSelector())
            self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            undo.pop_all()
        self._selector.register(self._wake_fd, READ, self._woken)
        self._thread = threading.Thread(target=self._run, name="wtransfer-channel", daemon=True)

    def leave(self, user: object) -> None:
        """Remove a user that has ended; the thread ends after this turn if none is left."""
        global _shared  # noqa: PLW0603
        with _fork_lock:
            self._users.discard(user)
            if not self._users:
                self._stopping = True
                if _shared is self:
                    _shared = None

    def wait(self, ended: threading.Event) -> None:
        """Wait until a user's end has been reached; on the loop's own thread return at once."""
        if threading.current_thread() is self._thread:
            return
        if not ended.wait(_WAIT_S):
            log.error("the channel's thread did not answer within %g s: a callback blocks", _WAIT_S)
        elif self._stopping:
            self._thread.join(_WAIT_S)

    def check_process(self) -> None:
        """Raise in a child of the process that made this loop.

        Raises:
            ForkedError: The process is such a child.
        """
        if self.forked:
            raise ForkedError(
                "this channel belongs to the process that made it; this is a fork()ed child, "
                "where its connections are closed: make a new one here"
            )

    def call_soon(self, call: Callable[[], None]) -> bool:
        """Schedule a call on the loop's thread.

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

    def call_later(self, seconds: float, call: Callable[[], None]) -> Timer:
        """Schedule a call on the loop's thread in `seconds`."""
        timer = Timer(call)
        due = time.monotonic() + seconds
        heapq.heappush(self._timers, (due, next(self._timer_numbers), timer))
        return timer

    def adopt(self, make: Callable[[], socket.socket]) -> socket.socket:
        """Make a socket that is closed in fork()ed children and at the end of the loop.

        Args:
            make: Makes the socket; must not block.

        Raises:
            ClosedError: The loop has ended.
        """
        with _fork_lock:
            self.check_process()
            if self._disposed:
                raise ClosedError("the channel's thread has ended")
            sock = make()
            self._sockets.add(sock)
        return sock

    def release(self, sock: socket.socket) -> None:
        """Close a socket; a watched one only on the loop's thread."""
        if not self._disposed and sock.fileno() >= 0 and sock in self._selector.get_map():
            self._selector.unregister(sock)
        with _fork_lock:
            sock.close()
            self._sockets.discard(sock)

    def watch(self, sock: socket.socket, events: int, handler: Callable[[int], None]) -> None:
        """Call `handler(mask)` whenever one of `events` is possible; 0 to stop.

        Level-triggered: a handler need not read all that is there.
        """
        # By number: for an unknown socket selectors formats its address, also of bytes.
        known = sock.fileno() in self._selector.get_map()
        if not events:
            if known:
                self._selector.unregister(sock)
        elif known:
            self._selector.modify(sock, events, handler)
        else:
            self._selector.register(sock, events, handler)

    def _run(self) -> None:
        try:
            while not self._stopping:
                for key, mask in self._selector.select(self._patience()):
                    self._guard(key.data, mask)
                # Only calls that wait now: calls that add calls must not keep sockets waiting.
                for _ in range(len(self._calls)):
                    self._guard(self._calls.popleft())
                now = time.monotonic()
                while self._timers and self._timers[0][0] <= now:
                    _, _, timer = heapq.heappop(self._timers)
                    call, timer.call = timer.call, None
                    if call is not None:
                        self._guard(call)
        finally:
            self._dispose()

    def _patience(self) -> float | None:
        if self._calls:
            return 0.0
        return max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None

    def _woken(self, _mask: int) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _guard(self, call: Callable[..., None], *args: int) -> None:
        try:
            call(*args)
        except BaseException:  # a callback may well raise CancelledError; all peers hang on us
            log.exception("a handler of the channel failed; the channel goes on")

    def _dispose(self) -> None:
        with self._lock, _fork_lock:
            if not self._disposed:
                self._disposed = True
                _alive.discard(self)
                self._close_descriptors()

    def _close_descriptors(self) -> None:
        for sock in tuple(self._sockets):
            sock.close()
        self._sockets.clear()
        self._selector.close()
        os.close(self._wake_fd)

    def _abandon(self) -> None:
        """Close this child's copies of all descriptors; the parent's stay as they are.

        Only `close`: a `shutdown` would end the parent's connections, and `unregister` would take
        them out of the epoll object, which parent and child share. No lock is taken: its holder
        does not exist in the child.
        """
        self.forked = True
        self._stopping = True  # a callback that forks goes on in the child, on this loop's thread
        if not self._disposed:
            self._disposed = True
            self._close_descriptors()


def _after_fork_in_child() -> None:
    global _shared  # noqa: PLW0603
    try:
        for loop in _alive:
            loop._abandon()  # noqa: SLF001 (same module)
        _alive.clear()
        _shared = None
    finally:
        _fork_lock.release()


os.register_at_fork(
    before=_fork_lock.acquire,
    after_in_parent=_fork_lock.release,
    after_in_child=_after_fork_in_child,
)
