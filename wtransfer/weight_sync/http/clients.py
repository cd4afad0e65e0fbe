"""Reach workers: one over HTTP, one in this process, or many at once.

All of them have the methods of `WeightSyncClient`, under the names that vLLM gave them.
"""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, TypeVar

from wtransfer.errors import (
    HostsError,
    NotInitializedError,
    RemoteError,
    StallError,
    WTransferError,
)
from wtransfer.transport.handshake import resolve_token
from wtransfer.weight_sync.http.call import HostCall
from wtransfer.weight_sync.http.url import parse_host_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from wtransfer.engines.interface import WeightSyncClient
    from wtransfer.weight_sync.worker.session import WorkerSession

TIMEOUT_S = 30.0
_GROUP_GRACE_S = 1.0

T = TypeVar("T")


class HttpClient:
    """Reaches one worker: ``wtransfer worker``, a `WorkerServer`, or vLLM's own server.

    Each call is one connection, so there is nothing to close; any thread may call. Over plain HTTP
    the token can be read on the way: use Unix sockets or loopback on one host, and a tunnel or
    HTTPS between hosts that do not trust the network.

    Args:
        url: ``http://host:port``, ``tcp:host:port``, ``unix:@name`` or ``unix:/path``.
        token: Shared secret, where the URL carries none. Default: ``WTRANSFER_TOKEN``, or the
            owner-only file that ``WTRANSFER_TOKEN_FILE`` names; without any, none is sent.
        timeout_s: Longest time for an answer, in seconds.

    Raises:
        AddressError: The URL cannot be read.
    """

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._url = parse_host_url(url)
        self.name = self._url.name
        self.token = self._url.token or resolve_token(token)
        self.timeout_s = timeout_s

    @property
    def is_local(self) -> bool:
        """Whether the worker is on this host; looks its name up, which may block."""
        return self._url.is_local

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Any:
        """Initialise the worker's engine, or let it join a publisher; return its answer.

        Args:
            init_info: ``{"wtransfer": {"address": ..., "token": ...}}`` to join a publisher; fields
                of an engine's init info otherwise.
        """
        return self._post("/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update that is no round of a publisher's."""
        self._post("/start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let the worker receive; returns when it has."""
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update that is no round of a publisher's; the worker applies it."""
        body = None if weight_version is None else {"weight_version": weight_version}
        self._post("/finish_weight_update", body)

    def shutdown_weight_transfer_engine(self) -> None:
        """Let the worker leave every publisher, and drop its engine."""
        self._post("/shutdown_weight_transfer_engine")

    def leave(self, address: str, *, timeout_s: float | None = None, engine: bool = False) -> None:
        """Let the worker leave one publisher.

        Args:
            address: The publisher's.
            timeout_s: Longest wait for the answer, in seconds.
            engine: Whether it is a serving engine, whose shutdown would leave all publishers.
        """
        path = "/shutdown_weight_transfer_engine"
        body: dict[str, Any] = {"address": address}
        if engine:
            taken_back = {"wtransfer": {"address": address, "leave": True}}
            path, body = "/init_weight_transfer_engine", {"init_info": taken_back}
        self._call("POST", path, body=body, timeout_s=timeout_s).answer()

    def weight_info(self, *, digests: bool = False) -> Any:
        """Return what the worker holds: label, fingerprint, state, and how that was proven.

        Args:
            digests: Whether to have every tensor digested afresh, too.
        """
        params = {"digests": "true"} if digests else None
        return self._call("GET", "/weight_info", params=params).answer()

    def get_world_size(self) -> int | None:
        """Return how many ranks a serving engine has, its replicas' included; None: none says."""
        try:
            answer = self._call("GET", "/get_world_size", params={"include_dp": "true"}).answer()
        except RemoteError:
            # No such route: an older engine, or none.
            return None
        size = answer.get("world_size") if isinstance(answer, dict) else None
        return size if isinstance(size, int) else None

    def pause(self, mode: str = "abort") -> None:
        """Pause serving: ``abort`` running requests, ``wait`` for them, or ``keep`` them."""
        self._call("POST", "/pause", params={"mode": mode}).answer()

    def resume(self) -> None:
        """Go on serving."""
        self._post("/resume")

    def _post(self, path: str, body: Any = None) -> Any:
        return self._call("POST", path, body=body).answer()

    def _call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        params: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> HostCall:
        return HostCall(
            self._url, method, path, self.token, timeout_s or self.timeout_s, body, params
        )


class InProcessClient:
    """Reaches a session of this process: trainer and worker side by side.

    Args:
        session: The worker's.
        on_pause: Called with the mode by `pause`. By default nothing happens: a session applies
            updates between two steps of its model, which needs no pause.
        on_resume: Called by `resume`.
    """

    def __init__(
        self,
        session: WorkerSession,
        *,
        on_pause: Callable[[str], object] = lambda _mode: None,
        on_resume: Callable[[], object] = lambda: None,
    ) -> None:
        self.name = session.name
        self.is_local = True
        self.timeout_s = TIMEOUT_S
        self._session = session
        self._on_pause = on_pause
        self._on_resume = on_resume
        self._joined: list[str] = []

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Any:
        """Let the session join a publisher; one that it has joined already is no error.

        Raises:
            NotInitializedError: `init_info` names no publisher.
        """
        invitation = init_info.get("wtransfer")
        if not isinstance(invitation, dict) or "address" not in invitation:
            raise self._no_round()
        self._join(**invitation)
        return {"worker": self._session.name}

    def start_weight_update(self) -> None:
        """Refuse.

        Raises:
            NotInitializedError: Always: a session is updated by rounds of a publisher.
        """
        raise self._no_round()

    def update_weights(self, update_info: dict[str, Any]) -> None:  # noqa: ARG002  # the contract's
        """Refuse, as `start_weight_update` does."""
        raise self._no_round()

    def finish_weight_update(self, weight_version: str | None = None) -> None:  # noqa: ARG002
        """Refuse, as `start_weight_update` does."""
        raise self._no_round()

    def shutdown_weight_transfer_engine(self) -> None:
        """Let the session leave every publisher that it joined by this client."""
        while self._joined:
            self._session.leave(self._joined.pop())

    def leave(self, address: str, *, timeout_s: float | None = None) -> None:  # noqa: ARG002
        """Let the session leave one publisher, if it joined it by this client."""
        if address in self._joined:
            self._joined.remove(address)
            self._session.leave(address)

    def weight_info(self, *, digests: bool = False) -> Any:
        """Return what the session holds.

        Args:
            digests: Whether to digest every tensor afresh, too.
        """
        session = self._session
        info: dict[str, Any] = {
            "weight_version": session.version,
            "fingerprint": session.fingerprint,
            "state": session.state,
            "worker": session.name,
        }
        return {**info, "digests": session.digests()} if digests else info

    def pause(self, mode: str = "abort") -> None:
        """Call ``on_pause``."""
        self._on_pause(mode)

    def resume(self) -> None:
        """Call ``on_resume``."""
        self._on_resume()

    def _join(self, address: str, token: str | None = None, host: str | None = None) -> None:
        try:
            self._session.join(address, token=token, host=host)
        except WTransferError:
            raise
        except ValueError:
            # Joined before: the session dials again by itself whenever that is lost.
            return
        self._joined.append(address)

    def _no_round(self) -> NotInitializedError:
        return NotInitializedError(
            f"session {self.name} takes rounds of a Publisher only: pass this client in its hosts="
        )


class ClientGroup:
    """Calls many workers at once; a call returns when all have done it.

    Each worker is called on a thread of its own, and waited for no longer than its time-out, so
    none hides what another says.

    Args:
        clients: The workers'.
    """

    def __init__(self, clients: Iterable[WeightSyncClient]) -> None:
        self._clients: dict[str, Any] = {}
        for client in clients:
            self._clients[_name_of(client, self._clients)] = client

    @property
    def names(self) -> list[str]:
        """Name of every worker, as errors and answers have it."""
        return list(self._clients)

    def call(self, method: str, *arguments: Any, **named: Any) -> dict[str, Any]:
        """Call a method of every client; return name -> answer.

        Raises:
            WTransferError: What the one worker that failed reported.
            HostsError: Several failed.
        """
        calls = {
            name: functools.partial(getattr(client, method), *arguments, **named)
            for name, client in self._clients.items()
        }
        timeouts = (getattr(client, "timeout_s", TIMEOUT_S) for client in self._clients.values())
        return all_at_once(calls, max(timeouts, default=TIMEOUT_S) + _GROUP_GRACE_S)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Any:
        """Initialise every worker's engine."""
        return self.call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """Begin an update."""
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Let every worker receive; returns when all have."""
        self.call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update."""
        self.call("finish_weight_update", weight_version)

    def shutdown_weight_transfer_engine(self) -> None:
        """Let every worker leave its publishers, and drop its engine."""
        self.call("shutdown_weight_transfer_engine")

    def weight_info(self, *, digests: bool = False) -> dict[str, Any]:
        """Return what every worker holds, by its name."""
        return self.call("weight_info", digests=digests)

    def pause(self, mode: str = "abort") -> None:
        """Pause every worker."""
        self.call("pause", mode)

    def resume(self) -> None:
        """Let every worker go on."""
        self.call("resume")


def all_at_once(calls: Mapping[str, Callable[[], T]], timeout_s: float) -> dict[str, T]:
    """Make calls at the same time and wait for all of them, but no longer than `timeout_s`.

    Args:
        calls: Host -> call.
        timeout_s: Longest wait, in seconds. What still runs then is left to its own time-outs.

    Returns:
        Host -> result.

    Raises:
        WTransferError: The one error there was.
        HostsError: There were several.
    """
    futures = {name: _begin(name, call) for name, call in calls.items()}
    concurrent.futures.wait(futures.values(), timeout_s)
    errors = {name: _error_of(name, future, timeout_s) for name, future in futures.items()}
    failed = {name: error for name, error in errors.items() if error is not None}
    if len(failed) == 1:
        raise next(iter(failed.values()))
    if failed:
        lines = "".join(f"\n  {name}: {error}" for name, error in failed.items())
        raise HostsError(f"{len(failed)} of {len(calls)} hosts failed:{lines}", errors=failed)
    return {name: future.result() for name, future in futures.items()}


def _begin(name: str, call: Callable[[], T]) -> Future[T]:
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    # Daemons: a host that hangs must not hold up the end of the program.
    threading.Thread(target=run, name=f"wtransfer-host {name}", daemon=True).start()
    return future


def _error_of(name: str, future: Future[Any], timeout_s: float) -> WTransferError | None:
    if not future.done():
        text = f"{name} did not answer within {timeout_s:g} s"
        return StallError(text, seconds=timeout_s, worker=name)
    error = future.exception()
    if error is None or isinstance(error, WTransferError):
        return error
    failure = RemoteError(f"{name}: {type(error).__name__}: {error}", worker=name)
    failure.__cause__ = error
    return failure


def _name_of(client: WeightSyncClient, taken: Mapping[str, object]) -> str:
    name = str(getattr(client, "name", type(client).__name__))
    return name if name not in taken else f"{name} ({len(taken)})"
