"""Name KV cache by the checkpoint that vLLM has loaded, until a publisher sends other weights."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from wtransfer.errors import SourceError
from wtransfer.weight_sync.worker import vouching
from wtransfer.weight_version import process_weights

from wtransfer_vllm.checkpoint import checkpoint_folder
from wtransfer_vllm.messages import member_of

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it


def vouch_for_checkpoint(vllm_config: Any) -> None:
    """Name this worker's KV cache by the checkpoint that its model was loaded from. Never raises.

    A model of another load format than safetensors, or with a draft model that has files of its
    own, has a name that only this process knows. Otherwise as
    `wtransfer.weight_sync.worker.vouching.vouch_for_checkpoint`.

    Args:
        vllm_config: vLLM's own; its ``model_config`` stands for the model.
    """

    def find() -> Path:
        speculative = getattr(vllm_config, "speculative_config", None)
        draft = getattr(speculative, "draft_model_config", None)
        if draft is not None and draft.model != vllm_config.model_config.model:
            # Its layers have KV cache as well.
            raise SourceError(f"the draft model {draft.model!r} has weights of its own")
        return checkpoint_folder(vllm_config)

    vouching.vouch_for_checkpoint(vllm_config.model_config, find, logger)


def weights_were_replaced(worker: Any, why: str) -> None:
    """Give this worker's KV cache a new name that only its process knows; runs in each worker.

    For weights that another weight backend or ``reload_weights`` has brought. Publishers are
    notified where a session has one. Called by the engine core between two steps.

    Args:
        worker: vLLM's own.
        why: Cause of the replacement, for people.
    """
    member = member_of(worker)
    if member is not None:
        member.lose_weights(why)
    process_weights.weights_replaced(worker.vllm_config.model_config)
