"""TRL's client of a vLLM server, with its weight updates by wtransfer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from trl.generation.vllm_client import VLLMClient
from wtransfer.errors import WTransferError

from wtransfer_trl.policy_sync import PolicySync

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from wtransfer_trl.policy_sync import Announced


def replace(**arguments: Any) -> None:
    """Replace the methods by which TRL's ``VLLMClient`` updates weights.

    Args:
        **arguments: Of a client's `PolicySync`.
    """
    for name, method in _methods(**arguments).items():
        setattr(VLLMClient, name, method)


def _methods(engine: str, **arguments: Any) -> dict[str, Any]:
    """Return the methods that are replaced; a client's `PolicySync` is its `communicator`."""

    def init_communicator(self: Any, device: object = 0) -> None:  # noqa: ARG001  # TRL's name
        if not (self.get_server_info()["weight_transfer_config"] or {}).get("backend"):
            raise WTransferError(
                f"the vLLM server at {self.base_url} has no weight-transfer engine; start it with "
                f"""--weight-transfer-config '{{"backend": "{engine}"}}'"""
            )
        self.close_communicator()
        self.communicator = PolicySync(self.base_url, engine=engine, **arguments)

    def update_named_params(
        self: Any,
        metadata: Iterable[Announced],
        named_params: Iterable[tuple[str, torch.Tensor]],
    ) -> None:
        sync = _sync_of(self)
        if not sync.add(named_params):
            sync.update(metadata, named_params)

    def update_named_param(self: Any, name: str, weights: torch.Tensor) -> None:
        if not _sync_of(self).add([(name, weights)]):
            raise RuntimeError(
                "one tensor is no update: call update_named_param within "
                "`with client.weight_update():`, which publishes the whole set at its end"
            )

    @contextlib.contextmanager
    def weight_update(self: Any) -> Iterator[None]:
        with _sync_of(self).collect():
            yield

    def reset_prefix_cache(self: Any) -> None:
        """Do nothing: a commit has emptied the cache, and a refused update leaves it valid."""

    def close_communicator(self: Any) -> None:
        sync, self.communicator = self.communicator, None
        if sync is not None:
            sync.close()

    return {
        each.__name__: each
        for each in (
            init_communicator,
            update_named_params,
            update_named_param,
            weight_update,
            reset_prefix_cache,
            close_communicator,
        )
    }


def _sync_of(client: Any) -> PolicySync:
    sync: PolicySync | None = client.communicator
    if sync is None:
        raise RuntimeError("this client is not connected; call its init_communicator() first")
    return sync
