"""TRL's client of a vLLM server, with its weight updates by wtransfer."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import trl
from packaging.specifiers import SpecifierSet
from wtransfer.errors import WTransferError

from wtransfer_trl.policy_sync import PolicySync, check_on_error

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    import torch

    from wtransfer_trl.policy_sync import Announced, OnError

TRL_RANGE = ">=1.16,<1.17"


def install(
    engine: str = "shm",
    *,
    options: Mapping[str, Any] | None = None,
    on_error: OnError = "raise",
    return_s: float = 120.0,
    **publisher: Any,
) -> None:
    """Have every ``VLLMClient`` of TRL in this process publish by wtransfer.

    For trainers with ``vllm_mode="server"``, before they are made. A second call replaces the
    arguments of the first, for clients that connect from then on.

    Args:
        engine: Name of the engine: ``backend`` of the server's ``--weight-transfer-config``.
        options: Options of the engine.
        on_error: ``"raise"``: a failed update raises in the trainer's thread. ``"keep"``: it is
            logged and counted (`Metrics`), and training goes on with the policy that is served.
        return_s: Longest wait of an update for a server that was restarted, in seconds.
        **publisher: Further arguments of `wtransfer.Publisher`: ``token``, ``deadline_s``...

    Raises:
        ValueError: `on_error` is neither.
        ImportError: TRL is of another version than those whose client is known.
    """
    check_on_error(on_error)
    if not SpecifierSet(TRL_RANGE).contains(trl.__version__, prereleases=True):
        raise ImportError(
            f"wtransfer-trl replaces methods of TRL {TRL_RANGE}, and this is TRL "
            f'{trl.__version__}: pip install "trl{TRL_RANGE}"'
        )
    from trl.generation.vllm_client import VLLMClient

    methods = _methods(
        engine=engine,
        options=dict(options or {}),
        on_error=on_error,
        return_s=return_s,
        **publisher,
    )
    for name, method in methods.items():
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
