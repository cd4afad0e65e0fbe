"""An HTTP server on a thread of its own, at any address that wtransfer can listen at."""

from __future__ import annotations

import asyncio
import logging
import threading
from typing import TYPE_CHECKING, cast

from uvicorn import Config
from uvicorn.server import ServerState

from wtransfer.deadline import Deadline
from wtransfer.weight_sync.http.door import Door
from wtransfer.weight_sync.http.protocol import BoundedProtocol

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from wtransfer.transport.address import ListeningSocket

logger = logging.getLogger(__name__)

_KEEP_ALIVE_S = 5
_FINISH_S = 0.3
_CLOSE_S = 2.0


class HttpServer:
    """Serves an ASGI application until closed.

    uvicorn speaks the protocol; accepting and ending are done here, because its server accepts
    without bound, looks only ten times a second whether it shall end, and then waits for requests
    for as long as they take.

    Args:
        app: Application; its lifespan is not run.
        listening: Where; the server closes it.
    """

    def __init__(self, app: ASGIApp, listening: ListeningSocket) -> None:
        self._listening = listening
        self._state = ServerState()
        self._config = Config(
            app,
            interface="asgi3",
            log_config=None,
            lifespan="off",
            ws="none",
            proxy_headers=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._config.load()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="wtransfer-http", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept nobody any more, give running requests 0.3 s, end; may be called again."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stopping.set)
            if self._thread is not threading.current_thread():
                self._thread.join(_CLOSE_S)

    @property
    def _connections(self) -> set[BoundedProtocol]:
        return cast("set[BoundedProtocol]", self._state.connections)

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._serve())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        except BaseException:
            logger.exception("the HTTP server at %s ended", self._listening.address)
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        door = Door(self._listening, self._protocol, self._connections)
        try:
            await self._stopping.wait()
        finally:
            door.close()
        await self._end_connections()

    def _protocol(self) -> BoundedProtocol:
        return BoundedProtocol(self._config, self._state, {})

    async def _end_connections(self) -> None:
        for connection in tuple(self._connections):
            connection.shutdown()
        await self._wait_for_tasks()
        for task in tuple(self._state.tasks):
            task.cancel()
        await self._wait_for_tasks()
        for connection in tuple(self._connections):
            connection.abort("the server was closed")
        # Transports and tasks are told in the loop's next turns.
        deadline = Deadline(_FINISH_S)
        while (self._connections or self._state.tasks) and not deadline.expired:  # noqa: ASYNC110  # a transport tells nobody
            await asyncio.sleep(0)

    async def _wait_for_tasks(self) -> None:
        if self._state.tasks:
            await asyncio.wait(self._state.tasks, timeout=_FINISH_S)
