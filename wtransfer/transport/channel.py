"""The control channel: authenticated messages between one listener and its dialers.

Of weights the listener is the trainer and the dialers are workers; of KV cache the listener is the
instance that has blocks, and the dialers want them. Steps say trainer and worker for either.

Life of a connection, with the side of each step:

1. trainer: a `Listener` binds its address (Unix socket by default) and accepts
2. worker: a `Dialer` dials, with back-off, until a listener answers
3. both: on Unix sockets the kernel states the peer's user; another user's process is refused
4. both: Challenge, Auth, Welcome (see `wtransfer.transport.handshake`); a listener allows 1 s for
   the whole of it and frames of at most 1 KiB, a dialer waits until its deadline; one that is cut
   off dials again
5. both: `on_open`, then the application's messages in order, in frames that are checked and limited
   before they are read (see `wtransfer.transport.framing`)
6. both: a side that has been silent for half of `heartbeat_s` sends a ping; a side that has heard
   nothing for `deadline_s` gives the peer up (`StallError`). A killed peer shows at once
   (`PeerLostError`)
7. either: `close`; queued messages are sent first, for at most 0.5 s
8. both: `on_close`, exactly once; the worker goes back to step 2

Callbacks of a process all run on one thread (`wtransfer.transport.loop`), for any number of
listeners and dialers. Callbacks must not block, nor wait for a lock that another thread holds while
it calls `close`. A callback that raises costs its own connection, never another.

Nothing that a peer sends is unpickled, evaluated or imported. After a ``fork()`` the child's copies
of all sockets are closed, and the objects raise `ForkedError` there.
"""

from __future__ import annotations

import contextlib
import enum
import errno
import logging
import random
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from wtransfer.deadline import Deadline
from wtransfer.errors import (
    AddressError,
    AuthenticationError,
    ClosedError,
    LimitError,
    PeerError,
    PeerLostError,
    ProtocolError,
    StallError,
    TruncatedError,
    WTransferError,
)
from wtransfer.transport.address import (
    Address,
    ListeningSocket,
    check_same_user,
    connect,
    descriptor_errors,
    limit_wait,
    no_delay,
    parse_address,
    random_address,
)
from wtransfer.transport.framing import MIB, Codec, FrameReader, MessageType
from wtransfer.transport.handshake import (
    HANDSHAKE,
    PROTOCOL,
    TrainerHandshake,
    WorkerHandshake,
    new_token,
    refusals,
    resolve_token,
    shake_hands,
)
from wtransfer.transport.loop import READ, SLICE_NBYTES, WRITE, Loop, Timer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wtransfer.transport.handshake import Handshake

__all__ = [
    "PROTOCOL",
    "Codec",
    "Connection",
    "Dial",
    "Dialer",
    "Listener",
    "MessageType",
    "ask",
    "dialed",
    "new_token",
    "random_address",
    "resolve_token",
]

log = logging.getLogger(__name__)

MAX_OUTBOX_NBYTES = 256 * MIB
"""Bytes that may wait for one peer; four of the largest messages."""
MAX_CONNECTIONS = 1024
"""Authenticated connections of one listener at a time."""
MAX_UNPROVEN = 64
"""Connections of one listener at a time that have not finished the handshake."""
HANDSHAKE_S = 0.9
"""Time that a listener allows for a whole handshake, however it is cut into bytes; a stranger is
gone within 1 s."""

_TURN_NBYTES = MIB  # per turn of the loop, so that one large message does not hold up the others
_UNPROVEN_READ_NBYTES = 1024
_FLUSH_S = 0.5
_MAX_HEARTBEAT_S = 5.0

_GRACE_S = 0.1  # a worker answers a challenge within a few milliseconds, or else dials again
_ACCEPTS_PER_TURN = 16  # so that the others' sockets are served between two bursts
_PAUSE_S = 0.1
_WARN_EVERY_S = 1.0  # a flood of strangers must not become a flood of warnings

_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
_REFUSED_PAUSE_S = 5.0
_SETTLED_S = 1.0
_CONNECT_S = 5.0


class Ping(msgspec.Struct):
    """Keep-alive on an idle connection."""


_PING = MessageType(0xFFFF, Ping, max_nbytes=64)

OnOpen: TypeAlias = "Callable[[Connection], None]"
OnMessage: TypeAlias = "Callable[[Connection, msgspec.Struct], None]"
OnClose: TypeAlias = "Callable[[Connection, WTransferError | None], None]"
OnRefused: TypeAlias = Callable[[WTransferError], None]


class _State(enum.Enum):
    HANDSHAKE = enum.auto()
    OPEN = enum.auto()
    CLOSING = enum.auto()
    GONE = enum.auto()


class Connection:
    """An authenticated connection to one peer; made by a `Listener` or a `Dialer`.

    `send`, `send_frame`, `close` and the properties may be used from any thread, also from a
    signal handler; none of them blocks.

    Args:
        loop: Loop that serves the socket.
        sock: Connected, non-blocking, adopted by the loop.
        codec: The application's messages and the heartbeat.
        handshake: This side of the handshake.
        reader: Takes the peer's bytes.
        on_ready: Called when the handshake is complete.
        on_message: Called for each message of the application.
        on_gone: Called exactly once, when the socket is closed.
    """

    def __init__(
        self,
        loop: Loop,
        sock: socket.socket,
        *,
        codec: Codec,
        handshake: Handshake,
        reader: FrameReader,
        on_ready: OnOpen,
        on_message: OnMessage,
        on_gone: OnClose,
    ) -> None:
        self._loop = loop
        self._socket = sock
        self._codec = codec
        self._handshake = handshake
        self._reader = reader
        self._on_ready, self._on_message, self._on_gone = on_ready, on_message, on_gone
        self._state = _State.HANDSHAKE
        self._error: WTransferError | None = None
        self._outbox: deque[bytes] = deque()
        self._outbox_nbytes = 0
        self._sent_of_first = 0
        self._closed = False
        self._receiving = True
        # Reentrant: a signal handler may send while its thread is in here.
        self._lock = threading.RLock()
        self._heard_at = self._sent_at = time.monotonic()
        self._watched = READ
        self._timer = Timer(lambda: None)

    @property
    def peer(self) -> str:
        """Name of the peer in errors; may be set when more is known."""
        return self._reader.peer

    @peer.setter
    def peer(self, name: str) -> None:
        self._reader.peer = name

    @property
    def closed(self) -> bool:
        """True if nothing can be sent any more."""
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
            ForkedError: The process is a fork()ed child.
        """
        self.send_frame(self._codec.encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Queue a frame of `Codec.encode`; many connections may share the same bytes.

        Raises:
            LimitError: More waits than is allowed; the connection is closed.
            PeerLostError: The connection is closed.
            ForkedError: The process is a fork()ed child.
        """
        self._loop.check_process()
        with self._lock:
            if self._closed:
                raise PeerLostError(f"the connection to {self.peer} is closed") from self._error
            nbytes = self._outbox_nbytes + len(frame)
            fits = nbytes <= MAX_OUTBOX_NBYTES
            if fits:
                self._queue(frame)
            self._closed = not fits
        if not fits:
            error = LimitError(
                f"{self.peer} does not take its messages: {nbytes} bytes would wait, "
                f"{MAX_OUTBOX_NBYTES} are allowed; the connection is closed"
            )
            self._loop.call_soon(lambda: self.drop(error))
            raise error
        # Also while a frame waits already: a signal handler may have raised here, and then the
        # loop has no call for it.
        self._loop.call_soon(self._flush)

    def send_descriptor(self, message: msgspec.Struct, fd: int) -> bool:
        """Send a message and a descriptor now; only from a callback of this connection.

        The kernel holds the descriptor from here on; the caller's stays its own. From here on the
        peer's bytes are discarded: the connection only shows when the peer closes it. A peer that
        has not read the frames before is dropped: a descriptor is never queued.

        Returns:
            True if both were sent.
        """
        frame = self._codec.encode(message)
        self._receiving = False
        self._flush()
        sent = 0
        with contextlib.suppress(OSError):
            if self._state is _State.OPEN and not self._outbox:
                sent = socket.send_fds(self._socket, [frame], [fd])
        if sent < len(frame):
            self.drop(LimitError(f"{self.peer} does not take its messages"))
        return sent == len(frame)

    def close(self, reason: WTransferError | None = None) -> None:
        """End the connection once the queued messages have been sent, or after 0.5 s.

        Messages that still arrive are dropped. In a fork()ed child the call does nothing: there the
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

    # -- for the owner, on the loop's thread

    def start(
        self, opening: msgspec.Struct | None = None, handshake_s: float | None = None
    ) -> None:
        """Serve the socket: shake hands, or begin with the messages after a done handshake.

        Args:
            opening: First message of the handshake; None: the handshake is done.
            handshake_s: Time for the handshake, in seconds; None: no limit.
        """
        self._loop.watch(self._socket, READ, self._ready)
        if handshake_s is not None:
            late = StallError(
                f"{self.peer} did not finish the handshake within {handshake_s:g} s",
                seconds=handshake_s,
            )
            self._timer = self._loop.call_later(handshake_s, lambda: self.cut(late))
        if opening is not None:
            self._queue(HANDSHAKE.encode(opening))
            self._flush()
        if self._handshake.complete:
            try:
                self._open()
                self._take(b"")
                self._flush()
            except Exception as error:
                self._fail(error)

    def cut(self, error: WTransferError) -> None:
        """Drop a peer in its handshake, and say so: the peer is to dial again."""
        # Not the error's own class: peers take a refusal of another class as final.
        self._reject(PeerLostError(str(error)))
        self.drop(error)

    def drop(self, error: WTransferError | None) -> None:
        """Close the socket now; queued messages are lost."""
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
        self._on_gone(self, error)

    # -- receiving

    def _ready(self, mask: int) -> None:
        try:
            if mask & WRITE:
                self._flush()
            if mask & READ and self._state in {_State.HANDSHAKE, _State.OPEN}:
                self._read()
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        log.error("connection to %s: a handler failed; it is closed", self.peer, exc_info=error)
        if not isinstance(error, WTransferError):
            cause = error
            error = PeerLostError(
                f"the connection to {self.peer} is closed: a callback raised "
                f"{type(cause).__name__}: {cause}"
            )
            error.__cause__ = cause
        self.drop(error)

    def _read(self) -> None:
        most = SLICE_NBYTES if self._state is _State.OPEN else _UNPROVEN_READ_NBYTES
        try:
            nbytes = self._socket.recv_into(self._loop.buffer, most)
        except BlockingIOError:
            return
        except OSError as error:
            self.drop(self._lost(error))
            return
        if nbytes:
            self._heard_at = time.monotonic()
            if self._receiving:
                self._take(self._loop.buffer[:nbytes])
            return
        try:
            self._reader.finish()
        except TruncatedError as error:
            self.drop(error)
        else:
            self.drop(
                PeerLostError(f"{self.peer} is gone: it closed the connection or its process ended")
            )

    def _take(self, data: bytes | memoryview) -> None:
        messages = self._reader.feed(data)
        while self._receiving and self._state in {_State.HANDSHAKE, _State.OPEN}:
            try:
                message = next(messages, None)
            except PeerError as error:
                self._refuse(error)
                return
            if message is None:
                return
            if self._state is _State.HANDSHAKE:
                self._shake_hands(message)
            elif not isinstance(message, Ping) and not self._closed:
                self._on_message(self, message)

    def _shake_hands(self, message: msgspec.Struct) -> None:
        try:
            answer = self._handshake.receive(message)
        except PeerError as error:
            self._refuse(error)
            return
        if answer is not None:
            self._queue(HANDSHAKE.encode(answer))
        if self._handshake.complete:
            self._open()
        self._flush()

    def _open(self) -> None:
        # From the next frame on: only the application's messages, with their limits.
        self._reader.codec = self._codec
        self._state = _State.OPEN
        self._timer.cancel()
        self._pulse()
        self._on_ready(self)

    def _refuse(self, error: PeerError) -> None:
        """Drop the peer; an unproven one is sent the reason, if it reads."""
        self._reject(error)
        self.drop(error)

    def _reject(self, error: PeerError) -> None:
        reject = self._handshake.refusal(error) if self._state is _State.HANDSHAKE else None
        if reject is not None:
            self._queue(HANDSHAKE.encode(reject))
            self._flush()

    def _pulse(self) -> None:
        """Check the peer's silence and break our own; reschedule for the next of both."""
        heartbeat_s, deadline_s = self._handshake.heartbeat_s, self._handshake.deadline_s
        if heartbeat_s is None or deadline_s is None:
            return
        silent_s = self.last_heard_s
        if silent_s >= deadline_s:
            self.drop(
                StallError(
                    f"{self.peer} has been silent for {silent_s:.1f} s; at most {deadline_s:g} s "
                    "are allowed",
                    seconds=deadline_s,
                )
            )
            return
        # Bytes that wait to be sent are a sign of life in themselves once they arrive.
        if not self._outbox and time.monotonic() - self._sent_at >= heartbeat_s / 2:
            self._queue(self._codec.encode(Ping()))
            self._flush()
        pause_s = min(heartbeat_s / 2, deadline_s - silent_s)
        self._timer = self._loop.call_later(pause_s, self._pulse)

    # -- sending

    def _queue(self, frame: bytes) -> None:
        with self._lock:
            self._outbox.append(frame)
            self._outbox_nbytes += len(frame)

    def _flush(self) -> None:
        """Send as much as the socket takes now; the rest follows in a later call."""
        if self._state is _State.GONE:
            return
        try:
            for _ in range(_TURN_NBYTES // SLICE_NBYTES):
                if not self._outbox:
                    break
                first, start = self._outbox[0], self._sent_of_first
                sent = self._socket.send(memoryview(first)[start : start + SLICE_NBYTES])
                self._sent_at = time.monotonic()
                with self._lock:
                    self._sent_of_first += sent
                    self._outbox_nbytes -= sent
                    if self._sent_of_first == len(first):
                        self._outbox.popleft()
                        self._sent_of_first = 0
        except BlockingIOError:
            pass
        except OSError as error:
            if self._state is _State.CLOSING:
                self.drop(self._error)
                return
            if error.errno not in {errno.EPIPE, errno.ECONNRESET}:
                self.drop(self._lost(error))
                return
            # The peer has closed. Its last words may still be here, such as why: read to the end.
            with self._lock:
                self._outbox.clear()
                self._outbox_nbytes = self._sent_of_first = 0
        if not self._outbox and self._state is _State.CLOSING:
            self.drop(self._error)
            return
        events = WRITE if self._outbox else 0
        if self._state is not _State.CLOSING:
            events |= READ
        if events != self._watched:
            self._watched = events
            self._loop.watch(self._socket, events, self._ready)

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


class _Endpoint:
    """Base of listeners and dialers: a place on the process's loop, and the way off it."""

    def __init__(self, codec: Codec) -> None:
        self._codec = Codec((*codec.types, _PING))
        self._closing = False
        self._ended = threading.Event()
        self._loop = Loop.enter(self)

    def check_process(self) -> None:
        """Raise `ForkedError` in a fork()ed child, where no socket of this object is open."""
        self._loop.check_process()

    def close(self) -> None:
        """Send the queued messages within 0.5 s and close everything.

        May be called again, and from a callback; from there the call does not wait for the end. In
        a fork()ed child the call does nothing.
        """
        if self._loop.forked:
            return
        self._loop.call_soon(self._begin_close)
        self._loop.wait(self._ended)

    def _begin_close(self) -> None:
        raise NotImplementedError

    def _leave(self) -> None:
        self._loop.leave(self)
        self._ended.set()


class Listener(_Endpoint):
    """The trainer's end: listens at one address and serves its connections.

    Admission: a peer has 1 s to prove that it knows the token. At most `MAX_UNPROVEN` peers are in
    that state; when one more comes, the oldest is cut off, but none within its first 0.1 s. Until
    one is that old, newcomers wait in the kernel's queue. So a flood can neither take a worker's
    place nor keep it waiting for long, and its cost is bounded. A peer is sent the reason as it is
    cut off, and dials again.

    Args:
        codec: Messages of the application.
        address: Address to listen at; None for a random abstract Unix address.
        token: Shared secret; None for a new one.
        on_open: Called when a worker was admitted.
        on_message: Called for each message of an admitted worker.
        on_close: Called when the worker is gone; the error is the reason, None after an orderly
            `close` of this side. Called exactly once for each connection that `on_open` was called
            for.
        on_refused: Called when a peer was not admitted.
        deadline_s: Silence after which a peer is given up, in seconds; None: never, and there are
            no heartbeats. Either side breaks a silence after a quarter of it, at most 5 s.
        max_connections: Most workers at a time.
        handshake_s: Time for a peer's handshake, in seconds; None: no limit, and a peer makes room
            for another one after `HANDSHAKE_S`. Only for Unix addresses, where the kernel vouches
            for the peer's user.
        allow_remote: Whether TCP beyond loopback is wanted.
        protocol: Protocol number to speak.

    Raises:
        AddressError: The address is not valid, not ours, or remote without `allow_remote`.
        AddressInUseError: The address is in use; nothing is left half open.
        DescriptorLimitError: No descriptor is left.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        on_open: OnOpen,
        on_message: OnMessage,
        on_close: OnClose,
        on_refused: OnRefused = lambda _error: None,
        address: str | None = None,
        token: str | None = None,
        deadline_s: float | None = 30.0,
        max_connections: int = MAX_CONNECTIONS,
        handshake_s: float | None = HANDSHAKE_S,
        allow_remote: bool = False,
        protocol: int = PROTOCOL,
    ) -> None:
        super().__init__(codec)
        self.token = token or new_token()
        self.deadline_s = deadline_s
        self._on_open, self._on_message, self._on_close = on_open, on_message, on_close
        self._on_refused = on_refused
        self._max_connections = max_connections
        self._handshake_s = handshake_s
        self._protocol = protocol
        self._warned_at = -_WARN_EVERY_S
        self._open: set[Connection] = set()
        self._paused = Timer(lambda: None)
        # In order of arrival: the first is the oldest.
        self._unproven: dict[Connection, float] = {}

        def make() -> socket.socket:
            self._listening = ListeningSocket(parsed, allow_remote=allow_remote)
            return self._listening.socket

        try:
            parsed = parse_address(address or random_address())
            self._socket = self._loop.adopt(make)
        except BaseException:
            self._loop.call_soon(self._leave)
            self._loop.wait(self._ended)
            raise
        self.address = self._listening.address
        """Address that workers dial: the real one, with the port that the kernel chose."""
        self._loop.call_soon(self._resume)

    def _begin_close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._listening.remove_file()
        self._loop.release(self._socket)
        for connection in list(self._unproven):
            connection.drop(None)
        for connection in list(self._open):
            connection.close()
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        if self._closing and not self._open:
            self._leave()

    def _accept_some(self, _mask: int = READ) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if self._closing or not self._make_room():
                return
            try:
                sock = self._loop.adopt(lambda: self._socket.accept()[0])
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.ECONNABORTED:  # that peer has gone meanwhile
                    # Such as EMFILE: the peer stays in the queue and the socket readable; going on
                    # would spin.
                    log.warning("%s cannot accept a connection: %s", self.address, error.strerror)
                    self._pause(_PAUSE_S)
                return
            self._greet(sock)

    def _make_room(self) -> bool:
        if len(self._unproven) < MAX_UNPROVEN:
            return True
        oldest, since = next(iter(self._unproven.items()))
        age_s = time.monotonic() - since
        grace_s = HANDSHAKE_S if self._handshake_s is None else _GRACE_S
        if age_s < grace_s:
            self._pause(grace_s - age_s)
            return False
        oldest.cut(LimitError(f"{oldest.peer} made way: too many peers without a proof"))
        return True

    def _pause(self, seconds: float) -> None:
        self._loop.watch(self._socket, 0, self._accept_some)
        self._paused = self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        self._paused.cancel()
        if not self._closing:
            self._loop.watch(self._socket, READ, self._accept_some)

    def _greet(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            if self._listening.is_unix:
                peer = f"process {check_same_user(sock)} at {self.address}"
            else:
                host, port = sock.getpeername()[:2]
                peer = f"{host} port {port} at {self.address}"
                no_delay(sock)
        except (AuthenticationError, OSError) as error:
            self._loop.release(sock)
            if isinstance(error, AuthenticationError):
                self._refused(error)
            return
        heartbeat_s = self.deadline_s and min(_MAX_HEARTBEAT_S, self.deadline_s / 4)
        handshake = TrainerHandshake(
            self.token,
            heartbeat_s=heartbeat_s,
            deadline_s=self.deadline_s,
            protocol=self._protocol,
            admit=self._check_room,
        )
        connection = Connection(
            self._loop,
            sock,
            codec=self._codec,
            handshake=handshake,
            reader=FrameReader(HANDSHAKE, peer),
            on_ready=self._admitted,
            on_message=self._on_message,
            on_gone=self._gone,
        )
        self._unproven[connection] = time.monotonic()
        connection.start(handshake.start(), self._handshake_s)

    def _check_room(self) -> None:
        if len(self._open) >= self._max_connections:
            raise LimitError(
                f"{self.address} serves {len(self._open)} workers, at most "
                f"{self._max_connections}; close some or raise max_connections"
            )

    def _admitted(self, connection: Connection) -> None:
        self._left_room(connection)
        self._open.add(connection)
        self._on_open(connection)

    def _left_room(self, connection: Connection) -> None:
        del self._unproven[connection]
        if self._paused.call is not None:
            self._resume()

    def _gone(self, connection: Connection, error: WTransferError | None) -> None:
        if connection in self._open:
            self._open.discard(connection)
            try:
                self._on_close(connection, error)
            except Exception:
                log.exception("on_close failed for %s", connection.peer)
        else:
            self._left_room(connection)
            if error is not None:
                error.add_facts(worker=connection.peer)
                self._refused(error)
        self._leave_if_done()

    def _refused(self, error: WTransferError) -> None:
        level, now = logging.DEBUG, time.monotonic()
        left = isinstance(error, (PeerLostError, TruncatedError, StallError))
        if not left and now - self._warned_at >= _WARN_EVERY_S:
            level, self._warned_at = logging.WARNING, now
        log.log(level, "%s refused a peer: %s", self.address, error)
        refusals.add("listener", error)
        try:
            self._on_refused(error)
        except Exception:
            log.exception("on_refused failed")


class Dial:
    """The making of a connection, which another thread can call off."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._off = threading.Event()
        self._socket: socket.socket | None = None

    def call_off(self) -> None:
        """Let the dial raise, now or later, unless it is done; any thread may call it."""
        with self._lock:
            self._off.set()
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise if the dial was called off.

        Raises:
            ClosedError: It was.
        """
        if self._off.is_set():
            raise ClosedError("the dial was called off")

    @contextlib.contextmanager
    def through(self, sock: socket.socket) -> Iterator[None]:
        """Dial through a socket, which is closed only after the block.

        `call_off` ends the socket's waits within the block. One for a connection that is not there
        yet may go on: `check` after it.

        Raises:
            ClosedError: The dial was called off.
        """
        with self._lock:
            self._socket = sock
        try:
            self.check()
            yield
        finally:
            # Under the lock: the descriptor's number may be another file's as soon as it is closed.
            with self._lock:
                self._socket = None

    def pause(self, seconds: float) -> None:
        """Wait before the next attempt.

        Raises:
            ClosedError: The dial was called off.
        """
        self._off.wait(seconds)
        self.check()

    def done(self) -> None:
        """Let the socket be: `call_off` does not reach it from here on.

        Raises:
            ClosedError: The dial was called off.
        """
        with self._lock:
            self._socket = None
        self.check()


class Dialer(_Endpoint):
    """The worker's end: keeps one connection to a listener.

    A dialer dials at once and goes on with pauses of 0.05 s, doubling up to 1 s, with jitter. A
    refusal (token, user, protocol, no room) is handed to `on_refused` and does not end it either:
    the next attempts follow every 5 s, since the trainer may be replaced by one that agrees.

    An attempt looks a name up, connects and shakes hands on a thread of its own, since all three
    may block; between attempts, and while there is a connection, there is no such thread.

    Args:
        codec: Messages of the application.
        address: Address of the listener; a TCP host name is looked up at each attempt.
        token: Shared secret.
        on_open: Called when there is a connection; both sides have proven themselves.
        on_message: Called for each message of the trainer.
        on_close: Called when the connection is gone; the error is the reason, None after an orderly
            `close` of this side. Called exactly once for each connection that `on_open` was called
            for.
        on_refused: Called when the trainer refused this worker, or this worker the trainer.
        redial: Whether to dial again after a connection was lost or refused.
        deadline_s: Longest time for a handshake, in seconds: a stopped or busy trainer may answer
            late.
        protocol: Protocol number to speak.

    Raises:
        AddressError: The address is not valid.
        AuthenticationError: There is no token.
        DescriptorLimitError: No descriptor is left.
    """

    def __init__(
        self,
        codec: Codec,
        *,
        address: str,
        token: str | None,
        on_open: OnOpen,
        on_message: OnMessage,
        on_close: OnClose,
        on_refused: OnRefused = lambda _error: None,
        redial: bool = True,
        deadline_s: float = 30.0,
        protocol: int = PROTOCOL,
    ) -> None:
        if not token:
            raise AuthenticationError(
                f"dialing {address!r} needs the trainer's token: pass token=, or set "
                "WTRANSFER_TOKEN or WTRANSFER_TOKEN_FILE"
            )
        parse_address(address)
        super().__init__(codec)
        self.address = address
        self.last_error: WTransferError | None = None
        """Reason why there is no connection at the moment; None while there is one."""
        self._token = token
        self._on_open, self._on_message, self._on_close = on_open, on_message, on_close
        self._on_refused = on_refused
        self._redial = redial
        self._deadline_s = deadline_s
        self._protocol = protocol
        self._dialing = False
        self._dial_out = Dial()
        self._connection: Connection | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._timer = Timer(lambda: None)
        self._loop.call_soon(self._dial)

    @property
    def connected(self) -> bool:
        """True if there is a connection whose handshake is complete."""
        return self._connection is not None and not self._loop.forked

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message for the trainer; see `Connection.send`.

        Raises:
            PeerLostError: There is no connection at the moment.
            ForkedError: The process is a fork()ed child.
        """
        self._loop.check_process()
        connection = self._connection
        if connection is None:
            raise PeerLostError(f"not connected to {self.address}") from self.last_error
        connection.send(message)

    def _begin_close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._timer.cancel()
        self._dial_out.call_off()  # an attempt fails, and says so
        if self._connection is not None:
            self._connection.close()
        elif not self._dialing:
            self._leave()

    def _dial(self) -> None:
        if self._closing:
            return
        try:
            threading.Thread(target=self._attempt, name="wtransfer-dial", daemon=True).start()
        except RuntimeError as error:
            self._failed(PeerLostError(f"cannot reach {self.address}: {error}"))
        else:
            self._dialing = True

    def _attempt(self) -> None:
        """Connect and shake hands; on the attempt's thread."""
        sock: socket.socket | None = None
        handshake = WorkerHandshake(self._token, protocol=self._protocol)
        try:
            address = parse_address(self.address)
            with descriptor_errors(f"connecting to {self.address}"):
                sock = self._loop.adopt(lambda: socket.socket(address.family, socket.SOCK_STREAM))
            with self._dial_out.through(sock):
                connect(sock, address, Deadline(_CONNECT_S))
                self._dial_out.check()
                reader = shake_hands(sock, handshake, Deadline(self._deadline_s), self.address)
            sock.setblocking(False)
        except Exception as error:
            failure: WTransferError
            if isinstance(error, WTransferError) and not isinstance(error, AddressError):
                failure = error
            else:
                failure = PeerLostError(
                    f"cannot reach {self.address}: {error}; is the trainer running?"
                )
            if sock is not None:
                self._loop.release(sock)
            self._loop.call_soon(lambda: self._failed(failure))
            return
        if not self._loop.call_soon(lambda: self._established(sock, handshake, reader)):
            self._loop.release(sock)

    def _established(
        self, sock: socket.socket, handshake: WorkerHandshake, reader: FrameReader
    ) -> None:
        self._dialing = False
        if self._closing:
            self._loop.release(sock)
            self._leave()
            return
        self.last_error = None
        # Not at once: a trainer that admits and then drops us is not to be dialed in a tight loop.
        self._timer = self._loop.call_later(_SETTLED_S, self._settled)
        self._connection = Connection(
            self._loop,
            sock,
            codec=self._codec,
            handshake=handshake,
            reader=reader,
            on_ready=self._on_open,
            on_message=self._on_message,
            on_gone=self._gone,
        )
        self._connection.start()

    def _settled(self) -> None:
        self._pause_s = _FIRST_PAUSE_S

    def _failed(self, error: WTransferError) -> None:
        """Record an attempt's failure, and schedule the next one."""
        self._dialing = False
        self.last_error = error
        if self._closing:
            self._leave()
            return
        if not isinstance(error, (AuthenticationError, ProtocolError, LimitError)):
            self._dial_later()
            return
        # One side refuses the other; trying again soon would not change that.
        refusals.add("dialer", error)
        try:
            self._on_refused(error)
        except Exception:
            log.exception("on_refused failed for %s", self.address)
        if self._redial and not self._closing:
            self._timer = self._loop.call_later(_REFUSED_PAUSE_S, self._dial)

    def _dial_later(self) -> None:
        # Jitter: workers that lost the same trainer must not all come back in the same instant.
        pause_s = self._pause_s * random.uniform(0.5, 1.0)  # noqa: S311 (no secret)
        self._pause_s = min(self._pause_s * 2, _MAX_PAUSE_S)
        self._timer = self._loop.call_later(pause_s, self._dial)

    def _gone(self, connection: Connection, error: WTransferError | None) -> None:
        self._connection = None
        self._timer.cancel()
        self.last_error = error
        try:
            self._on_close(connection, error)
        except Exception:
            log.exception("on_close failed for %s", connection.peer)
        if self._closing:
            self._leave()
        elif self._redial:
            self._dial_later()


@contextlib.contextmanager
def dialed(
    codec: Codec, address: str, token: str, deadline: Deadline, dial: Dial | None = None
) -> Iterator[tuple[socket.socket, FrameReader]]:
    """Connect to a listener and shake hands, on the caller's thread, for one question.

    A listener that cuts the handshake off is dialed again: it had no room, or this side was late.

    Args:
        codec: Messages of the application.
        address: The listener's.
        token: Shared secret.
        deadline: Bounds the whole call.
        dial: Calls the dial off; None: nobody does. Not `Dial.done` yet when the block begins.

    Yields:
        The socket, to be closed by leaving the block unless it is detached, and the reader of what
        follows, which may hold bytes already.

    Raises:
        PeerError: The listener is gone, or one side refuses the other.
        StallError: The deadline has passed.
        ClosedError: The dial was called off.
        AddressError: The address is not valid.
        OSError: There is no descriptor.
    """
    parsed, dial = parse_address(address), dial or Dial()
    pause_s = _FIRST_PAUSE_S
    while True:
        with socket.socket(parsed.family) as sock, dial.through(sock):
            _connect_in_turn(dial, sock, parsed, deadline)
            try:
                reader = shake_hands(sock, WorkerHandshake(token), deadline, address)
            except PeerLostError as error:
                dial.check()
                deadline.check(f"the handshake with {address} ({error.message})")
            else:
                reader.codec = codec
                yield sock, reader
                return
        # A listener that is gone refuses the next connection, with the cause.
        dial.pause(min(pause_s, deadline.remaining()))
        pause_s = min(2 * pause_s, _MAX_PAUSE_S)


def _connect_in_turn(dial: Dial, sock: socket.socket, address: Address, deadline: Deadline) -> None:
    while True:
        dial.check()
        try:
            connect(sock, address, deadline)
        except PeerLostError as error:
            if not isinstance(error.__cause__, BlockingIOError):
                raise
            deadline.check(f"the connection to {address.text}: its queue is full")
        else:
            break
    dial.check()


def ask(
    codec: Codec, address: str, token: str, question: msgspec.Struct, timeout_s: float
) -> msgspec.Struct:
    """Send one message over a connection of its own, and return the answer.

    Args:
        codec: Messages of the application.
        address: The listener's.
        token: Shared secret.
        question: The message.
        timeout_s: Longest time for the whole call, in seconds.

    Raises:
        PeerError: The listener is gone, refuses this side, or breaks the protocol.
        StallError: No answer in time.
        AddressError: The address is not valid, or its host is not known.
    """
    deadline, known = Deadline(timeout_s), Codec([*codec.types, _PING])
    try:
        with dialed(known, address, token, deadline) as (sock, reader):
            sock.sendall(codec.encode(question))
            messages = reader.feed(b"")
            while True:
                for message in messages:
                    if not isinstance(message, Ping):
                        return message
                deadline.check(f"the answer of {address}")
                limit_wait(sock, deadline)
                data = sock.recv(SLICE_NBYTES)
                if not data:
                    raise PeerLostError(f"{address} closed the connection without an answer")
                messages = reader.feed(data)
    except WTransferError:
        raise
    except TimeoutError as error:
        raise StallError(
            f"no answer from {address} within {timeout_s:g} s", seconds=timeout_s
        ) from error
    except OSError as error:
        raise PeerLostError(f"{address} is gone: {error.strerror or error}") from error
