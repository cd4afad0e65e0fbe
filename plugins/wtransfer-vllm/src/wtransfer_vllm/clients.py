"""Reach vLLM engines of this process, for ``Publisher(hosts=[...])``.

A server needs no client, its URL is enough. For Ray actors see `wtransfer_vllm.ray_client`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import threading
import weakref
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from wtransfer.errors import StallError

from wtransfer_vllm.messages import KEY

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT_S = 30.0

_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""Name of each engine that was given none, the same in all its clients."""
_numbers = itertools.count(1)


class EngineClient(ABC):
    """Reaches an engine whose methods are those of an ``LLM`` or an ``AsyncLLM``.

    Engines of the seed era have one call for an update, ``update_weights``, and no start and no
    finish; it is made where an update is to be committed.

    Args:
        engine: The engine, or a handle of it.
        name: Name of the engine in errors and reports.
        timeout_s: Longest wait for an answer, in seconds.
    """

    def __init__(self, engine: Any, name: str, timeout_s: float = TIMEOUT_S) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._engine = engine
        self._is_of_seed_era = not hasattr(engine, "finish_weight_update")

    @abstractmethod
    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the engine, and wait for the answer.

        Args:
            method: Its name.
            *arguments: Its arguments.
            timeout_s: Longest wait, in seconds; None: the client's.
        """

    def request(self, make: Callable[[dict[str, Any]], Any], info: dict[str, Any]) -> Any:
        """Return vLLM's request of an info, as `call` takes it."""
        return make(info)

    def init_weight_transfer_engine(
        self, init_info: dict[str, Any], *, timeout_s: float | None = None
    ) -> None:
        """Let every worker join a publisher."""
        request = self.request(init_request, init_info)
        self.call("init_weight_transfer_engine", request, timeout_s=timeout_s)

    def start_weight_update(self) -> None:
        """Begin an update."""
        if not self._is_of_seed_era:
            self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:  # noqa: B027  # it is all
        """Do nothing: tensors travel beside vLLM."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit the update that the publisher has ordered."""
        if self._is_of_seed_era:
            self.call("update_weights", self.request(update_request, {}))
        else:
            self.call("finish_weight_update", weight_version)

    def leave(self, address: str, *, timeout_s: float | None = None) -> None:
        """Let every worker leave one publisher."""
        invitation = {KEY: {"address": address, "leave": True}}
        self.init_weight_transfer_engine(invitation, timeout_s=timeout_s)


def init_request(init_info: dict[str, Any]) -> Any:
    """Return vLLM's request to initialise."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    return WeightTransferInitRequest(init_info=init_info)


def update_request(update_info: dict[str, Any]) -> Any:
    """Return vLLM's request to update."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    return WeightTransferUpdateRequest(update_info=update_info)


class LLMClient(EngineClient):
    """Reaches an ``LLM``.

    An ``LLM`` is for one thread at a time, and a publisher calls it from threads of its own: within
    a round, whose end `publish` waits for, and after a round in which it could not commit, to bring
    it up to date. So hold `lock` around your own calls, in a program of one thread as well::

        with client.lock:
            outputs = llm.generate(prompts)

    Args:
        llm: vLLM's ``LLM``.
        name: Name of the engine in errors and reports. Default: ``LLM`` and a number.
    """

    is_local = True

    def __init__(self, llm: Any, *, name: str | None = None) -> None:
        super().__init__(llm, name or _numbered("LLM", llm))
        self.lock = threading.RLock()
        """Held while the publisher uses the ``LLM``."""

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:  # noqa: ARG002
        """Call a method once no other thread does, however long that takes."""
        with self.lock:
            return getattr(self._engine, method)(*arguments)


class AsyncLLMClient(EngineClient):
    """Reaches an ``AsyncLLM`` from other threads than that of its event loop.

    Args:
        engine: vLLM's ``AsyncLLM``.
        loop: The event loop that it runs in.
        name: Name of the engine in errors and reports. Default: ``AsyncLLM`` and a number.
        timeout_s: Longest wait for an answer, in seconds.
    """

    is_local = True

    def __init__(
        self,
        engine: Any,
        loop: asyncio.AbstractEventLoop,
        *,
        name: str | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        super().__init__(engine, name or _numbered("AsyncLLM", engine), timeout_s)
        self._loop = loop

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method in the event loop.

        Raises:
            StallError: The engine did not answer in time.
        """
        limit = timeout_s or self.timeout_s
        answer = getattr(self._engine, method)(*arguments)
        future = asyncio.run_coroutine_threadsafe(answer, self._loop)
        try:
            return future.result(limit)
        except concurrent.futures.TimeoutError as error:
            if future.done():
                raise
            text = f"{self.name} did not answer {method} within {limit:g} s"
            raise StallError(text, seconds=limit, worker=self.name) from error

    def get_world_size(self) -> int | None:
        """Return how many ranks the engine has, its replicas' included."""
        parallel = getattr(self._engine.vllm_config, "parallel_config", None)
        size = getattr(parallel, "world_size_across_dp", None)
        return size if isinstance(size, int) else None


def _numbered(kind: str, engine: Any) -> str:
    """Return the name of an engine that was given none."""
    return _names.get(engine) or _names.setdefault(engine, f"{kind} {next(_numbers)}")
