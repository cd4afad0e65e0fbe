"""The ``LLM`` of a trainer's process, which that trainer updates by wtransfer."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from vllm import LLM
from wtransfer.errors import WTransferError
from wtransfer.weight_version import EMPTY_LABEL
from wtransfer_vllm.clients import LLMClient
from wtransfer_vllm.engine_core import outcome_of
from wtransfer_vllm.names import vllm_names
from wtransfer_vllm.plugin import register_engines

from wtransfer_trl.policy_sync import DEADLINE_S, PolicySync

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import torch

    from wtransfer_trl.policy_sync import Announced

logger = logging.getLogger(__name__)

LOOK_S = 0.05


class PolicyLLM(LLM):
    """An ``LLM`` of the trainer's process, which generates from whole policies only.

    It is used by one thread, the trainer's.

    Args:
        sync: Arguments of `PolicySync`.
        **arguments: vLLM's.

    Raises:
        WTransferError: The engine takes no updates.
    """

    def __init__(self, sync: dict[str, Any], **arguments: Any) -> None:
        register_engines()
        backend = vllm_names("engines").get(sync["engine"], sync["engine"])
        super().__init__(**arguments, weight_transfer_config={"backend": backend})
        self._client = TurnClient(self)
        self._deadline_s = sync.get("deadline_s", DEADLINE_S)
        # Awake: vLLM's reload is proven with the weights that it serves.
        with self._client.opened():
            self._sync = PolicySync(self._client, held=self._label, **sync)

    def update(
        self, metadata: Iterable[Announced], tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> None:
        """Publish one whole set, as `PolicySync.update`, while the weights have memory."""
        self._catch_up()
        with self._client.opened():
            self._sync.update(metadata, tensors)

    def _catch_up(self) -> None:
        """Commit what came between updates; wait for what was lost in sleep.

        It is what a failed update goes back to, and no worker takes an update while one waits.
        """
        end = time.monotonic() + self._deadline_s
        while True:
            if any(worker["pending"] for worker in self.collective_rpc(outcome_of)):
                try:
                    self.start_weight_update()
                    self.finish_weight_update()
                except RuntimeError as error:
                    logger.warning("a policy that waited was not loaded: %s", error)
            is_lost = self._label() == EMPTY_LABEL and self._sync.version is not None
            if not is_lost:
                return
            if time.monotonic() > end:
                logger.warning(
                    "%s, lost in sleep, did not come back in %g s: the update that follows has no "
                    "policy to go back to",
                    self._sync.version,
                    self._deadline_s,
                )
                return
            with self._client.opened():
                time.sleep(LOOK_S)

    def _label(self) -> str:
        with self._client.lock:
            return str(self.get_weight_version())

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, as vLLM does.

        Raises:
            WTransferError: The weights belong to no policy.
        """
        if self._label() == EMPTY_LABEL:
            raise WTransferError(
                "vLLM generates nothing: its weights belong to no policy since it slept, or since "
                "an update could not be undone, and no update has succeeded after that"
            )
        return super().generate(*args, **kwargs)

    def close(self) -> None:
        """Leave the publisher, whose threads keep this engine in memory till then."""
        with self._client.opened():
            self._sync.close()


class TurnClient(LLMClient):
    """Reaches an ``LLM`` while the trainer's thread waits for an update, and at no other time.

    A publisher brings an engine up to date on threads of its own, whenever that is behind. Here it
    would load weights beside the trainer's backward pass, or beside a generation. So its calls are
    refused then, and the set that they were to commit stays with the worker: the next update, or
    `wake_up`, commits it. No two threads use the engine: the trainer's does while this is closed,
    and closing waits for a call under way, by the lock that each call holds.

    While this is open, each version is committed once at most: where a commit has failed, the
    publisher sends that version again at once, and the trainer would be told of the one before.

    Args:
        llm: vLLM's ``LLM``.
    """

    def __init__(self, llm: LLM) -> None:
        super().__init__(llm)
        self._is_open = False
        self._tried: set[str | None] = set()

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Let the publisher use the engine within the block, and the caller not."""
        self._is_open = True
        try:
            yield
        finally:
            with self.lock:
                self._is_open = False
                self._tried.clear()

    def call(self, method: str, *arguments: Any, timeout_s: float | None = None) -> Any:
        """Call a method, unless the trainer's thread has the engine.

        Raises:
            WTransferError: It has.
        """
        with self.lock:
            if not self._is_open:
                raise WTransferError(f"{method}: the engine is the trainer's between its updates")
            return super().call(method, *arguments, timeout_s=timeout_s)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Commit the update that the publisher has ordered.

        Raises:
            WTransferError: Its commit has failed, and it waits for the next update.
        """
        with self.lock:
            if weight_version in self._tried:
                raise WTransferError(f"{weight_version} has come, and waits for the next update")
            self._tried.add(weight_version)
            super().finish_weight_update(weight_version)
