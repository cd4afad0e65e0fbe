"""uvicorn's HTTP/1.1 protocol, with what strangers can cost bounded in time and memory.

uvicorn itself waits for the rest of a header for ever, reads a quarter of a mebibyte at a time,
and waits for ever for a peer that does not read its answer.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

if TYPE_CHECKING:
    import asyncio

    from uvicorn import Config
    from uvicorn.server import ServerState

logger = logging.getLogger(__name__)
# What strangers send is no news; what goes wrong here is.
_uvicorn_logger = logging.getLogger(f"{__name__}.uvicorn")
_uvicorn_logger.setLevel(logging.ERROR)

HEADER_S = 0.9
"""Time for a request's header, however it is cut into bytes; a silent stranger is gone in 1 s."""
UNREAD_ANSWER_S = 30.0
"""Time for a peer to take an answer that fills the connection."""
MAX_HEADER_NBYTES = 16 << 10
"""Longest header."""
RECEIVE_NBYTES = 8 << 10
"""Bytes that are taken from a connection at a time: a stranger gets no more memory than that."""
REASON = b"x-wtransfer-error"
"""Answer's header whose text shall be the reason phrase, which is all that some clients show."""


class BoundedProtocol(H11Protocol):
    """One connection.

    Args:
        config: uvicorn's.
        server_state: Connections and tasks of this server.
        app_state: State of the application.
    """

    def __init__(
        self, config: Config, server_state: ServerState, app_state: dict[str, Any]
    ) -> None:
        super().__init__(config, server_state, app_state)
        self.opened_at = time.monotonic()
        self.conn = _ReasonedConnection(h11.SERVER, MAX_HEADER_NBYTES)
        # uvicorn's own are the program's other servers'.
        self.logger = _uvicorn_logger
        self.access_log = False
        self._header_timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None

    @property
    def busy(self) -> bool:
        """Whether a request is being answered: the peer's token was good, or it is on its way."""
        cycle: Any = self.cycle
        return cycle is not None and not cycle.response_complete

    def abort(self, why: str) -> None:
        """Cut the connection."""
        logger.info("%s was cut off: %s", self.client or "a peer", why)
        self.transport.abort()

    # -- called by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a header."""
        super().connection_made(cast("asyncio.Transport", transport))
        cast("Any", transport).max_size = RECEIVE_NBYTES
        self._expect_header()

    def data_received(self, data: bytes) -> None:
        """Take bytes; a header that is complete is waited for no longer."""
        if self.conn.their_state is h11.IDLE:
            self._expect_header()
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_waiting_for_a_header()

    def pause_writing(self) -> None:
        """Begin to wait for the peer to read."""
        super().pause_writing()
        why = f"it did not read its answer within {UNREAD_ANSWER_S:g} s"
        self._answer_timer = self.loop.call_later(UNREAD_ANSWER_S, self.abort, why)

    def resume_writing(self) -> None:
        """Note that the peer reads."""
        super().resume_writing()
        self._stop_waiting_for_a_reader()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait for nothing more."""
        self._stop_waiting_for_a_header()
        self._stop_waiting_for_a_reader()
        super().connection_lost(exc)

    def _expect_header(self) -> None:
        if self._header_timer is None:
            why = f"no request within {HEADER_S:g} s"
            self._header_timer = self.loop.call_later(HEADER_S, self.abort, why)

    def _stop_waiting_for_a_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _stop_waiting_for_a_reader(self) -> None:
        if self._answer_timer is not None:
            self._answer_timer.cancel()
            self._answer_timer = None


class _ReasonedConnection(h11.Connection):
    """Sends the reason phrase that an answer asks for, which ASGI cannot carry."""

    def send(self, event: Any) -> Any:
        if isinstance(event, h11.Response):
            headers = list(event.headers)
            reason = dict(headers).get(REASON, event.reason)
            event = h11.Response(status_code=event.status_code, headers=headers, reason=reason)
        return super().send(event)
