"""Reach a worker or a serving engine over HTTP.

URLs, as users write them:

=======================  =======================================================================
``http://host:port``     as in browsers; ``http://wtransfer:TOKEN@host:port`` with the token
``tcp:host:port``        the same without a token, in the form of other addresses of wtransfer
``unix:@name``           abstract Unix socket
``unix:/path``           Unix socket in a folder
=======================  =======================================================================

A response is decoded as JSON and otherwise not trusted. An error in a response is raised as the
class that the response names, from the closed table of `wtransfer.errors`.
"""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import msgspec

from wtransfer.deadline import Deadline
from wtransfer.errors import (
    AddressError,
    AuthenticationError,
    LimitError,
    PeerLostError,
    PluginNotInstalledError,
    ProtocolError,
    RemoteError,
    StallError,
    WTransferError,
    from_wire,
)
from wtransfer.transport.address import check_same_user, parse_address
from wtransfer.transport.handshake import resolve_token

if TYPE_CHECKING:
    from collections.abc import Mapping

    import httpx

TIMEOUT_S = 30.0
CONNECT_S = 2.0
"""Longest time for a connection, in seconds; an endpoint that is there takes far less."""
MAX_RESPONSE_NBYTES = 64 << 20
"""Longest response: the digests of as many tensors as an update may have."""

_PORTS = {"http": 80, "https": 443}
_MAX_SHOWN = 2000  # characters of a response that is no error of ours
_PAUSE_S = 0.1
_UNAUTHORIZED, _NOT_FOUND, _TIMEOUT = 401, 404, 408


@dataclass(frozen=True)
class EndpointUrl:
    """A parsed URL."""

    name: str
    """The URL without its token: safe to show."""
    base_url: str
    """Prefix of every request's URL."""
    address: str
    """The URL as an address of `wtransfer.transport.address`."""
    socket: str | None = None
    """Unix socket to connect to; abstract names start with a NUL."""
    token: str | None = field(default=None, repr=False)
    """Token in the URL."""

    @property
    def is_local(self) -> bool:
        """True if the endpoint is on this host; looks its name up, which may block.

        Raises:
            AddressError: The host's name is not known.
        """
        return self.socket is not None or parse_address(self.address).is_local


def parse_url(text: str) -> EndpointUrl:
    """Read a URL.

    Raises:
        AddressError: The URL has none of the forms above.
    """
    scheme, _, rest = text.partition(":")
    if scheme == "unix":
        path = parse_address(text).target
        assert isinstance(path, str)
        return EndpointUrl(text, "http://localhost", address=text, socket=path)
    try:
        parts = urlsplit(f"http://{rest}" if scheme == "tcp" else text)
        if parts.scheme not in _PORTS or not parts.hostname or parts.query or parts.fragment:
            raise ValueError
        port = parts.port or _PORTS[parts.scheme]
    except ValueError:
        # Without its cause, whose text repeats parts of the URL and so perhaps of a token.
        shown = re.sub(r"(?<=://).*@|(?<=^tcp:).*@", "***@", text)
        raise AddressError(
            f"{shown!r} is no worker's URL; expected 'http://host:port', 'tcp:host:port', "
            "'unix:@name' or 'unix:/path'"
        ) from None
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    base_url = f"{parts.scheme}://{host}:{port}{parts.path.rstrip('/')}"
    address = f"tcp:{host}:{port}"
    return EndpointUrl(
        name=address if scheme == "tcp" else base_url,
        base_url=base_url,
        address=address,
        token=unquote(parts.password or parts.username or "") or None,
    )


class HttpClient:
    """Reaches one endpoint: ``wtransfer worker``, a `WorkerServer`, or vLLM's own server.

    Each call is one connection, so there is nothing to close; any thread may call. The endpoint is
    sent the token, whoever listens there: on a host with other users use Unix sockets, whose
    listener must be the same user, and between hosts a tunnel or HTTPS.

    Args:
        url: ``http://host:port``, ``tcp:host:port``, ``unix:@name`` or ``unix:/path``.
        token: Shared secret, where the URL carries none. Default: ``WTRANSFER_TOKEN``, or the
            owner-only file that ``WTRANSFER_TOKEN_FILE`` names; without any, none is sent.
        timeout_s: Longest time for a response, in seconds; an endpoint that sends byte by byte may
            take it twice.

    Every call raises:
        PluginNotInstalledError: httpx is not installed.
        PeerLostError: The endpoint cannot be reached, or closed the connection.
        StallError: No response in time.
        AuthenticationError: The endpoint wants another token, or another user listens at a Unix
            socket.
        ProtocolError: The response is not JSON.
        LimitError: The response is too long.
        WTransferError: The error that the endpoint reports.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self.url = parse_url(url)
        self.name = self.url.name
        self.token = self.url.token or resolve_token(token)
        self.timeout_s = timeout_s

    @property
    def is_local(self) -> bool:
        """True if the endpoint is on this host; looks its name up, which may block."""
        return self.url.is_local

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Any:
        """Let the endpoint's workers join a publisher; return the response.

        Args:
            init_info: ``{"wtransfer": {"address": ..., "token": ...}}``.
        """
        return self._call("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin to apply an update that a serving engine's workers have verified."""
        self._call("POST", "/start_weight_update")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Apply the update; returns when the serving engine has."""
        body = None if weight_version is None else {"weight_version": weight_version}
        self._call("POST", "/finish_weight_update", body)

    def leave(self, address: str, *, timeout_s: float | None = None) -> None:
        """Let the endpoint's workers leave one publisher.

        Args:
            address: The publisher's.
            timeout_s: Longest wait for the response, in seconds. Default: the client's.
        """
        # Not by the shutdown route: a serving engine then leaves every publisher.
        body = {"init_info": {"wtransfer": {"address": address, "leave": True}}}
        self._call("POST", "/init_weight_transfer_engine", body, timeout_s=timeout_s)

    def weight_info(self, *, digests: bool = False) -> Any:
        """Return label, fingerprint, state and proof of the weights that the endpoint serves.

        Args:
            digests: True to have every tensor digested afresh, too.
        """
        params = {"digests": "true"} if digests else None
        return self._call("GET", "/weight_info", params=params)

    def get_world_size(self) -> int | None:
        """Return the ranks of a serving engine, all replicas included; None: no such route."""
        try:
            answer = self._call("GET", "/get_world_size", params={"include_dp": "true"})
        except RemoteError:
            return None
        size = answer.get("world_size") if isinstance(answer, dict) else None
        return size if isinstance(size, int) else None

    def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        try:
            import httpx
        except ImportError as error:
            raise PluginNotInstalledError(
                'HTTP endpoints need httpx, which is not installed: pip install "wtransfer[server]"'
            ) from error
        request, headers = f"{method} {path}", self._headers()
        deadline = Deadline(timeout_s or self.timeout_s)
        if self.url.socket is not None:
            # httpcore leaves the socket of a failed connect to the garbage collector.
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(min(CONNECT_S, deadline.seconds))
                try:
                    probe.connect(self.url.socket)
                except OSError as error:
                    raise self._lost(error, request, deadline) from error
        # With a transport of its own, the client uses no proxy of the environment: the token is for
        # this endpoint only. And only HTTPS needs the certificates, which take 30 ms to read.
        transport = httpx.HTTPTransport(
            uds=self.url.socket, verify=self.url.base_url.startswith("https:")
        )
        # httpx bounds every single read: a byte now and then would keep a call alive for ever.
        cut_off = threading.Timer(deadline.seconds, transport.close)
        cut_off.daemon = True
        try:
            with httpx.Client(
                transport=transport,
                base_url=self.url.base_url,
                headers=headers,
                timeout=httpx.Timeout(deadline.seconds, connect=min(CONNECT_S, deadline.seconds)),
            ) as client:
                cut_off.start()
                while True:
                    with client.stream(
                        method,
                        path,
                        json=body,
                        params=params,
                        extensions={"trace": self._check_user},
                    ) as response:
                        raw = self._read(response, request)
                    # The server has closed without a request: this side was late.
                    if response.status_code != _TIMEOUT or deadline.expired:
                        break
                    time.sleep(_PAUSE_S)
        except httpx.HTTPError as error:
            raise self._lost(error, request, deadline) from error
        finally:
            cut_off.cancel()
        if not response.is_success:
            raise self._error(response.status_code, raw, request)
        try:
            return msgspec.json.decode(raw) if raw else {}
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(
                f"{self.name} answered {request} with status {response.status_code} and no JSON: "
                f"{_shown(raw)!r}; is a worker of wtransfer there?",
                worker=self.name,
            ) from error

    def _check_user(self, event: str, info: Mapping[str, Any]) -> None:
        """Keep the token from other users: any of them may listen at an abstract name.

        httpx calls it before it sends anything on the connection.
        """
        if event != "connection.connect_unix_socket.complete":
            return
        if not (self.url.socket or "").startswith("\0"):
            return
        stream = info["return_value"]
        try:
            check_same_user(stream.get_extra_info("socket"))
        except AuthenticationError as error:
            stream.close()
            raise AuthenticationError(
                f"{self.name} is another user's: {error}; run this as that user",
                worker=self.name,
            ) from error

    def _headers(self) -> dict[bytes, bytes]:
        # An unpacked response could be larger than its limit.
        headers = {b"Accept-Encoding": b"identity", b"User-Agent": b"wtransfer"}
        if self.token is not None:
            secret = self.token.encode(errors="surrogateescape")
            if secret.strip() != secret or re.search(rb"[\x00-\x1f\x7f]", secret):
                # h11 would refuse it as well, with the token in its error.
                raise AuthenticationError(
                    f"the token for {self.name} has spaces at its ends or control characters, "
                    "which HTTP cannot carry; use another"
                )
            headers[b"Authorization"] = b"Bearer " + secret
        return headers

    def _read(self, response: httpx.Response, request: str) -> bytes:
        raw = bytearray()
        for chunk in response.iter_raw():
            raw += chunk
            if len(raw) > MAX_RESPONSE_NBYTES:
                raise LimitError(
                    f"{self.name} answers {request} with more than {MAX_RESPONSE_NBYTES} bytes; is "
                    "a worker of wtransfer there?",
                    worker=self.name,
                )
        return bytes(raw)

    def _lost(self, error: Exception, request: str, deadline: Deadline) -> WTransferError:
        if deadline.expired:
            return StallError(
                f"{self.name} did not answer {request} within {deadline.seconds:g} s; it may be "
                "stopped or busy: look at its log, or allow more time",
                seconds=deadline.seconds,
                worker=self.name,
            )
        return PeerLostError(
            f"cannot reach {self.name} for {request}: {error}; start the server there (wtransfer "
            "worker --listen ..., or VLLM_SERVER_DEV_MODE=1 python -m "
            "vllm.entrypoints.openai.api_server --model ...), or correct the address",
            worker=self.name,
        )

    def _error(self, status: int, raw: bytes, request: str) -> WTransferError:
        """Return the error of a response: in our form, vLLM's, FastAPI's, or as plain text."""
        if status == _UNAUTHORIZED:
            given = "refuses the token" if self.token else "wants a token, and none was given"
            return AuthenticationError(
                f"{self.name} {given}; give the one that the worker was started with: "
                "--token-file or WTRANSFER_TOKEN, in Python token= or host_token=",
                worker=self.name,
            )
        text, document = _shown(raw), None
        with contextlib.suppress(msgspec.DecodeError, RecursionError, UnicodeDecodeError):
            document = msgspec.json.decode(raw)
        if isinstance(document, dict):
            error = document.get("error", document.get("detail"))
            if isinstance(error, dict) and isinstance(error.get("message"), str):
                facts = {k: v for k, v in error.items() if k not in ("type", "message")}
                ours = from_wire(str(error.get("type", "error")), error["message"], facts)
                if not isinstance(ours, RemoteError):
                    # Name both: users know the URL, reports the worker.
                    ours.worker = f"{ours.worker} at {self.name}" if ours.worker else self.name
                    return ours
                text = ours.message
            elif error is not None:
                text = str(error)[:_MAX_SHOWN]
        if status == _NOT_FOUND:
            text += "; is a worker of wtransfer there (or vLLM with VLLM_SERVER_DEV_MODE=1)?"
        return RemoteError(
            f"{self.name} answered {request} with {status}: {text}", worker=self.name
        )


def _shown(raw: bytes) -> str:
    return raw[:_MAX_SHOWN].decode(errors="replace").strip()
