"""Wait on an event loop for calls that block."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

MAX_CALLS = 16
"""Calls at a time."""


class DaemonCalls:
    """Runs calls on threads that never hold up the end of the program.

    The threads that event loops and web frameworks keep for this are waited for when the
    interpreter ends; a call that waits for a peer would then cost its whole deadline.
    """

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(MAX_CALLS)

    async def run(self, call: Callable[[], T]) -> T:
        """Return what `call` returns, or raise what it raises."""
        async with self._room:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[T] = loop.create_future()

            def settle(result: T | None, error: BaseException | None) -> None:
                if future.cancelled():
                    return
                if error is not None:
                    future.set_exception(error)
                else:
                    future.set_result(result)  # type: ignore[arg-type]  # one of both is given

            def work() -> None:
                result, failure = None, None
                try:
                    result = call()
                except BaseException as error:
                    failure = error
                # Nobody listens any more once the loop is closed.
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(settle, result, failure)

            threading.Thread(target=work, name="wtransfer-http-call", daemon=True).start()
            return await future
