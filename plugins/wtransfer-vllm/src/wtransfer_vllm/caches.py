"""What was computed with old weights is forgotten."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it


def forget_kv(core: Any) -> None:
    """Drop every cached block and encoder output; running requests are computed anew.

    Called in the engine core between two steps. If vLLM cannot let go of all blocks (requests that
    wait for remote KV hold some), nothing more is served from the prefix cache until it can.

    Args:
        core: vLLM's ``EngineCore``.
    """
    forgotten = _forget_blocks(core)
    manager = getattr(core.scheduler, "kv_cache_manager", None)
    if manager is not None:
        _keep_from_serving(manager, keep=not forgotten)
    if getattr(core.vllm_config.model_config, "is_multimodal_model", True):
        core.reset_encoder_cache()


def _forget_blocks(core: Any) -> bool:
    # The seed era calls it a failure to reset a connector where there is none.
    has_connector = getattr(core.scheduler, "connector", True) is not None
    try:
        # With the running requests: theirs would be served to others once they are full.
        if core.reset_prefix_cache(True, has_connector) is not False:  # vLLM's order
            return True
    except RuntimeError as error:
        logger.error("vLLM could not forget its KV cache: %s", error)  # noqa: TRY400
    logger.error("the prefix cache may be stale; it is not read until the next commit")
    return False


def _keep_from_serving(manager: Any, *, keep: bool) -> None:
    if keep and manager.enable_caching:
        manager.enable_caching = False
        manager.wtransfer_stale = True
    elif not keep and getattr(manager, "wtransfer_stale", False):
        manager.enable_caching = True
        manager.wtransfer_stale = False
