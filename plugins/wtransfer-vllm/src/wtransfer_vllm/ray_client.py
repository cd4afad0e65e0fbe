"""Reach a vLLM engine that is a Ray actor, for ``Publisher(hosts=[...])``.

Ray carries the calls that say when; tensors travel beside it, as they do everywhere. Ray pickles
what it carries, among the members of its own cluster; none of that is read by wtransfer.
"""

from __future__ import annotations

from typing import Any

from wtransfer.errors import PeerLostError, PluginError, RemoteError, StallError

from wtransfer_vllm.invitation import taken_back
from wtransfer_vllm.requests import InitRequest, UpdateRequest, is_of_the_seed_era

TIMEOUT_S = 30.0


class RayClient:
    """Reaches an actor whose methods are those of an ``LLM`` or an ``AsyncLLM``.

    ``ray.remote(LLM).remote(model, weight_transfer_config=...)`` is one, and so is a class of your
    own that passes the calls on. The actor needs this package, as every process of vLLM does; the
    process of the publisher needs no vLLM.

    An actor does one call after the other unless it is told otherwise, so an ``LLM`` that
    generates lets an update wait until it is done: publish between two calls of ``generate``.

    Args:
        actor: Ray's handle.
        name: What errors and reports call it. Default: Ray's own name of it.
        timeout_s: Longest wait for an answer, in seconds; the start of an actor that is still
            loading its model counts.
    """

    def __init__(
        self, actor: Any, *, name: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        self.name = name or f"Ray {actor!r}"
        self.timeout_s = timeout_s
        self._actor = actor
        self._is_local: bool | None = None

    @property
    def is_local(self) -> bool:
        """Whether the actor is on this node of the cluster; asks it, which may block.

        Raises:
            WTransferError: As the calls below.
        """
        if self._is_local is None:
            self._is_local = self._call("__ray_call__", _node_of) == _node_of()
        return self._is_local

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Let every worker join a publisher.

        Raises:
            RemoteError: The actor raised; type and text are kept.
            PeerLostError: It is dead, or its node is.
            StallError: It did not answer in time.
        """
        self._call("init_weight_transfer_engine", InitRequest(init_info))

    def start_weight_update(self) -> None:
        """Begin; an engine of the seed era has nothing to begin."""
        if not is_of_the_seed_era(self._actor):
            self._call("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Do nothing: tensors travel beside vLLM."""

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit what the publisher has ordered."""
        if is_of_the_seed_era(self._actor):
            self._call("update_weights", UpdateRequest({}))
        else:
            self._call("finish_weight_update", weight_version)

    def leave(self, address: str, *, timeout_s: float | None = None) -> None:
        """Let every worker leave one publisher."""
        request = InitRequest(taken_back(address))
        self._call("init_weight_transfer_engine", request, timeout_s=timeout_s)

    def _call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        ray = _ray()
        limit = timeout_s or self.timeout_s
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments), timeout=limit)
        except ray.exceptions.GetTimeoutError as error:
            text = (
                f"{self.name} did not answer {method} within {limit:g} s; it is busy (with "
                "generate?), still starting, or stuck"
            )
            raise StallError(text, seconds=limit, worker=self.name) from error
        except ray.exceptions.RayTaskError as error:
            text = f"{self.name}: {type(error.cause).__name__}: {error.cause}"
            raise RemoteError(text, worker=self.name) from error
        except ray.exceptions.RayError as error:
            text = f"{self.name} is gone: {type(error).__name__}: {error}"
            raise PeerLostError(text, worker=self.name) from error


def _node_of(actor: Any = None) -> str:  # noqa: ARG001  # Ray passes the actor in which this runs
    node: str = _ray().get_runtime_context().get_node_id()
    return node


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise PluginError("RayClient needs Ray: pip install ray", plugin="RayClient") from error
    return ray
