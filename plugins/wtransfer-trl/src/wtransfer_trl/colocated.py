"""TRL's generation by a vLLM in the trainer's process, with its weight updates by wtransfer."""

from __future__ import annotations

import functools
import inspect
import os
from typing import Any

from trl.generation import vllm_generation


def replace(**arguments: Any) -> None:
    """Replace the engine that TRL makes, and its update.

    Args:
        **arguments: Of the engine's `PolicySync`.
    """
    vllm_generation.LLM = functools.partial(_llm, arguments)
    vllm_generation.VLLMGeneration.sync_weights = _sync_weights


def _llm(sync: dict[str, Any], **arguments: Any) -> Any:
    # TRL has set it for vLLM. Each process would take or refuse an update by itself.
    if int(os.environ["WORLD_SIZE"]) > 1:
        raise NotImplementedError(
            'vllm_mode="colocate" by wtransfer is for one process: of several, each would take or '
            'refuse an update by itself; use vllm_mode="server"'
        )
    # With vLLM and wtransfer-vllm, which a trainer with a server need not have.
    from wtransfer_trl.policy_llm import PolicyLLM

    return PolicyLLM(sync, **arguments)


_of_trl = inspect.unwrap(vllm_generation.VLLMGeneration.sync_weights)


@functools.wraps(_of_trl)
def _sync_weights(self: Any) -> None:
    if self.mode != "colocate":
        _of_trl(self)
        return
    if self.enable_sleep_mode:
        vllm_generation.empty_cache()
        # The weights alone: the update needs their memory, and KV cache may not fit beside it.
        self.llm.wake_up(tags=["weights"])
        self._llm_weights_sleeping = False
    if self._weight_metadata is None:
        self._weight_metadata = [
            (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
            for name, tensor in self._iter_named_params()
        ]
    self.llm.update(self._weight_metadata, self._iter_named_params())
