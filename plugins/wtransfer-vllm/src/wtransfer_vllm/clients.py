"""Reach vLLM engines of this process, for ``Publisher(hosts=[...])``.

A server needs none of these: its URL will do. For Ray actors see `wtransfer_vllm.ray_client`.

Engines of the seed era have one call for an update, ``update_weights``; it is made where an update
is to be committed.
"""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING, Any

from wtransfer_vllm.invitation import taken_back
from wtransfer_vllm.requests import init_request, is_of_the_seed_era, update_request

if TYPE_CHECKING:
    from collections.abc import Coroutine

TIMEOUT_S = 30.0


class LLMClient:
    """Reaches an ``LLM``.

    An ``LLM`` is for one thread at a time, and a publisher calls it from threads of its own: when
    you publish, and when an engine that could not commit is brought up to date afterwards. So hold
    `lock` around your own calls::

        with client.lock:
            outputs = llm.generate(prompts)

    Args:
        llm: vLLM's ``LLM``.
    """

    is_local = True
    timeout_s = TIMEOUT_S

    def __init__(self, llm: Any) -> None:
        self.name = f"LLM {id(llm):#x}"
        self.lock = threading.RLock()
        """Held while the publisher uses the ``LLM``."""
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every worker join a publisher."""
        with self.lock:
            self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin."""
        with self.lock:
            if not is_of_the_seed_era(self._llm):
                self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do nothing: tensors travel beside vLLM."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit what the publisher has ordered."""
        with self.lock:
            if is_of_the_seed_era(self._llm):
                self._llm.update_weights({"update_info": {}})
            else:
                self._llm.finish_weight_update(weight_version)

    def leave(self, address: str, *, timeout_s: float | None = None) -> None:  # noqa: ARG002
        """Let every worker leave one publisher."""
        self.init_weight_transfer_engine(taken_back(address))


class AsyncLLMClient:
    """Reaches an ``AsyncLLM`` from other threads than that of its event loop.

    Args:
        engine: vLLM's ``AsyncLLM``.
        loop: The event loop that it runs in.
        timeout_s: Longest wait for an answer, in seconds.
    """

    is_local = True

    def __init__(
        self, engine: Any, loop: asyncio.AbstractEventLoop, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.name = f"AsyncLLM {id(engine):#x}"
        self.timeout_s = timeout_s
        self._engine = engine
        self._loop = loop

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every worker join a publisher."""
        self._wait(self._engine.init_weight_transfer_engine(init_request(init_info)))

    def start_weight_update(self) -> None:
        """Begin."""
        if not is_of_the_seed_era(self._engine):
            self._wait(self._engine.start_weight_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do nothing: tensors travel beside vLLM."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit what the publisher has ordered."""
        if is_of_the_seed_era(self._engine):
            self._wait(self._engine.update_weights(update_request({})))
        else:
            self._wait(self._engine.finish_weight_update(weight_version))

    def leave(self, address: str, *, timeout_s: float | None = None) -> None:
        """Let every worker leave one publisher."""
        request = init_request(taken_back(address))
        self._wait(self._engine.init_weight_transfer_engine(request), timeout_s)

    def get_world_size(self) -> int | None:
        """Return how many ranks the engine has, its replicas' included."""
        parallel = getattr(self._engine.vllm_config, "parallel_config", None)
        size = getattr(parallel, "world_size_across_dp", None)
        return size if isinstance(size, int) else None

    def _wait(self, call: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> None:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        future.result(timeout_s or self.timeout_s)
