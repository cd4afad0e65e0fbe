"""Let connections in at a rate and up to a number that a server can bear."""

from __future__ import annotations

import asyncio
import errno
import logging
import time
from typing import TYPE_CHECKING

from wtransfer.errors import AuthenticationError
from wtransfer.transport.address import check_same_user, no_delay

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection

    from wtransfer.transport.address import ListeningSocket
    from wtransfer.weight_sync.http.protocol import BoundedProtocol

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 512
"""Connections at a time."""

_GRACE_S = 0.1  # a client that has connected sends its request within a few milliseconds
_ACCEPTS_PER_TURN = 16  # so that requests are answered between two bursts
_PAUSE_S = 0.1


class Door:
    """Accepts connections on one event loop.

    At most `max_connections` are open. When one more comes, the oldest without a running request
    is cut off, but none within its first 0.1 s; until one is that old, newcomers wait in the
    kernel's queue. A peer without the token never has a running request for long, so a flood of
    strangers can neither take a client's place nor keep it waiting.

    Args:
        listening: Socket to accept from.
        protocol: Makes the protocol of a connection.
        connections: Open connections, kept by those protocols.
        max_connections: Most of them.
    """

    def __init__(
        self,
        listening: ListeningSocket,
        protocol: Callable[[], BoundedProtocol],
        connections: Collection[BoundedProtocol],
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = listening
        self._socket = listening.socket
        self._protocol = protocol
        self._connections = connections
        self._max_connections = max_connections
        self._arriving: set[asyncio.Task[None]] = set()
        self._pausing: asyncio.TimerHandle | None = None
        self._resume()

    def close(self) -> None:
        """Accept nobody any more."""
        self._loop.remove_reader(self._socket)
        if self._pausing is not None:
            self._pausing.cancel()
        for task in self._arriving:
            task.cancel()
        self._listening.remove_file()
        self._socket.close()

    def _resume(self) -> None:
        self._loop.add_reader(self._socket, self._accept_some)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._socket)
        self._pausing = self._loop.call_later(seconds, self._resume)

    def _accept_some(self) -> None:
        for _ in range(_ACCEPTS_PER_TURN):
            if not self._make_room():
                return
            try:
                sock = self._socket.accept()[0]
            except BlockingIOError:
                return
            except OSError as error:
                self._cannot_accept(error)
                return
            self._admit(sock)

    def _make_room(self) -> bool:
        if len(self._connections) + len(self._arriving) < self._max_connections:
            return True
        idle = [each for each in self._connections if not each.busy]
        if not idle:
            self._pause(_PAUSE_S)
            return False
        oldest = min(idle, key=lambda each: each.opened_at)
        age_s = time.monotonic() - oldest.opened_at
        if age_s < _GRACE_S:
            self._pause(_GRACE_S - age_s)
            return False
        oldest.abort("it made way: too many connections without a request")
        # It leaves the set in the loop's next turn; until then there is no room.
        return False

    def _cannot_accept(self, error: OSError) -> None:
        if error.errno == errno.ECONNABORTED:
            return  # that peer has gone meanwhile
        # Such as EMFILE: the peer stays in the queue and the socket readable; waiting would spin.
        logger.warning("%s cannot accept a connection: %s", self._listening.address, error.strerror)
        self._pause(_PAUSE_S)

    def _admit(self, sock: socket.socket) -> None:
        try:
            sock.setblocking(False)
            if self._listening.is_unix:
                check_same_user(sock)
            else:
                no_delay(sock)
        except (AuthenticationError, OSError) as error:
            logger.info("%s refused a peer: %s", self._listening.address, error)
            sock.close()
            return
        task = self._loop.create_task(self._serve(sock))
        self._arriving.add(task)
        task.add_done_callback(self._arriving.discard)

    async def _serve(self, sock: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._protocol, sock)
        except OSError as error:
            logger.info("%s lost a peer: %s", self._listening.address, error)
            sock.close()
