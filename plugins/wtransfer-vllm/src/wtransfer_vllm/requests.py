"""The calls of vLLM's engines for updates, as far as they differ from one time to another."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class InitRequest:
    """Arrives in another process as vLLM's ``WeightTransferInitRequest``.

    The process that sends it needs no vLLM: what is pickled is a call of `init_request`.
    """

    init_info: dict[str, Any] = field(repr=False)
    """What the workers are told; the publisher's token may be in it."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[dict[str, Any]]]:
        """Become vLLM's where it is read."""
        return init_request, (self.init_info,)


@dataclass(frozen=True)
class UpdateRequest:
    """Arrives in another process as vLLM's ``WeightTransferUpdateRequest``."""

    update_info: dict[str, Any]
    """What the workers are told."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[dict[str, Any]]]:
        """Become vLLM's where it is read."""
        return update_request, (self.update_info,)


def init_request(init_info: dict[str, Any]) -> Any:
    """Return vLLM's request to initialise."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    return WeightTransferInitRequest(init_info=init_info)


def update_request(update_info: dict[str, Any]) -> Any:
    """Return vLLM's request to update."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    return WeightTransferUpdateRequest(update_info=update_info)


def is_of_the_seed_era(engine: Any) -> bool:
    """Whether an engine, or a handle of one, updates by a single call, without start and finish."""
    return not hasattr(engine, "finish_weight_update")
