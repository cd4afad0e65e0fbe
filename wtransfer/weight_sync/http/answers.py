"""What a worker answers: JSON, and errors whose text reaches the caller."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.responses import Response

from wtransfer.errors import (
    ClosedError,
    DigestMismatchError,
    EngineError,
    IncompleteUpdateError,
    ManifestError,
    NotInitializedError,
    PeerError,
    PluginError,
    ProtocolError,
    RoundAbortedError,
    RoundBusyError,
    SchemaError,
    StallError,
    WTransferError,
)
from wtransfer.weight_sync.http.protocol import REASON
from wtransfer.weight_sync.messages import ErrorInfo

_MAX_REASON = 200
_STATUS: dict[type[BaseException], int] = {
    ProtocolError: 400,
    SchemaError: 400,
    ManifestError: 400,
    IncompleteUpdateError: 400,
    DigestMismatchError: 400,
    RoundBusyError: 409,
    RoundAbortedError: 409,
    NotInitializedError: 409,
    ClosedError: 503,
    StallError: 504,
    # After ProtocolError: others could not be reached, or refused this worker.
    PeerError: 502,
}


class Refusal(Exception):  # noqa: N818  # not a failure of ours
    """A request is answered with an error, and its connection is closed.

    Args:
        status: HTTP status.
        error: What the caller is told.
    """

    def __init__(self, status: int, error: WTransferError) -> None:
        super().__init__(status, error)
        self.status = status
        self.error = error


def answer(document: dict[str, Any], status: int = 200) -> Response:
    """Return a JSON answer."""
    return Response(msgspec.json.encode(document), status, media_type="application/json")


def refusal(error: BaseException) -> Response:
    """Return the answer that tells a caller of an error."""
    if isinstance(error, Refusal):
        response = _describe(error.error, error.status)
        # Of a request that is refused early, the rest may still be on its way.
        response.headers["connection"] = "close"
        return response
    return _describe(error, _status_of(error))


def closing() -> ClosedError:
    """Return what a request that is not finished when the server ends is told."""
    return ClosedError("the worker's server was closed before this request was finished")


def _describe(error: BaseException, status: int) -> Response:
    info = ErrorInfo.of(error)
    document = {"type": info.kind, "message": info.message, **info.facts}
    response = answer({"error": document}, status)
    response.headers[REASON.decode()] = _reason(f"{info.kind}: {info.message}")
    if status == 401:  # noqa: PLR2004  # the one that asks for credentials
        response.headers["www-authenticate"] = "Bearer"
    return response


def _reason(text: str) -> str:
    """Return the first line as it may stand in a status line."""
    return re.sub(r"[^ -~]", "?", text.partition("\n")[0])[:_MAX_REASON].strip()


def _status_of(error: BaseException) -> int:
    known = (status for cls, status in _STATUS.items() if isinstance(error, cls))
    status = next(known, None)
    if status is not None:
        return status
    return 400 if _is_theirs(error) else 500


def _is_theirs(error: BaseException) -> bool:
    if isinstance(error, EngineError):
        # What an engine cannot read of an info reaches us in a wrapper, as all that it raises.
        return isinstance(error.__cause__, ValueError)
    # What is asked for by name or value and is not there: addresses, backends.
    return isinstance(error, WTransferError) and isinstance(error, (ValueError, PluginError))
