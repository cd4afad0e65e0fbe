"""Reach vLLM engines of this process, for ``Publisher(hosts=[...])``.

A server needs none of these: its URL will do. For Ray actors see `wtransfer_vllm.ray_client`.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from wtransfer_vllm.engine_client import TIMEOUT_S, EngineClient


class LLMClient(EngineClient):
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

    def __init__(self, llm: Any) -> None:
        super().__init__(llm, f"LLM {id(llm):#x}")
        self.lock = threading.RLock()
        """Held while the publisher uses the ``LLM``."""

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:  # noqa: ARG002
        """Call a method once nobody else does, however long that takes."""
        with self.lock:
            return getattr(self._engine, method)(*arguments)


class AsyncLLMClient(EngineClient):
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
        super().__init__(engine, f"AsyncLLM {id(engine):#x}", timeout_s)
        self._loop = loop

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method in the event loop."""
        answer = getattr(self._engine, method)(*arguments)
        future = asyncio.run_coroutine_threadsafe(answer, self._loop)
        return future.result(timeout_s or self.timeout_s)

    def get_world_size(self) -> int | None:
        """Return how many ranks the engine has, its replicas' included."""
        parallel = getattr(self._engine.vllm_config, "parallel_config", None)
        size = getattr(parallel, "world_size_across_dp", None)
        return size if isinstance(size, int) else None
