"""Reach a vLLM engine that is a Ray actor, for ``Publisher(hosts=[...])``.

Ray carries the calls that time an update; tensors travel beside it, as they do everywhere. Ray
pickles its messages, among the members of its own cluster; wtransfer reads none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from wtransfer.errors import PeerLostError, PluginError, RemoteError, StallError

from wtransfer_vllm.clients import TIMEOUT_S, EngineClient

if TYPE_CHECKING:
    from collections.abc import Callable


class RayClient(EngineClient):
    """Reaches an actor whose methods are those of an ``LLM`` or an ``AsyncLLM``.

    ``ray.remote(LLM).remote(model, weight_transfer_config=...)`` is such an actor, and so is a
    class of your own that passes the calls on. The actor needs this package, as every process of
    vLLM does; the process of the publisher needs no vLLM.

    An actor runs one call after the other unless configured otherwise, so an ``LLM`` that
    generates lets an update wait until it is done: publish between two calls of ``generate``.

    Args:
        actor: Ray's handle.
        name: Name of the engine in errors and reports. Default: Ray's own name of the actor.
        timeout_s: Longest wait for an answer, in seconds; the start of an actor that is still
            loading its model counts.
    """

    def __init__(
        self, actor: Any, *, name: str | None = None, timeout_s: float = TIMEOUT_S
    ) -> None:
        super().__init__(actor, name or f"Ray {actor!r}", timeout_s)
        self._is_local: bool | None = None

    @property
    def is_local(self) -> bool:
        """True if the actor is on this node of the cluster; asks the actor, which may block.

        Raises:
            WTransferError: As `call`.
        """
        if self._is_local is None:
            self._is_local = self.call("__ray_call__", _node_of) == _node_of()
        return self._is_local

    def request(self, make: Callable[[dict[str, Any]], Any], info: dict[str, Any]) -> Any:
        """Return an object that becomes vLLM's request in the actor's process."""
        return RemoteRequest(make, info)

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method of the actor.

        Raises:
            RemoteError: The actor raised; type and text are kept.
            PeerLostError: The actor is dead, or its node is.
            StallError: The actor did not answer in time.
        """
        ray = _ray()
        limit = timeout_s or self.timeout_s
        try:
            return ray.get(getattr(self._engine, method).remote(*arguments), timeout=limit)
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


@dataclass(frozen=True)
class RemoteRequest:
    """Pickles as the call that makes vLLM's request, so that its sender needs no vLLM."""

    make: Callable[[dict[str, Any]], Any]
    """`init_request` or `update_request`."""
    info: dict[str, Any] = field(repr=False)
    """The info for the workers; the publisher's token may be in it."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[dict[str, Any]]]:
        """Become vLLM's request on unpickling."""
        return self.make, (self.info,)


def _node_of(actor: Any = None) -> str:  # noqa: ARG001  # Ray passes the actor in which this runs
    node: str = _ray().get_runtime_context().get_node_id()
    return node


def _ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise PluginError("RayClient needs Ray: pip install ray", plugin="RayClient") from error
    return ray
