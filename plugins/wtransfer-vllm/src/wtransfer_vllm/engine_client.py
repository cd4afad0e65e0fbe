"""What all ways to reach a vLLM engine have in common: which calls make a round's steps.

Engines of the seed era have one call for an update, ``update_weights``; it is made where an update
is to be committed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from wtransfer_vllm.invitation import taken_back
from wtransfer_vllm.requests import init_request, is_of_the_seed_era, update_request

TIMEOUT_S = 30.0


class EngineClient(ABC):
    """Reaches an engine whose methods are those of an ``LLM`` or an ``AsyncLLM``.

    Args:
        engine: The engine, or a handle of it.
        name: What errors and reports call it.
        timeout_s: Longest wait for an answer, in seconds.
    """

    def __init__(self, engine: Any, name: str, timeout_s: float = TIMEOUT_S) -> None:
        self.name = name
        self.timeout_s = timeout_s
        self._engine = engine

    @abstractmethod
    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the engine, and wait for the answer.

        Args:
            method: Its name.
            *arguments: Its arguments.
            timeout_s: Longest wait, in seconds; None: the client's.
        """

    def init_request(self, init_info: dict[str, Any]) -> Any:
        """Return what the engine takes to initialise: vLLM's, for an engine of this process."""
        return init_request(init_info)

    def update_request(self, update_info: dict[str, Any]) -> Any:
        """Return what the engine takes for an update."""
        return update_request(update_info)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every worker join a publisher."""
        self.call("init_weight_transfer_engine", self.init_request(init_info))

    def start_weight_update(self) -> None:
        """Begin; an engine of the seed era has nothing to begin."""
        if not is_of_the_seed_era(self._engine):
            self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:  # noqa: B027  # it is all
        """Do nothing: tensors travel beside vLLM."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit what the publisher has ordered."""
        if is_of_the_seed_era(self._engine):
            self.call("update_weights", self.update_request({}))
        else:
            self.call("finish_weight_update", weight_version)

    def leave(self, address: str, *, timeout_s: float | None = None) -> None:
        """Let every worker leave one publisher."""
        request = self.init_request(taken_back(address))
        self.call("init_weight_transfer_engine", request, timeout_s=timeout_s)
