"""Run blocking calls on threads that can be left behind."""

from __future__ import annotations

import concurrent.futures
import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from wtransfer.errors import HostsError, RemoteError, StallError, WTransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

T = TypeVar("T")


def call_in_daemon_thread(call: Callable[[], T], name: str) -> Future[T]:
    """Start a call on a daemon thread of its own and return its future.

    The threads of executors and event loops are joined when the interpreter ends: there, a call
    that waits for a peer would hold up the program for its whole deadline.

    Args:
        call: Runs once.
        name: Name of the thread.
    """
    future: Future[T] = Future()
    # From here on a cancelled waiter cannot cancel the call, whose result is set in any case.
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result = call()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def map_concurrently(calls: Mapping[str, Callable[[], T]], timeout_s: float) -> dict[str, T]:
    """Make all calls at the same time, and wait until every one has returned or time is up.

    Args:
        calls: Host -> call.
        timeout_s: Longest wait, in seconds. Calls that still run then are left to their own
            time-outs.

    Returns:
        Host -> result.

    Raises:
        WTransferError: The only failure.
        HostsError: Several calls failed.
    """
    futures = {
        name: call_in_daemon_thread(call, f"wtransfer-host {name}") for name, call in calls.items()
    }
    concurrent.futures.wait(futures.values(), timeout_s)
    failed: dict[str, WTransferError] = {}
    for name, future in futures.items():
        if not future.done():
            text = f"{name} did not answer within {timeout_s:g} s"
            failed[name] = StallError(text, seconds=timeout_s, worker=name)
        elif isinstance(error := future.exception(), WTransferError):
            failed[name] = error
        elif error is not None:
            failed[name] = RemoteError(f"{name}: {type(error).__name__}: {error}", worker=name)
            failed[name].__cause__ = error
    if len(failed) == 1:
        raise next(iter(failed.values()))
    if failed:
        lines = "".join(f"\n  {name}: {error}" for name, error in failed.items())
        raise HostsError(f"{len(failed)} of {len(calls)} hosts failed:{lines}", errors=failed)
    return {name: future.result() for name, future in futures.items()}
