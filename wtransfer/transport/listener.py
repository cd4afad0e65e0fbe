"""Listen, admit workers that know the token, and keep everybody else from doing harm."""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from wtransfer.errors import AuthenticationError, LimitError, WTransferError
from wtransfer.transport.addresses import ListeningSocket, no_delay, random_address
from wtransfer.transport.auth import PROTOCOL, TrainerHandshake, check_same_user, new_token
from wtransfer.transport.connection import Connection, Events, with_heartbeat
from wtransfer.transport.loop import READ, Loop

if TYPE_CHECKING:
    import socket

    from wtransfer.transport.frames import Codec

log = logging.getLogger(__name__)

OnOpen: TypeAlias = Callable[[Connection], None]
OnMessage: TypeAlias = Callable[[Connection, msgspec.Struct], None]
OnClose: TypeAlias = Callable[[Connection, "WTransferError | None"], None]
OnRefused: TypeAlias = Callable[[WTransferError], None]

MAX_CONNECTIONS = 1024
"""Authenticated connections at a time."""
MAX_UNPROVEN = 64
"""Connections at a time that have not finished the handshake."""
HANDSHAKE_S = 0.9
"""Time for a whole handshake, however it is cut into bytes; a stranger is gone within 1 s."""

_GRACE_S = 0.1  # a worker answers a challenge within a few milliseconds
_ACCEPTS_PER_TURN = 16  # so that the others' sockets are served between two bursts
_PAUSE_S = 0.1
_CLOSE_S = 1.0


def default_heartbeat_s(deadline_s: float) -> float:
    """Return the longest silence to keep so that a peer's deadline is never in doubt."""
    return min(5.0, deadline_s / 4)


class Listener:
    """The trainer's end: listens at one address and serves all its connections on one thread.

    Callbacks run on that thread and must not block, nor wait for a lock that is held while
    `close` is called. One that raises costs its own connection, never another.

    Admission: whoever connects has 1 s to prove that it knows the token. At most `MAX_UNPROVEN`
    are in that state; when one more comes, the oldest is dropped, but none within its first 0.1 s.
    Until one is that old, newcomers wait in the kernel's queue. So a flood can neither take a
    worker's place nor keep it waiting for long, and its cost is bounded.

    Args:
        codec: Messages of the application.
        address: Where to listen; None for a random abstract Unix address.
        token: Shared secret; None for a new one.
        on_open: A worker was admitted.
        on_message: It sent a message.
        on_close: It is gone; the error says why, None after an orderly `close` of this side.
            Called exactly once for each connection that `on_open` was called for.
        on_refused: Somebody was not admitted.
        heartbeat_s: Longest silence that either side keeps, in seconds; None for a quarter of the
            deadline, at most 5.
        deadline_s: Silence after which a peer is given up, in seconds.
        max_connections: Most workers at a time.
        allow_remote: Whether TCP beyond loopback is wanted.
        protocol: Protocol number to speak.

    Raises:
        AddressError: The address is not valid, not ours, or remote without `allow_remote`.
        AddressInUseError: Somebody listens there; nothing is left half open.
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
        heartbeat_s: float | None = None,
        deadline_s: float = 30.0,
        max_connections: int = MAX_CONNECTIONS,
        allow_remote: bool = False,
        protocol: int = PROTOCOL,
    ) -> None:
        self.token = token or new_token()
        self.deadline_s = deadline_s
        self.heartbeat_s = heartbeat_s or default_heartbeat_s(deadline_s)
        self._codec = with_heartbeat(codec)
        self._on_open, self._on_message, self._on_close = on_open, on_message, on_close
        self._on_refused = on_refused
        self._max_connections = max_connections
        self._protocol = protocol
        self._closing = False
        self._open: set[Connection] = set()
        # In order of arrival: all have the same time allowed, so the first is the oldest.
        self._unproven: dict[Connection, float] = {}
        self._loop = Loop("wtransfer listener")
        try:
            self._listen(address or random_address(), allow_remote)
        except BaseException:
            self._loop.dispose()
            raise
        self._loop.watch(self._socket, READ, self._accept_some)
        self._loop.start()

    def _listen(self, address: str, allow_remote: bool) -> None:
        def make() -> socket.socket:
            self._listening = ListeningSocket(address, allow_remote=allow_remote)
            return self._listening.socket

        self._socket = self._loop.adopt(make)

    @property
    def address(self) -> str:
        """Where workers dial in: the real address, with the port that the kernel chose."""
        return self._listening.address

    def close(self) -> None:
        """Stop listening, send what is queued within 0.5 s, close everything, end the thread.

        May be called again, and from a callback; from there it does not wait for the end. In a
        fork()ed child it does nothing.
        """
        if self._loop.forked:
            return
        self._loop.call_soon(self._begin_close)
        self._loop.join()

    def _begin_close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._loop.call_later(_CLOSE_S, self._loop.stop)
        self._listening.remove_file()
        self._loop.release(self._socket)
        for connection in tuple(self._unproven):
            connection.drop(None)
        for connection in tuple(self._open):
            connection.close()
        self._stop_if_done()

    def _stop_if_done(self) -> None:
        if self._closing and not self._open:
            self._loop.stop()

    def _accept_some(self, _mask: int = READ) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if self._closing or not self._make_room():
                return
            try:
                sock = self._loop.adopt(lambda: self._socket.accept()[0])
            except BlockingIOError:
                return
            except OSError as error:
                self._cannot_accept(error)
                return
            self._greet(sock)

    def _make_room(self) -> bool:
        if len(self._unproven) < MAX_UNPROVEN:
            return True
        oldest, since = next(iter(self._unproven.items()))
        age_s = time.monotonic() - since
        if age_s < _GRACE_S:
            self._pause(_GRACE_S - age_s)
            return False
        oldest.drop(LimitError(f"{oldest.peer} made way: too many peers without a proof"))
        return True

    def _cannot_accept(self, error: OSError) -> None:
        if error.errno == errno.ECONNABORTED:
            return  # that peer has gone meanwhile
        # Such as EMFILE: the peer stays in the queue and the socket readable; waiting would spin.
        log.warning("%s cannot accept a connection: %s", self.address, error.strerror)
        self._pause(_PAUSE_S)

    def _pause(self, seconds: float) -> None:
        self._loop.watch(self._socket, 0, self._accept_some)
        self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if not self._closing:
            self._loop.watch(self._socket, READ, self._accept_some)

    def _greet(self, sock: socket.socket) -> None:
        try:
            peer = self._identify(sock)
        except (AuthenticationError, OSError) as error:
            self._loop.release(sock)
            if isinstance(error, AuthenticationError):
                self._refused(error)
            return
        handshake = TrainerHandshake(
            self.token,
            heartbeat_s=self.heartbeat_s,
            deadline_s=self.deadline_s,
            protocol=self._protocol,
            admit=self._check_room,
        )
        connection = Connection(
            self._loop,
            sock,
            peer=peer,
            codec=self._codec,
            handshake=handshake,
            handshake_s=HANDSHAKE_S,
            events=Events(self._ready, self._on_message, self._gone),
        )
        self._unproven[connection] = time.monotonic()
        connection.start()

    def _identify(self, sock: socket.socket) -> str:
        """Return who connected, as it shall stand in errors."""
        sock.setblocking(False)
        if self._listening.is_unix:
            return f"process {check_same_user(sock)} at {self.address}"
        host, port = sock.getpeername()[:2]
        no_delay(sock)
        return f"{host} port {port} at {self.address}"

    def _check_room(self) -> None:
        if len(self._open) >= self._max_connections:
            raise LimitError(
                f"{self.address} serves {len(self._open)} workers, at most "
                f"{self._max_connections}; close some or raise max_connections"
            )

    def _ready(self, connection: Connection) -> None:
        del self._unproven[connection]
        self._open.add(connection)
        self._on_open(connection)

    def _gone(self, connection: Connection, error: WTransferError | None) -> None:
        if connection in self._open:
            self._open.discard(connection)
            try:
                self._on_close(connection, error)
            except Exception:
                log.exception("on_close failed for %s", connection.peer)
        else:
            del self._unproven[connection]
            if error is not None:
                error.add_facts(worker=connection.peer)
                self._refused(error)
        self._stop_if_done()

    def _refused(self, error: WTransferError) -> None:
        log.info("%s refused a peer: %s", self.address, error)
        try:
            self._on_refused(error)
        except Exception:
            log.exception("on_refused failed")
