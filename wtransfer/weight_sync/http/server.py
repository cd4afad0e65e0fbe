"""Serve a worker over HTTP that is no serving engine, under the names of vLLM's routes.

==========================================  =======================================================
POST ``/init_weight_transfer_engine``       ``{"init_info": {"wtransfer": {"address", "token"}}}``
                                            joins a publisher; with ``"leave": true`` leaves it
POST ``/shutdown_weight_transfer_engine``   leaves the publisher that a request has named
POST ``/start_weight_update``,              403: weights come in rounds of a publisher, which prove
``/update_weights``,                        every byte
``/finish_weight_update``
POST ``/pause`` ``?mode=``, ``/resume``     call the host; updates are applied either way
GET ``/weight_info`` ``?digests=``          label, fingerprint, state and proof of the weights, the
                                            update on its way, and the last error
GET ``/healthz``                            503 when the worker must not serve
GET ``/readyz`` ``?fingerprint=``           503 when it must not serve, is paused, or holds other
                                            weights than those of the fingerprint
GET ``/metrics``                            rounds and weights, for Prometheus
==========================================  =======================================================

Every request needs the token: ``Authorization: Bearer TOKEN``, or TOKEN as the password of
``http://wtransfer:TOKEN@host:port``. Nothing is encrypted. Bodies are JSON of at most 1 MiB. Errors
are ``{"error": {"type", "message", ...}}``.

HTTP is not on the data path: a flooded server refuses connections, and rounds go on.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import json
import logging
import os
import socket
import threading
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec

from wtransfer.calls import close_at_exit, start_call
from wtransfer.deadline import Deadline
from wtransfer.errors import (
    AuthenticationError,
    ClosedError,
    LimitError,
    NotInitializedError,
    PeerError,
    PluginNotInstalledError,
    ProtocolError,
    RoundBusyError,
    StallError,
    WTransferError,
)
from wtransfer.transport.address import ListeningSocket, check_same_user
from wtransfer.transport.handshake import new_token, refusals, resolve_token
from wtransfer.weight_sync.messages import DRAINED, ErrorInfo

try:
    import h11
    from starlette.applications import Starlette
    from starlette.authentication import (
        AuthCredentials,
        AuthenticationBackend,
        BaseUser,
        SimpleUser,
    )
    from starlette.authentication import AuthenticationError as TokenError
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.middleware.authentication import AuthenticationMiddleware
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from uvicorn import Config, Server
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise PluginNotInstalledError(
        "a worker behind HTTP needs starlette and uvicorn, which are not installed: "
        'pip install "wtransfer[server]"'
    ) from error

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client import CollectorRegistry
    from starlette.requests import HTTPConnection, Request
    from typing_extensions import Self

    from wtransfer.weight_sync.worker.follower import Follower
    from wtransfer.weight_sync.worker.participant import PublisherConnection
    from wtransfer.weight_sync.worker.session import WorkerSession

logger = logging.getLogger(__name__)
# uvicorn warns of every malformed request: a stranger could fill the log.
_protocol_logger = logging.getLogger(f"{__name__}.protocol")
_protocol_logger.setLevel(logging.ERROR)

MAX_CONNECTIONS = 128
"""Connections at a time; for a further one the oldest that has sent no request is closed."""
HEADER_S = 0.9
"""Time for the headers of a request, in seconds: a silent peer is gone within a second."""
BODY_S = 30.0
"""Time for the body of a request, in seconds."""
MAX_BODY_NBYTES = 1 << 20
"""Longest body."""
JOIN_S = 10.0
"""Time for a publisher to be reached, in seconds."""
PAUSE_MODES = ("abort", "wait", "keep")
"""Modes of a pause: its treatment of running requests."""

_READ_NBYTES = 8 << 10
_BACKLOG = 64  # asyncio accepts as many in one turn of its loop, before the protocol sees any
_NO_REQUEST = b"HTTP/1.1 408 Request Timeout\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
"""Answer to a connection without a whole header: clients may send the request again (RFC 9110)."""
_JOIN_POLL_S = 0.005
_CLOSE_S = 3.0
_DIGEST_ATTEMPTS = 5
_UNAUTHORIZED, _TIMEOUT, _TOO_LARGE = 401, 408, 413
# The first match counts.
_STATUS: tuple[tuple[type[BaseException], int], ...] = (
    (NotInitializedError, 403),
    (RoundBusyError, 409),
    (ClosedError, 503),
    (StallError, 504),
    (LimitError, _TOO_LARGE),
    (ProtocolError, 400),
    (PeerError, 502),
    (ValueError, 400),
)

T = TypeVar("T")
TBody = TypeVar("TBody", bound=msgspec.Struct)


class WorkerServer:
    """Serves a session over HTTP, on a thread of its own, until closed.

    At most 128 connections are open at a time; a connection without a whole request is closed after
    a second, or as soon as a new one needs its place.

    Args:
        session: The worker's; it is not closed with the server.
        listen: ``tcp:host:port``, ``unix:@name`` or ``unix:/path``. Default: loopback, a free port.
            Other addresses let other hosts in.
        token: Shared secret. Default: ``WTRANSFER_TOKEN``, or the owner-only file that
            ``WTRANSFER_TOKEN_FILE`` names, else a new one, to be read from `token`.
        on_pause: Called with the mode (abort, wait or keep) by ``/pause``, on a thread of its own.
        on_resume: Called by ``/resume``, likewise.
        metrics: What ``/metrics`` shows; None: the route says that there is nothing.

    Raises:
        PluginNotInstalledError: starlette and uvicorn are not installed.
        AddressInUseError: The address is in use.
        AddressError: The address is not valid, or not this host's.
    """

    def __init__(
        self,
        session: WorkerSession,
        *,
        listen: str = "tcp:127.0.0.1:0",
        token: str | None = None,
        on_pause: Callable[[str], object] | None = None,
        on_resume: Callable[[], object] | None = None,
        metrics: CollectorRegistry | None = None,
    ) -> None:
        self.token = resolve_token(token) or new_token()
        self._pid = os.getpid()
        self._routes = _Routes(session, self.token, on_pause, on_resume, metrics)
        self._listening = ListeningSocket(listen, allow_remote=True)
        if self.address.startswith(("tcp:0.0.0.0:", "tcp:[::]:")):
            logger.warning(
                "%s listens on all interfaces: every host that reaches this one can connect, and "
                "HTTP does not hide the token; listen at 127.0.0.1, at a Unix socket, or at the "
                "one address that trainers use",
                self.address,
            )
        config = Config(
            self._routes.app(),
            http=_BoundedProtocol,
            loop="asyncio",
            ws="none",
            lifespan="off",
            log_config=None,
            backlog=_BACKLOG,
            timeout_graceful_shutdown=1,
        )
        self._server = Server(config)
        self._thread = threading.Thread(target=self._serve, name="wtransfer-http", daemon=True)
        self._thread.start()
        close_at_exit(self)

    @property
    def address(self) -> str:
        """Listening address, with the port that the kernel chose."""
        return self._listening.address

    @property
    def url(self) -> str:
        """The address in the form of ``wtransfer push --to``; without the token."""
        scheme, _, rest = self.address.partition(":")
        return f"http://{rest}" if scheme == "tcp" else self.address

    def close(self) -> None:
        """Stop listening and leave publishers that requests have named; idempotent."""
        if os.getpid() != self._pid:
            return
        # Before uvicorn closes the socket: until then the file is known to be its own.
        self._listening.remove_file()
        self._server.should_exit = True
        self._routes.closing.set()
        self._thread.join(_CLOSE_S)
        self._routes.leave_all()

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._listening.socket])
        except BaseException:
            logger.exception("the HTTP server at %s ended", self.address)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _BoundedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, with limits for peers that have not shown the token.

    uvicorn's own `limit_concurrency` refuses requests for the number of connections that send none,
    and lets those use up the descriptors, which rounds need, too. uvicorn also waits for ever for
    the rest of a header.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = _protocol_logger
        self.access_log = False
        self.header_timer: asyncio.TimerHandle | None = None
        """Closes the connection; None: a request has come."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # asyncio reads 256 KiB at a time: a peer without the token gets no more memory than this.
        transport.max_size = _READ_NBYTES  # type: ignore[attr-defined]
        peer = transport.get_extra_info("socket")
        if len(self.connections) > MAX_CONNECTIONS and not self._make_room():
            transport.abort()
            return
        if peer.family == socket.AF_UNIX:
            try:
                check_same_user(peer)
            except AuthenticationError as error:
                logger.info("refused a peer: %s", error)
                refusals.add("http", error)
                transport.abort()
                return
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_headers()
        else:
            self._stop_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def _make_room(self) -> bool:
        """Close the oldest connection without a whole request; return whether there was one.

        A peer with the token sends its request at once, so a silent stranger is closed first;
        refused instead, newcomers would be shut out by strangers that come again and again.
        """
        silent = [
            (each.header_timer.when(), each)
            for each in self.connections
            if isinstance(each, _BoundedProtocol) and each.header_timer is not None
        ]
        if not silent:
            return False
        oldest = min(silent, key=lambda pair: pair[0])[1]
        oldest.leave()
        return True

    def leave(self) -> None:
        """Close the connection now; a peer that is late, and no stranger, asks again."""
        # In this order: with its timer the connection would be found again, until its loss is told.
        self._stop_timer()
        self.transport.write(_NO_REQUEST)
        # Sent at once, or never: a peer that reads nothing must not be waited for.
        if self.transport.get_write_buffer_size():
            self.transport.abort()
        else:
            self.transport.close()

    def _await_headers(self) -> None:
        # Once per request: bytes that trickle in must not restart it.
        if self.header_timer is None:
            self.header_timer = self.loop.call_later(HEADER_S, self.leave)

    def _stop_timer(self) -> None:
        if self.header_timer is not None:
            self.header_timer.cancel()
            self.header_timer = None


# -- token and bodies -----------------------------------------------------------------------------


class _TokenBackend(AuthenticationBackend):
    """Checks the token of a request, before anything of its body is read."""

    def __init__(self, token: str) -> None:
        self._expected = _hashed(token.encode(errors="surrogateescape"))

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser]:
        # As bytes: a token is not always text that headers can be decoded to.
        given = [value for name, value in conn.scope["headers"] if name == b"authorization"]
        scheme, _, credentials = given[0].strip().partition(b" ") if len(given) == 1 else (b"",) * 3
        secret = b""
        if scheme.lower() == b"bearer":
            secret = credentials.strip()
        elif scheme.lower() == b"basic":
            with contextlib.suppress(binascii.Error):
                secret = base64.b64decode(credentials, validate=True).partition(b":")[2]
        if not hmac.compare_digest(_hashed(secret), self._expected):
            refusals.add("http", AuthenticationError())
            raise TokenError
        return AuthCredentials(), SimpleUser("wtransfer")


def _hashed(secret: bytes) -> bytes:
    # Hashes have one length: the time of a comparison tells nothing about the secret.
    return hashlib.sha256(secret).digest()


Address = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class _Registration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    address: Address
    """The publisher's."""
    token: str | None = None
    """Its secret, where that is another than the worker's."""
    host: str | None = None
    """The publisher's name for this endpoint."""
    again: bool = False
    """True if the publisher asks by itself, as it does while the worker is absent."""
    leave: bool = False
    """True to leave the publisher."""


class _InitBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    init_info: dict[str, Any]


class _NoBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


async def _read(request: Request, cls: type[TBody]) -> TBody:
    """Read a body: bounded, plain JSON of one shape."""
    if int(request.headers.get("content-length", 0)) > MAX_BODY_NBYTES:
        raise _too_large()
    raw = bytearray()

    async def collect() -> None:
        async for chunk in request.stream():
            raw.extend(chunk)
            if len(raw) > MAX_BODY_NBYTES:
                raise _too_large()

    try:
        await asyncio.wait_for(collect(), BODY_S)
    except asyncio.TimeoutError:
        raise HTTPException(_TIMEOUT, f"the body was not complete within {BODY_S:g} s") from None
    content_type = request.headers.get("content-type", "")
    if raw and content_type.partition(";")[0].strip().lower() != "application/json":
        raise ProtocolError(
            f"the body is of type {content_type[:80]!r}, expected 'application/json'"
        )
    try:
        body = msgspec.json.decode(raw or b"{}", type=cls)
        # The decoder takes the last of two equal names, another reader might take the first.
        json.loads(raw or b"{}", object_pairs_hook=_check_unique)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the body is not valid: {error}") from error
    return body


def _too_large() -> LimitError:
    return LimitError(f"the body has more than {MAX_BODY_NBYTES} bytes")


def _check_unique(pairs: list[tuple[str, Any]]) -> None:
    seen: set[str] = set()
    for name, _ in pairs:
        if name in seen:
            raise ValueError(f"{name[:80]!r} appears twice in one object")
        seen.add(name)


# -- routes ---------------------------------------------------------------------------------------


class _Routes:
    """Endpoints of one session, and the publisher that a request has let it join.

    A publisher that the session's owner has joined is left alone.
    """

    def __init__(
        self,
        session: WorkerSession,
        token: str,
        on_pause: Callable[[str], object] | None,
        on_resume: Callable[[], object] | None,
        metrics: CollectorRegistry | None,
    ) -> None:
        self.closing = threading.Event()
        self._session = session
        self._worker = session.status().worker
        # Requests join and leave beside the session's owner, whose publisher is left alone.
        self._joined = session._joined  # noqa: SLF001
        self._token = token
        self._on_pause = on_pause or (lambda _mode: None)
        self._on_resume = on_resume or (lambda: None)
        self._metrics = metrics
        self._paused: str | None = None
        self._lock = threading.Lock()
        self._registered: PublisherConnection | Follower | None = None
        self._host: str | None = None
        """Name of this endpoint that the publisher of `_registered` has used."""
        self._is_drained = False
        """True from a request to leave until the next invitation by hand."""

    def app(self) -> Starlette:
        """Return the ASGI application."""
        posts = {
            "/init_weight_transfer_engine": self._init,
            "/shutdown_weight_transfer_engine": self._shutdown,
            "/start_weight_update": self._refuse,
            "/update_weights": self._refuse,
            "/finish_weight_update": self._refuse,
            "/pause": self._pause,
            "/resume": self._resume,
        }
        return Starlette(
            routes=[
                *(Route(path, endpoint, methods=["POST"]) for path, endpoint in posts.items()),
                Route("/weight_info", self._weight_info),
                Route("/healthz", self._healthz),
                Route("/readyz", self._readyz),
                Route("/metrics", self._scrape),
            ],
            middleware=[
                Middleware(
                    AuthenticationMiddleware,
                    backend=_TokenBackend(self._token),
                    on_error=_unauthorized,
                )
            ],
            exception_handlers={
                HTTPException: _http_error,
                WTransferError: _error,
                Exception: _error,
            },
        )

    def leave_all(self) -> list[str]:
        """Leave the publisher that a request has named; return its address, if there is one."""
        with self._lock:
            left = self._leave()
            self._is_drained = True
            return [] if left is None else [left]

    async def _init(self, request: Request) -> JSONResponse:
        init_info = (await _read(request, _InitBody)).init_info
        if "wtransfer" not in init_info:
            return await self._refuse(request)
        if len(init_info) > 1:
            raise ProtocolError(
                "init_info names a publisher (wtransfer) and other things; send one"
            )
        try:
            publisher = msgspec.convert(init_info["wtransfer"], _Registration)
        except msgspec.ValidationError as error:
            raise ProtocolError(f"init_info.wtransfer is not valid: {error}") from error
        if publisher.leave:
            left = await _in_thread(lambda: self._deregister(publisher.address))
            return self._done("done", left=[publisher.address] if left else [])
        await _in_thread(lambda: self._register(publisher))
        instance = self._session.status().instance
        return self._done(f"joined publisher {publisher.address}", instance=instance)

    async def _shutdown(self, request: Request) -> JSONResponse:
        await _read(request, _NoBody)
        return self._done("done", left=await _in_thread(self.leave_all))

    async def _refuse(self, _request: Request) -> JSONResponse:
        raise NotInitializedError(
            "this worker takes weights in rounds of a wtransfer Publisher only, which prove every "
            "byte: use `wtransfer push` or Publisher(hosts=[...])"
        )

    async def _pause(self, request: Request) -> JSONResponse:
        await _read(request, _NoBody)
        mode = request.query_params.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise ProtocolError(f"mode is {mode[:80]!r}, expected one of {', '.join(PAUSE_MODES)}")
        await _in_thread(lambda: self._on_pause(mode))
        self._paused = mode
        return self._done(f"paused ({mode})")

    async def _resume(self, request: Request) -> JSONResponse:
        await _read(request, _NoBody)
        await _in_thread(self._on_resume)
        self._paused = None
        return self._done("resumed")

    async def _weight_info(self, request: Request) -> JSONResponse:
        digests = request.query_params.get("digests", "false")
        if digests not in ("true", "false"):
            raise ProtocolError(f"digests is {digests[:80]!r}, expected true or false")
        if digests == "false":
            return JSONResponse(self._held())
        return JSONResponse(await _in_thread(self._held_with_digests))

    async def _healthz(self, _request: Request) -> JSONResponse:
        state = self._session.state
        return JSONResponse({"state": state}, 503 if state == "empty" else 200)

    async def _readyz(self, request: Request) -> JSONResponse:
        if unknown := set(request.query_params) - {"fingerprint"}:
            name = min(unknown)
            raise ProtocolError(f"/readyz has no parameter {name[:80]!r}, but fingerprint alone")
        wanted = request.query_params.get("fingerprint")
        status = self._session.status()
        is_held = wanted in (None, status.fingerprint)
        ready = is_held and status.state != "empty" and self._paused is None
        told = {"ready": ready, "state": status.state, "fingerprint": status.fingerprint}
        return JSONResponse({**told, "paused": self._paused}, 200 if ready else 503)

    async def _scrape(self, _request: Request) -> Response:
        registry = self._metrics
        if registry is None:
            raise HTTPException(
                404,
                "this worker has no metrics: WorkerServer(metrics=...) takes a registry, and "
                '`wtransfer worker` makes one where prometheus-client is: "wtransfer[metrics]"',
            )
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        # Collectors may take locks of the session, which the loop must not wait for.
        text = await _in_thread(lambda: generate_latest(registry))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def _held(self) -> dict[str, Any]:
        from wtransfer import __version__

        status = self._session.status()
        return {
            "weight_version": status.version,
            "fingerprint": status.fingerprint,
            "state": status.state,
            "verified": status.verified,
            "worker": status.worker,
            "instance": status.instance,
            "rank": status.rank,
            "num_ranks": status.num_ranks,
            "since_s": status.since_s,
            "update": None if status.update is None else vars(status.update),
            "last_error": None if status.last_error is None else str(status.last_error),
            "publisher": status.publisher,
            "connected": status.connected,
            "paused": self._paused,
            "wtransfer": __version__,
        }

    def _held_with_digests(self) -> dict[str, Any]:
        for _ in range(_DIGEST_ATTEMPTS):
            info = self._held()
            digests = self._session.digests()
            # Else a commit came in between, and the digests are of other weights than `info`.
            if self._session.fingerprint == info["fingerprint"]:
                return {**info, "digests": digests}
        raise RoundBusyError("new weights are applied faster than they can be digested; ask again")

    def _done(self, message: str, **more: Any) -> JSONResponse:
        return JSONResponse({"message": message, "worker": self._worker, **more})

    def _register(self, publisher: _Registration) -> None:
        """Join a publisher and wait until it is reached; idempotent."""
        with self._lock:
            if publisher.again and self._is_drained:
                raise ClosedError(f"{self._worker} {DRAINED}", worker=self._worker)
            self._is_drained = False
            if self._registered is not None and not self._registered.connected:
                # A publisher that was lost is dead, or registers again, perhaps with a new token.
                self._leave()
            joined = self._joined.at(publisher.address)
            if joined is not None and joined is self._registered and self._host != publisher.host:
                raise RoundBusyError(
                    f"{self._worker} has joined this publisher as {self._host}; name it once",
                    worker=self._worker,
                )
            if joined is None:
                token = publisher.token or self._token
                self._session.join(publisher.address, token=token, host=publisher.host)
                joined = self._registered = self._joined.current
                self._host = publisher.host
                assert joined is not None
            try:
                self._await_connected(joined)
            except BaseException:
                self._leave()
                raise

    def _await_connected(self, joined: PublisherConnection | Follower) -> None:
        deadline = Deadline(JOIN_S)
        while not joined.connected:
            if joined.refusal is not None:
                raise joined.refusal
            if deadline.expired:
                raise StallError(
                    f"publisher {joined.address} was not reached within {deadline.seconds:g} s; is "
                    "it there, and can this host dial it?",
                    seconds=deadline.seconds,
                )
            if self.closing.wait(_JOIN_POLL_S):
                raise _closed()

    def _deregister(self, address: str) -> bool:
        with self._lock:
            return self._joined.at(address) is self._registered and bool(self._leave())

    def _leave(self) -> str | None:
        left, self._registered = self._registered, None
        # The session's owner may have left the publisher, or closed the session, meanwhile.
        if left is None or self._joined.current is not left:
            return None
        with contextlib.suppress(ClosedError):
            self._session.leave(left.address)
        return left.address


async def _in_thread(call: Callable[[], T]) -> T:
    """Return the result of a call that blocks."""
    begun = start_call(call, "wtransfer-http-call")
    try:
        await begun.done.wait_async()
    except asyncio.CancelledError as error:
        raise _closed() from error
    result: T = begun.outcome()
    return result


def _closed() -> ClosedError:
    return ClosedError("the worker's server was closed before this request was finished")


# -- errors ---------------------------------------------------------------------------------------


def _unauthorized(_conn: HTTPConnection, _error: Exception) -> JSONResponse:
    return _error_response(
        AuthenticationError(
            "this worker wants its token: 'Authorization: Bearer TOKEN', or TOKEN as the password "
            "of http://wtransfer:TOKEN@host:port"
        ),
        _UNAUTHORIZED,
    )


# Coroutines: starlette runs plain functions on a thread, and a request that is cancelled at the end
# of the server could not wait for that.
async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return _error_response(ProtocolError(text), error.status_code)


async def _error(_request: Request, error: Exception) -> JSONResponse:
    status = next((status for cls, status in _STATUS if isinstance(error, cls)), 500)
    return _error_response(error, status)


def _error_response(error: Exception, status: int) -> JSONResponse:
    info = ErrorInfo.of(error)
    response = JSONResponse(
        {"error": {"type": info.kind, "message": info.message, **info.facts}}, status
    )
    if status == _UNAUTHORIZED:
        response.headers["www-authenticate"] = "Bearer"
    if status in (_UNAUTHORIZED, _TIMEOUT, _TOO_LARGE):
        # Do not wait for the rest of the body.
        response.headers["connection"] = "close"
    return response
