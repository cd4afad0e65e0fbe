"""One HTTP request to a worker: bounded in time and size, and its errors are ours.

A worker is a peer: what it answers is decoded as JSON and otherwise believed in nothing. An error
that it describes comes back as the class that it names, from a closed table.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from wtransfer.deadline import Deadline
from wtransfer.errors import (
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

if TYPE_CHECKING:
    from collections.abc import Iterator

    import httpx

    from wtransfer.weight_sync.http.url import HostUrl

MAX_ANSWER_NBYTES = 64 << 20
"""Longest answer: the digests of as many tensors as an update may have."""

_MAX_SHOWN = 2000  # characters of an answer that is no error of ours
_HTTP_OK = range(200, 300)
_UNAUTHORIZED = 401
_NOT_FOUND = 404


@dataclass(frozen=True)
class HostCall:
    """What is asked of one worker.

    Redirects are not followed and proxies not asked: a token is for the host that it was given
    for.
    """

    host: HostUrl
    """Where."""
    method: str
    """GET or POST."""
    path: str
    """Route."""
    token: str | None
    """Shared secret; None sends none."""
    timeout_s: float
    """Longest time in all, in seconds; a host that sends byte by byte may take it twice."""
    body: Any = None
    """JSON body."""
    params: dict[str, str] | None = None
    """Query."""

    def answer(self) -> Any:
        """Ask, and return the decoded JSON answer.

        Raises:
            PluginNotInstalledError: httpx is not installed.
            PeerLostError: The host cannot be reached, or hung up.
            StallError: It did not answer in time.
            AuthenticationError: It wants another token.
            ProtocolError: Its answer is not JSON.
            LimitError: Its answer is too long.
            WTransferError: What the worker reports.
        """
        status, raw = self._exchange()
        if status in _HTTP_OK:
            return self._decoded(status, raw)
        error = self._refusal(status, raw)
        theirs = error.worker
        # Both names: users know the URL, reports the worker.
        error.worker = f"{theirs} at {self.host.name}" if theirs else self.host.name
        raise error

    def _exchange(self) -> tuple[int, bytes]:
        httpx = _httpx()
        deadline = Deadline(self.timeout_s)
        try:
            return self._ask(httpx)
        except httpx.HTTPError as error:
            late = isinstance(error, httpx.TimeoutException) or deadline.expired
            raise (self._late() if late else self._unreachable(error)) from error

    def _ask(self, httpx: Any) -> tuple[int, bytes]:
        self._knock()
        # Certificates are read from disk for every transport that is to check some: 30 ms.
        checks = self.host.base_url.startswith("https:")
        transport = httpx.HTTPTransport(uds=self.host.socket, verify=checks)
        with (
            httpx.Client(
                transport=transport,
                base_url=self.host.base_url,
                headers=self._headers(),
                timeout=self.timeout_s,
                trust_env=False,
            ) as client,
            _cut_off(transport, self.timeout_s),
            client.stream(self.method, self.path, json=self.body, params=self.params) as response,
        ):
            return response.status_code, self._read(response)

    def _knock(self) -> None:
        # The HTTP library leaves a Unix socket on which nobody listens to the garbage collector.
        if self.host.socket is None:
            return
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(self.timeout_s)
            try:
                probe.connect(self.host.socket)
            except TimeoutError as error:
                raise self._late() from error
            except OSError as error:
                raise self._unreachable(error) from error

    def _headers(self) -> dict[str, bytes]:
        # Unpacked answers could be larger than their limit.
        headers = {"Accept-Encoding": b"identity", "User-Agent": b"wtransfer"}
        if self.token is not None:
            secret = self.token.encode(errors="surrogateescape")
            if secret.strip() != secret or any(byte < 0x20 or byte == 0x7F for byte in secret):  # noqa: PLR2004  # control characters
                # Otherwise the HTTP library says so, and shows the token.
                raise AuthenticationError(
                    f"the token for {self.host.name} has spaces at its ends or control characters, "
                    "which HTTP cannot carry; use another"
                )
            headers["Authorization"] = b"Bearer " + secret
        return headers

    def _read(self, response: httpx.Response) -> bytes:
        raw = bytearray()
        for chunk in response.iter_raw():
            raw += chunk
            if len(raw) > MAX_ANSWER_NBYTES:
                raise LimitError(
                    f"{self.host.name} answers {self._what} with more than {MAX_ANSWER_NBYTES} "
                    "bytes; is a worker of wtransfer there?",
                    worker=self.host.name,
                )
        return bytes(raw)

    def _decoded(self, status: int, raw: bytes) -> Any:
        try:
            return msgspec.json.decode(raw) if raw else {}
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise ProtocolError(
                f"{self.host.name} answered {self._what} with status {status} and no JSON: "
                f"{_shown(raw)!r}; is a worker of wtransfer there?",
                worker=self.host.name,
            ) from error

    def _refusal(self, status: int, raw: bytes) -> WTransferError:
        error = _described(raw)
        if status == _UNAUTHORIZED:
            given = "refuses the token" if self.token else "wants a token, and none was given"
            return AuthenticationError(
                f"{self.host.name} {given}; give the one that the worker was started with: "
                "--token-file or WTRANSFER_TOKEN, in Python token= or host_token="
            )
        if error is not None and not isinstance(error, RemoteError):
            return error
        text = error.message if error is not None else _shown(raw)
        hint = (
            "; is a worker of wtransfer there (or vLLM with VLLM_SERVER_DEV_MODE=1)?"
            if status == _NOT_FOUND
            else ""
        )
        return RemoteError(f"{self.host.name} answered {self._what} with {status}: {text}{hint}")

    def _late(self) -> StallError:
        return StallError(
            f"{self.host.name} did not answer {self._what} within {self.timeout_s:g} s; it may be "
            "stopped or busy: look at its log, or allow more time",
            seconds=self.timeout_s,
            worker=self.host.name,
        )

    def _unreachable(self, cause: Exception) -> PeerLostError:
        return PeerLostError(
            f"cannot reach {self.host.name} for {self._what}: {cause}; start the worker "
            "(wtransfer worker --listen ...) or correct the address",
            worker=self.host.name,
        )

    @property
    def _what(self) -> str:
        return f"{self.method} {self.path}"


@contextlib.contextmanager
def _cut_off(transport: httpx.HTTPTransport, after_s: float) -> Iterator[None]:
    """Close the connection when the whole time is over: a byte now and then restarts the others."""
    timer = threading.Timer(after_s, transport.close)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _described(raw: bytes) -> WTransferError | None:
    """Return the error that an answer describes: ours, vLLM's or FastAPI's form."""
    try:
        document = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    if not isinstance(document, dict):
        return None
    error = document.get("error", document.get("detail"))
    if isinstance(error, dict) and isinstance(error.get("message"), str):
        facts = {k: v for k, v in error.items() if k not in ("type", "message")}
        return from_wire(str(error.get("type", "error")), error["message"], facts)
    return None if error is None else RemoteError(str(error)[:_MAX_SHOWN])


def _shown(raw: bytes) -> str:
    return raw[:_MAX_SHOWN].decode(errors="replace").strip()


def _httpx() -> Any:
    try:
        import httpx
    except ImportError as error:
        raise PluginNotInstalledError(
            'HTTP workers need httpx, which is not installed: pip install "wtransfer[server]"'
        ) from error
    return httpx
