"""One connection of the control channel: handshake, frames, heartbeat, orderly end."""

from __future__ import annotations

import enum
import errno
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from wtransfer.errors import (
    LimitError,
    PeerError,
    PeerLostError,
    StallError,
    TruncatedError,
    WTransferError,
)
from wtransfer.transport.auth import HANDSHAKE, Handshake
from wtransfer.transport.frames import MIB, Codec, FrameReader, MessageType
from wtransfer.transport.loop import READ, WRITE, Loop

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

log = logging.getLogger(__name__)

MAX_OUTBOX_NBYTES = 256 * MIB
"""Bytes that may wait for one peer; four of the largest messages."""

_SLICE_NBYTES = MIB // 4
_TURN_NBYTES = MIB  # per turn of the loop, so that one large message does not hold up the others
_UNPROVEN_READ_NBYTES = 1024
_FLUSH_S = 0.5


class Ping(msgspec.Struct):
    """Say that this side lives, when it has nothing else to say."""


_PING = MessageType(0xFFFF, Ping, max_nbytes=64)


def with_heartbeat(codec: Codec) -> Codec:
    """Return the codec of an application's messages, plus the channel's own."""
    return codec.including([_PING])


class _State(enum.Enum):
    HANDSHAKE = enum.auto()
    OPEN = enum.auto()
    CLOSING = enum.auto()
    GONE = enum.auto()


@dataclass(frozen=True)
class Events:
    """What a connection tells its owner, always on the loop's thread."""

    on_ready: Callable[[Connection], None]
    """The handshake is complete."""
    on_message: Callable[[Connection, msgspec.Struct], None]
    """A message of the application arrived."""
    on_gone: Callable[[Connection, WTransferError | None], None]
    """The socket is closed; called exactly once, also where `on_ready` never was."""


class Connection:
    """An authenticated connection to one peer; made by a `Listener` or a `Dialer`.

    `send`, `send_frame`, `close` and the properties may be used from any thread, also from a
    signal handler; none of them blocks.

    Args:
        loop: Loop that serves the socket.
        sock: Connected, non-blocking, adopted by the loop.
        peer: Who is at the other end, as it shall stand in errors.
        codec: The application's messages and the heartbeat.
        handshake: This side of the handshake.
        handshake_s: Time that the whole handshake may take, in seconds.
        events: The owner's callbacks.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        *,
        peer: str,
        codec: Codec,
        handshake: Handshake,
        handshake_s: float,
        events: Events,
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._codec = codec
        self._handshake = handshake
        self._events = events
        self._reader = FrameReader(HANDSHAKE, peer)
        self._state = _State.HANDSHAKE
        self._error: WTransferError | None = None
        self._outbox: deque[bytes] = deque()
        self._outbox_nbytes = 0
        self._sent_of_first = 0
        self._closed = False
        # Reentrant: a signal handler may send while its thread is in here.
        self._lock = threading.RLock()
        self._heard_at = self._sent_at = time.monotonic()
        self._watched = READ
        self._timer = loop.call_later(handshake_s, lambda: self._handshake_late(handshake_s))

    @property
    def peer(self) -> str:
        """Who is at the other end, as it stands in errors; may be set when more is known."""
        return self._reader.peer

    @peer.setter
    def peer(self, name: str) -> None:
        self._reader.peer = name

    @property
    def closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._closed or self._loop.forked

    @property
    def last_heard_s(self) -> float:
        """Seconds since the last byte from the peer."""
        return time.monotonic() - self._heard_at

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message for the peer.

        Raises:
            LimitError: The message exceeds its type's limits, or more waits than is allowed; in
                the second case the connection is closed.
            PeerLostError: The connection is closed.
            ForkedError: This is a fork()ed child.
        """
        self.send_frame(self._codec.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Queue an encoded message; many connections may share the same bytes.

        Args:
            frame: What `Codec.encode` returned.

        Raises:
            LimitError: More waits than is allowed; the connection is closed.
            PeerLostError: The connection is closed.
            ForkedError: This is a fork()ed child.
        """
        self._loop.check_process()
        with self._lock:
            if self._closed:
                raise PeerLostError(f"the connection to {self.peer} is closed") from self._error
            fits = self._outbox_nbytes + len(frame) <= MAX_OUTBOX_NBYTES
            idle = not self._outbox
            if fits:
                self._queue(frame)
            else:
                self._closed = True
        if not fits:
            self._overflow(len(frame))
        elif idle:
            # While something waits, the loop knows already and goes on until nothing does.
            self._loop.call_soon(self._flush)

    def close(self, reason: WTransferError | None = None) -> None:
        """End the connection once what is queued has been sent, or after 0.5 s.

        Messages that still arrive are dropped. In a fork()ed child this does nothing: there the
        connection is closed already.

        Args:
            reason: Handed to the owner's `on_close`.
        """
        if self._loop.forked:
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._loop.call_soon(lambda: self._begin_close(reason))

    def start(self) -> None:
        """Begin the handshake; the owner calls this once, on the loop's thread."""
        self._loop.watch(self._socket, READ, self._ready)
        if (opening := self._handshake.start()) is not None:
            self._queue(HANDSHAKE.encode(opening))
            self._flush()

    def drop(self, error: WTransferError | None) -> None:
        """Close the socket now, whatever is queued; for the owner, on the loop's thread."""
        if self._state is _State.GONE:
            return
        self._timer.cancel()
        self._loop.release(self._socket)
        with self._lock:
            self._state = _State.GONE
            self._closed = True
            self._error = error
            self._outbox.clear()
            self._outbox_nbytes = 0
        self._events.on_gone(self, error)

    def _queue(self, frame: bytes) -> None:
        with self._lock:
            self._outbox.append(frame)
            self._outbox_nbytes += len(frame)

    def _overflow(self, nbytes: int) -> None:
        error = LimitError(
            f"{self.peer} does not take its messages: {self._outbox_nbytes} bytes wait and "
            f"{nbytes} more exceed the {MAX_OUTBOX_NBYTES} allowed; the connection is closed"
        )
        self._loop.call_soon(lambda: self.drop(error))
        raise error

    def _ready(self, mask: int) -> None:
        try:
            if mask & WRITE:
                self._flush()
            if mask & READ and self._state in {_State.HANDSHAKE, _State.OPEN}:
                self._read()
        except Exception as error:
            log.exception("connection to %s: a handler failed; it is closed", self.peer)
            self.drop(_wrapped(self.peer, error))

    def _read(self) -> None:
        proven = self._state is _State.OPEN
        try:
            data = self._socket.recv(_SLICE_NBYTES if proven else _UNPROVEN_READ_NBYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self.drop(self._lost(error))
            return
        if data:
            self._heard_at = time.monotonic()
            self._take(data)
        else:
            self.drop(self._ended())

    def _take(self, data: bytes) -> None:
        messages = self._reader.feed(data)
        while self._state in {_State.HANDSHAKE, _State.OPEN}:
            try:
                message = next(messages, None)
            except PeerError as error:
                self._refuse(error)
                return
            if message is None:
                return
            self._dispatch(message)

    def _dispatch(self, message: msgspec.Struct) -> None:
        if self._state is _State.HANDSHAKE:
            self._shake_hands(message)
        elif not isinstance(message, Ping) and not self._closed:
            self._events.on_message(self, message)

    def _shake_hands(self, message: msgspec.Struct) -> None:
        try:
            answer = self._handshake.receive(message)
        except PeerError as error:
            self._refuse(error)
            return
        if answer is not None:
            self._queue(HANDSHAKE.encode(answer))
        if self._handshake.complete:
            # From the next frame on: only the application's messages, with their limits.
            self._reader.codec = self._codec
            self._state = _State.OPEN
            self._timer.cancel()
            self._pulse()
            self._events.on_ready(self)
        self._flush()

    def _refuse(self, error: PeerError) -> None:
        """Drop the peer; one that has proven nothing yet is told why, if it listens."""
        reject = self._handshake.refusal(error) if self._state is _State.HANDSHAKE else None
        if reject is not None:
            self._queue(HANDSHAKE.encode(reject))
            self._flush()
        self.drop(error)

    def _handshake_late(self, seconds: float) -> None:
        self.drop(
            StallError(
                f"{self.peer} did not finish the handshake within {seconds:g} s", seconds=seconds
            )
        )

    def _flush(self) -> None:
        """Send what the socket takes now, and be called again for the rest."""
        if self._state is _State.GONE:
            return
        try:
            for _ in range(_TURN_NBYTES // _SLICE_NBYTES):
                if not self._outbox:
                    break
                self._send_slice()
        except BlockingIOError:
            pass
        except OSError as error:
            self._cannot_send(error)
            return
        if not self._outbox and self._state is _State.CLOSING:
            self.drop(self._error)
            return
        self._watch()

    def _send_slice(self) -> None:
        first = self._outbox[0]
        start = self._sent_of_first
        sent = self._socket.send(memoryview(first)[start : start + _SLICE_NBYTES])
        self._sent_at = time.monotonic()
        with self._lock:
            self._sent_of_first += sent
            self._outbox_nbytes -= sent
            if self._sent_of_first == len(first):
                self._outbox.popleft()
                self._sent_of_first = 0

    def _cannot_send(self, error: OSError) -> None:
        if self._state is _State.CLOSING:
            self.drop(self._error)
            return
        if error.errno not in {errno.EPIPE, errno.ECONNRESET}:
            self.drop(self._lost(error))
            return
        # The peer has closed. Its last words may still be here, such as why: read up to the end.
        with self._lock:
            self._outbox.clear()
            self._outbox_nbytes = self._sent_of_first = 0
        self._watch()

    def _watch(self) -> None:
        events = WRITE if self._outbox else 0
        if self._state is not _State.CLOSING:
            events |= READ
        if events != self._watched:
            self._watched = events
            self._loop.watch(self._socket, events, self._ready)

    def _pulse(self) -> None:
        """Judge the peer's silence and break our own; comes back in time for the next of both."""
        shake = self._handshake
        silent_s = self.last_heard_s
        if silent_s >= shake.deadline_s:
            self.drop(
                StallError(
                    f"{self.peer} has been silent for {silent_s:.1f} s; at most "
                    f"{shake.deadline_s:g} s are allowed",
                    seconds=shake.deadline_s,
                )
            )
            return
        # Bytes that wait to be sent are a sign of life in themselves once they arrive.
        if not self._outbox and time.monotonic() - self._sent_at >= shake.heartbeat_s / 2:
            self._queue(self._codec.encode(Ping()))
            self._flush()
        pause_s = min(shake.heartbeat_s / 2, shake.deadline_s - silent_s)
        self._timer = self._loop.call_later(pause_s, self._pulse)

    def _begin_close(self, reason: WTransferError | None) -> None:
        if self._state is _State.GONE:
            return
        self._state = _State.CLOSING
        self._error = reason
        self._timer.cancel()
        self._timer = self._loop.call_later(_FLUSH_S, lambda: self.drop(reason))
        self._flush()

    def _lost(self, error: OSError) -> PeerLostError:
        lost = PeerLostError(f"{self.peer} is gone: {error.strerror}")
        lost.__cause__ = error
        return lost

    def _ended(self) -> PeerError:
        try:
            self._reader.finish()
        except TruncatedError as error:
            return error
        return PeerLostError(f"{self.peer} is gone: it closed the connection or its process ended")


def _wrapped(peer: str, error: Exception) -> WTransferError:
    if isinstance(error, WTransferError):
        return error
    wrapped = PeerLostError(
        f"the connection to {peer} is closed: a callback raised {type(error).__name__}: {error}"
    )
    wrapped.__cause__ = error
    return wrapped
