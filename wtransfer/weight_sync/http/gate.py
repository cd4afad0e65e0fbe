"""The gate before a worker's routes: the token first, then a whole and bounded body."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
from typing import TYPE_CHECKING

from wtransfer.errors import AuthenticationError, LimitError, PeerLostError, StallError
from wtransfer.weight_sync.http.answers import Refusal, closing, refusal

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

MIB = 1 << 20
MAX_BODY_NBYTES = 1 * MIB
"""Longest body."""
MAX_UPDATE_NBYTES = 64 * MIB
"""Longest body of ``/update_weights``, which may name every tensor."""
BODY_S = 30.0
"""Time for a whole body, in seconds, however it is cut into bytes."""


class Gate:
    """An ASGI application that lets only good requests through to another.

    Nothing of a body is read before the token was found to be right.

    Args:
        app: Gets requests whose body is complete.
        token: Shared secret.
    """

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = _hashed(token.encode(errors="surrogateescape"))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on; ASGI."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close"})
            return
        if scope["type"] == "http":
            try:
                self._check_token(scope)
                receive = _Body(await _read(scope, receive), receive)
            except Refusal as refused:
                await refusal(refused)(scope, receive, send)
                return
            except PeerLostError:
                return
        await self._app(scope, receive, send)

    def _check_token(self, scope: Scope) -> None:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        secret = _secret(given[0]) if len(given) == 1 else b""
        if not hmac.compare_digest(_hashed(secret), self._expected):
            raise Refusal(
                401,
                AuthenticationError(
                    "this worker wants its token: 'Authorization: Bearer TOKEN', or TOKEN as the "
                    "password of http://wtransfer:TOKEN@host:port"
                ),
            )


def _hashed(secret: bytes) -> bytes:
    # Of one length whatever was given: the time of a comparison tells nothing.
    return hashlib.sha256(secret).digest()


def _secret(authorization: bytes) -> bytes:
    scheme, _, credentials = authorization.partition(b" ")
    credentials = credentials.strip()
    if scheme.lower() == b"bearer":
        return credentials
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(credentials, validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


async def _read(scope: Scope, receive: Receive) -> bytes:
    most = MAX_UPDATE_NBYTES if scope["path"].endswith("/update_weights") else MAX_BODY_NBYTES
    announced = next((v for name, v in scope["headers"] if name == b"content-length"), b"0")
    # The protocol has made sure that these are digits.
    _check_size(int(announced), most)
    try:
        return await asyncio.wait_for(_collect(receive, most), BODY_S)
    except asyncio.TimeoutError as error:
        late = StallError(f"the body was not complete within {BODY_S:g} s", seconds=BODY_S)
        raise Refusal(408, late) from error
    except asyncio.CancelledError as error:
        raise Refusal(503, closing()) from error


async def _collect(receive: Receive, most: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise PeerLostError("the client has gone")
        body += message.get("body", b"")
        _check_size(len(body), most)
        if not message.get("more_body", False):
            return bytes(body)


def _check_size(nbytes: int, most: int) -> None:
    if nbytes > most:
        raise Refusal(
            413, LimitError(f"the body has {nbytes} bytes or more, at most {most} are taken")
        )


class _Body:
    """Hands out a body that was read already."""

    def __init__(self, body: bytes, receive: Receive) -> None:
        self._message: Message | None = {"type": "http.request", "body": body, "more_body": False}
        self._receive = receive

    async def __call__(self) -> Message:
        message, self._message = self._message, None
        return message or await self._receive()
