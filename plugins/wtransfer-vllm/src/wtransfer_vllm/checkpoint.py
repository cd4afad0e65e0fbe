"""The checkpoint that vLLM started from, by vLLM's own configuration."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from wtransfer.checkpoint.served import ServedCheckpoint, find_folder
from wtransfer.errors import SourceError

if TYPE_CHECKING:
    from pathlib import Path

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it

LOAD_FORMATS = frozenset(
    {"auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer"}
)
"""Load formats with which the model consists of the contents of the safetensors files."""


def find_checkpoint(vllm_config: Any, *, tied: bool = False) -> ServedCheckpoint | None:
    """Return the checkpoint that a model was loaded from, if it is on this machine's disk.

    Args:
        vllm_config: vLLM's own.
        tied: True if the model's embeddings and its head are one tensor.
    """
    try:
        return ServedCheckpoint(checkpoint_folder(vllm_config), tied=tied)
    except SourceError as error:
        logger.info("no checkpoint to go back to: %s", error)
        return None


def checkpoint_folder(vllm_config: Any) -> Path:
    """Return the folder that a model was loaded from.

    Args:
        vllm_config: vLLM's own.

    Raises:
        SourceError: The model was not loaded from safetensors files, or they are not on this
            machine's disk.
    """
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    return find_folder(
        str(model_config.model),
        load_config.load_format,
        LOAD_FORMATS,
        revision=getattr(model_config, "revision", None),
        cache_dir=getattr(load_config, "download_dir", None),
    )
