"""Reach vLLM engines of this process, for ``Publisher(hosts=[...])``.

A server needs none of these: its URL will do. Ray actors are reached by vLLM's own
``RayVLLMWeightSyncClient``, which has the same methods.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Coroutine

TIMEOUT_S = 30.0


class LLMClient:
    """Reaches an ``LLM``.

    An ``LLM`` is for one thread at a time. The publisher calls this from threads of its own, so
    publish between two calls of ``generate``, and wait for the report.

    Args:
        llm: vLLM's ``LLM``.
    """

    is_local = True
    timeout_s = TIMEOUT_S

    def __init__(self, llm: Any) -> None:
        self.name = f"LLM {id(llm):#x}"
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every worker join a publisher."""
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin."""
        self._llm.start_weight_update()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do nothing: tensors travel beside vLLM."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit what the publisher has ordered."""
        self._llm.finish_weight_update(weight_version)

    def leave(self, address: str, *, timeout_s: float | None = None) -> None:  # noqa: ARG002
        """Let every worker leave its publishers."""
        self._llm.shutdown_weight_transfer_engine()


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
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        request = WeightTransferInitRequest(init_info=init_info)
        self._wait(self._engine.init_weight_transfer_engine(request))

    def start_weight_update(self) -> None:
        """Begin."""
        self._wait(self._engine.start_weight_update())

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do nothing: tensors travel beside vLLM."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit what the publisher has ordered."""
        self._wait(self._engine.finish_weight_update(weight_version))

    def leave(self, address: str, *, timeout_s: float | None = None) -> None:  # noqa: ARG002
        """Let every worker leave its publishers."""
        self._wait(self._engine.shutdown_weight_transfer_engine(), timeout_s)

    def _wait(self, call: Coroutine[Any, Any, Any], timeout_s: float | None = None) -> None:
        future = asyncio.run_coroutine_threadsafe(call, self._loop)
        future.result(timeout_s or self.timeout_s)
