"""What was computed with old weights is forgotten."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it


def forget_kv(core: Any) -> None:
    """Drop every cached block and encoder output; running requests are computed anew.

    Called in the engine core between two steps. If vLLM cannot let go of all blocks (requests that
    wait for remote KV hold some), nothing more is served from the prefix cache until it can. A
    connector that does not say that it has forgotten is not asked for KV until it does.

    Args:
        core: vLLM's ``EngineCore``.
    """
    connector = getattr(core.scheduler, "connector", None)
    if connector is not None:
        _answer_nothing(connector, stale=not _forget_stored(connector))
    forgotten = _forget_blocks(core)
    manager = getattr(core.scheduler, "kv_cache_manager", None)
    if manager is not None:
        _keep_from_serving(manager, keep=not forgotten)
    if getattr(core.vllm_config.model_config, "is_multimodal_model", True):
        core.reset_encoder_cache()


def _forget_blocks(core: Any) -> bool:
    try:
        # With the running requests: theirs would be served to others once they are full. Without
        # the connector, whose silence vLLM takes for consent, and which not every engine has.
        if core.reset_prefix_cache(True, False) is not False:  # vLLM's order
            return True
    except Exception as error:
        logger.error("vLLM could not forget its KV cache: %s", error)  # noqa: TRY400
    logger.error("the prefix cache may be stale; it is not read until the next commit")
    return False


def _forget_stored(connector: Any) -> bool:
    """Whether a connector says that what it has stored is gone; most of vLLM's say nothing."""
    try:
        return connector.reset_cache() is True
    except Exception as error:
        logger.error("the KV connector could not forget: %s", error)  # noqa: TRY400
        return False


def _answer_nothing(connector: Any, *, stale: bool) -> None:
    """Let a connector find nothing for any request, or take that back."""
    name = "get_num_new_matched_tokens"
    if stale:
        logger.warning(
            "%s does not say that it has forgotten what it stored; it is not asked for KV until it "
            "does",
            type(connector).__name__,
        )
        setattr(connector, name, lambda *_args, **_kwargs: (0, False))
    else:
        vars(connector).pop(name, None)


def _keep_from_serving(manager: Any, *, keep: bool) -> None:
    if keep and manager.enable_caching:
        manager.enable_caching = False
        manager.wtransfer_stale = True
    elif not keep and getattr(manager, "wtransfer_stale", False):
        manager.enable_caching = True
        manager.wtransfer_stale = False
