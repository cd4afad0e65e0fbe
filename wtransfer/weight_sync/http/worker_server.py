"""A worker behind HTTP that is no serving engine, with vLLM's route names.

==========================================  =======================================================
POST ``/init_weight_transfer_engine``       ``{"init_info": {"wtransfer": {"address", "token"}}}``
                                            joins a publisher; other infos: an unsealed engine
POST ``/start_weight_update``               begin an unsealed update
POST ``/update_weights``                    ``{"update_info": {} or one per rank}``
POST ``/finish_weight_update``              ``{"weight_version"}``; returns after the commit
POST ``/shutdown_weight_transfer_engine``   leave ``{"address"}``, or all and the engine
POST ``/pause`` ``?mode=``, ``/resume``     the host's business; updates are applied either way
GET ``/weight_info`` ``?digests=``          label, fingerprint, state, and how they were proven
GET ``/healthz``                            503 when the worker must not serve
==========================================  =======================================================

Every request needs the token: ``Authorization: Bearer TOKEN``, or TOKEN as the password of
``http://wtransfer:TOKEN@host:port``, which is all that vLLM's own client can carry. Nothing is
encrypted. Bodies are JSON of at most 1 MiB, 64 MiB for ``/update_weights``.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from wtransfer.errors import AuthenticationError, PluginNotInstalledError
from wtransfer.transport.address import ListeningSocket
from wtransfer.transport.handshake import new_token, resolve_token
from wtransfer.weight_sync.endings import close_at_exit
from wtransfer.weight_sync.http.unsealed.updates import UnsealedUpdates

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.types import Receive, Scope, Send
    from typing_extensions import Self

    from wtransfer.weight_sync.worker.session import WorkerSession


class WorkerApp:
    """An ASGI application with a worker's routes, to be mounted in a server of one's own.

    Connections are that server's: how many there may be, and how long a header may take. `close`
    is called by the server, if it runs the application's lifespan.

    Args:
        session: The worker's; somebody must call its ``commit_pending``.
        token: Shared secret. Default: ``WTRANSFER_TOKEN``, or the owner-only file that
            ``WTRANSFER_TOKEN_FILE`` names.
        accept_unsealed: Engine for updates that are no rounds of a publisher; None refuses them.
        on_pause: Called with the mode (abort, wait or keep) by ``/pause``, on a thread of its own.
        on_resume: Called by ``/resume``, likewise.
        deadline_s: Longest time without progress of an unsealed update, in seconds.

    Raises:
        PluginNotInstalledError: starlette and uvicorn are not installed.
        AuthenticationError: There is no token.
        UnknownBackendError: There is no such engine.
    """

    def __init__(
        self,
        session: WorkerSession,
        *,
        token: str | None = None,
        accept_unsealed: str | None = None,
        on_pause: Callable[[str], object] | None = None,
        on_resume: Callable[[], object] | None = None,
        deadline_s: float = 30.0,
    ) -> None:
        _check_installed()
        from wtransfer.weight_sync.http.gate import Gate
        from wtransfer.weight_sync.http.routes import WorkerRoutes

        secret = resolve_token(token)
        if secret is None:
            raise AuthenticationError(
                "no token for the worker's routes: pass token=, or set WTRANSFER_TOKEN"
            )
        unsealed = None
        if accept_unsealed is not None:
            unsealed = UnsealedUpdates(session, accept_unsealed, deadline_s)
        self._routes = WorkerRoutes(session, secret, unsealed, on_pause, on_resume)
        self._gate = Gate(self._routes.app(), secret)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request; ASGI."""
        await self._gate(scope, receive, send)

    def close(self) -> None:
        """Leave every publisher that a request has named; may be called again."""
        self._routes.close()


class WorkerServer:
    """Serves a session over HTTP, on a thread of its own, until closed.

    At most 512 connections are open at a time; one that sends no request within a second is cut.

    Args:
        session: The worker's; it is not closed with the server.
        listen: ``tcp:host:port``, ``unix:@name`` or ``unix:/path``. Default: loopback, a free
            port. Whoever writes another host's address asks for it.
        token: Shared secret. Default: as in `WorkerApp`, else a new one, to be read from `token`.
        accept_unsealed: As in `WorkerApp`.
        on_pause: As in `WorkerApp`.
        on_resume: As in `WorkerApp`.
        deadline_s: As in `WorkerApp`.

    Raises:
        PluginNotInstalledError: starlette and uvicorn are not installed.
        AddressInUseError: Somebody listens there already.
        AddressError: The address is not valid, or not this host's.
        UnknownBackendError: There is no such engine.
    """

    def __init__(
        self,
        session: WorkerSession,
        *,
        listen: str = "tcp:127.0.0.1:0",
        token: str | None = None,
        accept_unsealed: str | None = None,
        on_pause: Callable[[str], object] | None = None,
        on_resume: Callable[[], object] | None = None,
        deadline_s: float = 30.0,
    ) -> None:
        self.token = resolve_token(token) or new_token()
        self._pid = os.getpid()
        self._app = WorkerApp(
            session,
            token=self.token,
            accept_unsealed=accept_unsealed,
            on_pause=on_pause,
            on_resume=on_resume,
            deadline_s=deadline_s,
        )
        from wtransfer.weight_sync.http.server import HttpServer

        self._listening = ListeningSocket(listen, allow_remote=True)
        self._server = HttpServer(self._app, self._listening)
        close_at_exit(self)

    @property
    def address(self) -> str:
        """Where it listens, with the port that the kernel chose."""
        return self._listening.address

    @property
    def url(self) -> str:
        """The same for `HttpClient` and ``wtransfer push --to``; without the token."""
        scheme, _, rest = self.address.partition(":")
        return f"http://{rest}" if scheme == "tcp" else self.address

    def close(self) -> None:
        """Stop listening and leave publishers that requests have named; may be called again."""
        if os.getpid() == self._pid:
            self._server.close()
            self._app.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def worker_app(session: WorkerSession, **options: Any) -> WorkerApp:
    """Return the routes as an ASGI application; options are those of `WorkerApp`."""
    return WorkerApp(session, **options)


def _check_installed() -> None:
    try:
        import starlette
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise PluginNotInstalledError(
            "a worker behind HTTP needs starlette and uvicorn, which are not installed: "
            'pip install "wtransfer[server]"'
        ) from error
    del starlette
