"""The routes of a worker behind HTTP, under the names that vLLM gave them."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from wtransfer.errors import NotInitializedError, ProtocolError, RoundBusyError
from wtransfer.weight_sync.http.answers import Refusal, answer, closing, refusal
from wtransfer.weight_sync.http.bodies import (
    FinishBody,
    InitBody,
    NoBody,
    ShutdownBody,
    TBody,
    UpdateBody,
    decode,
)
from wtransfer.weight_sync.http.daemon_call import DaemonCalls
from wtransfer.weight_sync.http.invitations import Invitations

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from wtransfer.weight_sync.http.bodies import Invitation
    from wtransfer.weight_sync.http.unsealed.updates import UnsealedUpdates
    from wtransfer.weight_sync.worker.session import WorkerSession

Endpoint: TypeAlias = Callable[[Request], Awaitable[Response]]

PAUSE_MODES = ("abort", "wait", "keep")
"""What a pause does with running requests."""

_DIGEST_ATTEMPTS = 5


class WorkerRoutes:
    """Answers the requests of publishers and trainers.

    Args:
        session: The worker's.
        token: Secret of publishers that come without one.
        unsealed: Takes updates that are no rounds; None refuses them.
        on_pause: Called with the mode; serving shall stop when it returns.
        on_resume: Called when serving shall go on.
    """

    def __init__(
        self,
        session: WorkerSession,
        token: str,
        unsealed: UnsealedUpdates | None,
        on_pause: Callable[[str], object] | None,
        on_resume: Callable[[], object] | None,
    ) -> None:
        from wtransfer import __version__

        self._session = session
        self._invitations = Invitations(session, token)
        self._unsealed = unsealed
        self._on_pause = on_pause or (lambda _mode: None)
        self._on_resume = on_resume or (lambda: None)
        self._paused: str | None = None
        self._calls = DaemonCalls()
        self._our_version = __version__

    def app(self) -> Starlette:
        """Return the application, for requests that have passed the gate."""
        posts: dict[str, Endpoint] = {
            "/init_weight_transfer_engine": self._init,
            "/start_weight_update": self._start,
            "/update_weights": self._update,
            "/finish_weight_update": self._finish,
            "/shutdown_weight_transfer_engine": self._shutdown,
            "/pause": self._pause,
            "/resume": self._resume,
        }
        gets: dict[str, Endpoint] = {"/weight_info": self._info, "/healthz": self._health}
        routes = [
            Route(path, _guarded(endpoint), methods=[method])
            for method, endpoints in (("POST", posts), ("GET", gets))
            for path, endpoint in endpoints.items()
        ]
        return Starlette(
            routes=routes, exception_handlers={HTTPException: _no_route}, lifespan=self._lifespan
        )

    def close(self) -> None:
        """Leave every publisher that a request has named, and drop the engine."""
        self._invitations.leave_all()
        if self._unsealed is not None:
            self._unsealed.shutdown()

    def _lifespan(self, _app: Starlette) -> AbstractAsyncContextManager[None]:
        @contextlib.asynccontextmanager
        async def alive() -> Any:
            yield
            await self._calls.run(self.close)

        return alive()

    # -- transfers

    async def _init(self, request: Request) -> Response:
        body = await _body(request, InitBody)
        invitation = body.invitation()
        if invitation is not None:
            return await self._join(invitation)
        unsealed = self._accepted()
        await self._calls.run(lambda: unsealed.init(body.init_info))
        return self._done(f"engine {unsealed.engine_name!r} is initialised")

    async def _join(self, invitation: Invitation) -> Response:
        address = invitation.address
        invite = functools.partial(
            self._invitations.accept, address, invitation.token, invitation.host
        )
        link = await self._calls.run(invite)
        try:
            await self._invitations.arrival(link)
        except Exception:
            await self._calls.run(lambda: self._invitations.leave(address))
            raise
        return self._done(f"joined publisher {address}")

    async def _start(self, request: Request) -> Response:
        await _body(request, NoBody)
        unsealed = self._accepted()
        client = _client_of(request)
        await self._calls.run(lambda: unsealed.start(client))
        return self._done("the update has begun")

    async def _update(self, request: Request) -> Response:
        body = await _body(request, UpdateBody)
        unsealed = self._accepted()
        update_info = body.of_rank(self._session.hello().rank)
        await self._calls.run(lambda: unsealed.update(update_info))
        return self._done("received")

    async def _finish(self, request: Request) -> Response:
        body = await _body(request, FinishBody)
        unsealed = self._accepted()
        receipt = await self._calls.run(lambda: unsealed.finish(body.weight_version))
        return self._done(
            f"committed {receipt.version!r}",
            weight_version=receipt.version,
            fingerprint=receipt.fingerprint,
            verified="coverage",
            seconds=receipt.seconds,
        )

    async def _shutdown(self, request: Request) -> Response:
        body = await _body(request, ShutdownBody)
        address = body.address
        if address is not None:
            was_joined = await self._calls.run(lambda: self._invitations.leave(address))
            return self._done("done", left=[address] if was_joined else [])
        left = await self._calls.run(self._invitations.leave_all)
        if self._unsealed is not None:
            await self._calls.run(self._unsealed.shutdown)
        return self._done("done", left=left)

    def _accepted(self) -> UnsealedUpdates:
        if self._unsealed is None:
            raise Refusal(
                403,
                NotInitializedError(
                    "this worker takes weights in rounds of a wtransfer Publisher only, which "
                    "prove every byte: use `wtransfer push` or Publisher(hosts=[...]); or start "
                    "the worker with --accept-unsealed ENGINE (in Python accept_unsealed=), and "
                    "updates are taken on the sender's word"
                ),
            )
        return self._unsealed

    # -- the worker

    async def _pause(self, request: Request) -> Response:
        await _body(request, NoBody)
        mode = request.query_params.get("mode", "abort")
        if mode not in PAUSE_MODES:
            raise ProtocolError(f"mode is {mode[:80]!r}, expected one of {', '.join(PAUSE_MODES)}")
        await self._calls.run(lambda: self._on_pause(mode))
        self._paused = mode
        return self._done(f"paused ({mode})")

    async def _resume(self, request: Request) -> Response:
        await _body(request, NoBody)
        await self._calls.run(self._on_resume)
        self._paused = None
        return self._done("resumed")

    async def _info(self, request: Request) -> Response:
        wanted = request.query_params.get("digests", "false")
        if wanted not in ("true", "false"):
            raise ProtocolError(f"digests is {wanted[:80]!r}, expected true or false")
        if wanted == "false":
            return answer(self._what_is_held())
        return answer(await self._calls.run(self._what_is_held_with_digests))

    async def _health(self, _request: Request) -> Response:
        state = self._session.state
        return answer({"state": state}, 503 if state == "empty" else 200)

    def _what_is_held(self) -> dict[str, Any]:
        ledger = self._session.ledger
        with ledger.changed:
            held, state = ledger.held, ledger.state
        return {
            "weight_version": held.version,
            "fingerprint": held.fingerprint,
            "state": state,
            "verified": held.verified,
            "worker": self._session.name,
            "paused": self._paused,
            "wtransfer": self._our_version,
        }

    def _what_is_held_with_digests(self) -> dict[str, Any]:
        """Return digests, and what was held while they were computed."""
        for _ in range(_DIGEST_ATTEMPTS):
            info = self._what_is_held()
            digests = self._session.digests()
            if self._session.fingerprint == info["fingerprint"]:
                return {**info, "digests": digests}
        raise RoundBusyError("new weights are applied faster than they can be digested; ask again")

    def _done(self, message: str, **more: Any) -> Response:
        return answer({"message": message, "worker": self._session.name, **more})


def _guarded(endpoint: Endpoint) -> Endpoint:
    """Turn whatever an endpoint raises into an answer that says so."""

    @functools.wraps(endpoint)
    async def guarded(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:
            raise
        except Exception as error:
            return refusal(error)
        except asyncio.CancelledError:
            # The server ends, and the request with it: who waits shall hear why.
            return refusal(Refusal(503, closing()))

    return guarded


async def _body(request: Request, cls: type[TBody]) -> TBody:
    return decode(await request.body(), request.headers.get("content-type", ""), cls)


def _client_of(request: Request) -> str:
    client = request.client
    return f"client {client.host}:{client.port}" if client else "a client on this host"


def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path[:200]}: {error.detail}"
    return refusal(Refusal(error.status_code, ProtocolError(text)))
