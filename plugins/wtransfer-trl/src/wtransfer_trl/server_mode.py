"""TRL's generation by a vLLM server, with its weight updates by wtransfer."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import warnings
from typing import TYPE_CHECKING, Any

from accelerate.utils import broadcast_object_list
from trl.generation.vllm_client import VLLMClient
from trl.generation.vllm_generation import VLLMGeneration
from wtransfer.errors import WTransferError

from wtransfer_trl.policy_form import form_of
from wtransfer_trl.policy_sync import PolicySync

with warnings.catch_warnings():
    # TRL warns whoever imports from there, and this is not the user.
    warnings.simplefilter("ignore")
    from trl.experimental.online_dpo import OnlineDPOTrainer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from wtransfer_trl.policy_sync import Announced


logger = logging.getLogger(__name__)

_post = inspect.unwrap(VLLMClient._post)  # noqa: SLF001  # TRL's, of the one series that is allowed
_generate = inspect.unwrap(VLLMGeneration.generate)
_generate_vllm_server = inspect.unwrap(OnlineDPOTrainer._generate_vllm_server)  # noqa: SLF001
_move_model_to_vllm = inspect.unwrap(OnlineDPOTrainer._move_model_to_vllm)  # noqa: SLF001


def replace(**arguments: Any) -> None:
    """Replace the methods by which TRL updates a server's weights and generates from them.

    Args:
        **arguments: Of a client's `PolicySync`.
    """
    for name, method in _methods(**arguments).items():
        setattr(VLLMClient, name, method)
    VLLMGeneration.generate = _checked_generate
    OnlineDPOTrainer._generate_vllm_server = _checked_generate_vllm_server  # noqa: SLF001
    OnlineDPOTrainer._move_model_to_vllm = _move_formed_model_to_vllm  # noqa: SLF001


@functools.wraps(_generate)
def _checked_generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    generate = functools.partial(_generate, self, *args, **kwargs)
    if self.mode != "server":
        return generate()
    return _from_published(self, generate, self.sync_weights)


@functools.wraps(_generate_vllm_server)
def _checked_generate_vllm_server(self: Any, *args: Any, **kwargs: Any) -> Any:
    generate = functools.partial(_generate_vllm_server, self, *args, **kwargs)
    return _from_published(self, generate, self._move_model_to_vllm)


@functools.wraps(_move_model_to_vllm)
def _move_formed_model_to_vllm(self: Any) -> None:
    if self.vllm_mode == "server" and self.accelerator.is_main_process:
        # Here the model is known, and where its tensors are sent it is not.
        sync = _sync_of(self.vllm_client)
        sync.form = sync.form or form_of(self.model)
    _move_model_to_vllm(self)


def _from_published(trainer: Any, generate: Callable[[], Any], sync: Callable[[], None]) -> Any:
    """Generate from the last published set; where the server held another, once more.

    Every rank of the trainer calls it: `sync` gathers the weights from all of them.

    Raises:
        WTransferError: The server did not generate from that set the second time either.
    """

    def agreed(look: Callable[[PolicySync], str | None]) -> str | None:
        """Return what the main process finds, on every rank."""
        found: list[str | None] = [None]
        if trainer.accelerator.is_main_process:
            # None, or TRL's own: a client that was closed, or made before `install`.
            policy_sync = trainer.vllm_client.communicator
            if isinstance(policy_sync, PolicySync) and (mismatch := look(policy_sync)):
                logger.warning("the vLLM server %s", mismatch)
                found = [mismatch]
        broadcast_object_list(found, from_process=0)
        return found[0]

    def attempt() -> tuple[Any, str | None]:
        mismatch = agreed(PolicySync.begin_generation)
        answer = None if mismatch else generate()
        return answer, mismatch or agreed(PolicySync.end_generation)

    answer, mismatch = attempt()
    if mismatch is not None:
        sync()
        answer, mismatch = attempt()
    if mismatch is not None:
        raise WTransferError(
            f"the vLLM server {mismatch}, also after the policy was published again; its answer is "
            "not used. Look at the server's log: it may be restarted again and again"
        )
    return answer


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

    @functools.wraps(_post)
    def post(self: Any, url: str, **kwargs: Any) -> Any:
        answer = _post(self, url, **kwargs)
        if isinstance(self.communicator, PolicySync):
            self.communicator.took(answer)
        return answer

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
            post,
            reset_prefix_cache,
            close_communicator,
        )
    }


def _sync_of(client: Any) -> PolicySync:
    sync: PolicySync | None = client.communicator
    if sync is None:
        raise RuntimeError("this client is not connected; call its init_communicator() first")
    return sync
