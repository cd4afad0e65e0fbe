"""Dial a listener until it answers, and again whenever it is lost."""

from __future__ import annotations

import errno
import logging
import os
import random
import socket
from typing import TYPE_CHECKING

from wtransfer.errors import (
    AddressError,
    AuthenticationError,
    LimitError,
    PeerLostError,
    ProtocolError,
    WTransferError,
)
from wtransfer.transport.addresses import connect, is_self_connected, no_delay, parse_address
from wtransfer.transport.auth import PROTOCOL, WorkerHandshake, check_same_user
from wtransfer.transport.connection import Connection, Events, with_heartbeat
from wtransfer.transport.loop import WRITE, Loop

if TYPE_CHECKING:
    import msgspec

    from wtransfer.transport.addresses import Address
    from wtransfer.transport.frames import Codec
    from wtransfer.transport.listener import OnClose, OnMessage, OnOpen, OnRefused

log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_MAX_PAUSE_S = 1.0
_REFUSED_PAUSE_S = 5.0
_SETTLED_S = 1.0
_CONNECT_S = 5.0
_HANDSHAKE_S = 5.0  # longer than the listener allows: a stopped or busy trainer may come back
_CLOSE_S = 1.0


class Dialer:
    """The worker's end: keeps one connection to a listener, on a thread of its own.

    It dials at once and goes on with pauses of 0.05 s, doubling up to 1 s, with jitter. A refusal
    (token, user, protocol, no room) is handed to `on_refused` and does not end it either: it tries
    again every 5 s, since the trainer may be replaced by one that agrees.

    Callbacks run on the thread and must not block, nor wait for a lock that is held while `close`
    is called. One that raises costs the connection, not the dialer.

    Args:
        codec: Messages of the application.
        address: Where the listener is; a TCP host name is looked up at each attempt.
        token: Shared secret.
        on_open: The connection is there; both sides have proven themselves.
        on_message: The trainer sent a message.
        on_close: The connection is gone; the error says why, None after an orderly `close` of
            this side. Called exactly once for each connection that `on_open` was called for.
        on_refused: The trainer refused this worker, or this worker the trainer.
        redial: Whether to dial again after a connection was lost or refused.
        protocol: Protocol number to speak.

    Raises:
        AddressError: The address is not valid.
        AuthenticationError: There is no token.
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
        protocol: int = PROTOCOL,
    ) -> None:
        if not token:
            raise AuthenticationError(
                f"dialing {address!r} needs the trainer's token: pass token=, or set "
                "WTRANSFER_TOKEN or WTRANSFER_TOKEN_FILE"
            )
        parse_address(address)
        self.address = address
        self.last_error: WTransferError | None = None
        self._token = token
        self._codec = with_heartbeat(codec)
        self._on_open, self._on_message, self._on_close = on_open, on_message, on_close
        self._on_refused = on_refused
        self._redial = redial
        self._protocol = protocol
        self._closing = False
        self._connected = False
        self._connection: Connection | None = None
        self._connecting: socket.socket | None = None
        self._pause_s = _FIRST_PAUSE_S
        self._loop = Loop("wtransfer dialer")
        self._timer = self._loop.call_later(0.0, self._dial)
        self._loop.start()

    @property
    def connected(self) -> bool:
        """Whether there is a connection whose handshake is complete."""
        return self._connected and not self._loop.forked

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message for the trainer; see `Connection.send`.

        Raises:
            PeerLostError: There is no connection at the moment.
            ForkedError: This is a fork()ed child.
        """
        self._loop.check_process()
        connection = self._connection
        if connection is None or not self._connected:
            raise PeerLostError(f"not connected to {self.address}") from self.last_error
        connection.send(message)

    def close(self) -> None:
        """Stop dialing, send what is queued within 0.5 s, close the connection, end the thread.

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
        self._timer.cancel()
        if self._connecting is not None:
            self._loop.release(self._connecting)
        if self._connection is None:
            self._loop.stop()
        elif self._connected:
            self._connection.close()
            self._loop.call_later(_CLOSE_S, self._loop.stop)
        else:
            self._connection.drop(None)

    def _dial(self) -> None:
        try:
            address = parse_address(self.address)
            sock = self._loop.adopt(lambda: socket.socket(address.family, socket.SOCK_STREAM))
        except (AddressError, OSError) as error:
            self._failed(str(error))
            return
        self._connecting = sock
        self._timer = self._loop.call_later(_CONNECT_S, lambda: self._failed("no answer"))
        number = connect(sock, address)
        if number == errno.EINPROGRESS:
            self._loop.watch(sock, WRITE, lambda _mask: self._answered(address, sock))
        else:
            self._dialed(address, sock, number)

    def _answered(self, address: Address, sock: socket.socket) -> None:
        self._dialed(address, sock, sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR))

    def _dialed(self, address: Address, sock: socket.socket, number: int) -> None:
        self._timer.cancel()
        self._loop.watch(sock, 0, lambda _mask: None)
        try:
            if number:
                raise OSError(number, os.strerror(number))
            self._check_listener(address, sock)
        except AuthenticationError as error:
            self._give_up(error)
        except OSError as error:
            self._failed(error.strerror or str(error))
        else:
            self._connecting = None
            self._shake_hands(sock)

    def _check_listener(self, address: Address, sock: socket.socket) -> None:
        if address.is_unix:
            check_same_user(sock)
            return
        if is_self_connected(sock):
            raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        no_delay(sock)

    def _shake_hands(self, sock: socket.socket) -> None:
        self._connection = Connection(
            self._loop,
            sock,
            peer=self.address,
            codec=self._codec,
            handshake=WorkerHandshake(self._token, protocol=self._protocol),
            handshake_s=_HANDSHAKE_S,
            events=Events(self._ready, self._on_message, self._gone),
        )
        self._connection.start()

    def _failed(self, why: str) -> None:
        """Note that the listener cannot be reached now, and try again."""
        self._drop_attempt()
        self.last_error = PeerLostError(
            f"cannot reach {self.address}: {why}; is the trainer running?"
        )
        self._dial_later(self._next_pause_s())

    def _give_up(self, error: WTransferError) -> None:
        """Note that one side refuses the other; trying again soon would not change that."""
        self._drop_attempt()
        self.last_error = error
        log.warning("%s: %s", self.address, error)
        try:
            self._on_refused(error)
        except Exception:
            log.exception("on_refused failed for %s", self.address)
        if self._redial:
            self._dial_later(_REFUSED_PAUSE_S)

    def _drop_attempt(self) -> None:
        self._timer.cancel()
        if self._connecting is not None:
            self._loop.release(self._connecting)
            self._connecting = None

    def _dial_later(self, seconds: float) -> None:
        if not self._closing:
            self._timer = self._loop.call_later(seconds, self._dial)

    def _next_pause_s(self) -> float:
        # Jitter: workers that lost the same trainer must not all come back in the same instant.
        pause_s = self._pause_s * random.uniform(0.5, 1.0)  # noqa: S311 (no secret)
        self._pause_s = min(self._pause_s * 2, _MAX_PAUSE_S)
        return pause_s

    def _ready(self, connection: Connection) -> None:
        self._connected = True
        self.last_error = None
        # Not at once: a trainer that admits and then drops us is not to be dialed in a tight loop.
        self._timer = self._loop.call_later(_SETTLED_S, self._settled)
        self._on_open(connection)

    def _settled(self) -> None:
        self._pause_s = _FIRST_PAUSE_S

    def _gone(self, connection: Connection, error: WTransferError | None) -> None:
        was_open, self._connected = self._connected, False
        self._connection = None
        self._timer.cancel()
        self.last_error = error
        if was_open:
            self._tell_closed(connection, error)
        if self._closing:
            self._loop.stop()
        elif not was_open and isinstance(error, (AuthenticationError, ProtocolError, LimitError)):
            self._give_up(error)
        elif self._redial or not was_open:
            self._dial_later(self._next_pause_s())

    def _tell_closed(self, connection: Connection, error: WTransferError | None) -> None:
        try:
            self._on_close(connection, error)
        except Exception:
            log.exception("on_close failed for %s", connection.peer)
