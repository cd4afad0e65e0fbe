"""Requests that run at a commit: computed anew, or kept with the KV that they have.

KV of a kept request is mixed from the commit on: of the weights before, or computed over such. So
is all that the request computes afterwards, until vLLM preempts it and computes it anew.

*   No mixed block has a hash in vLLM's prefix cache. Every block loses its hash at the commit, and
    the block pool gives none to the blocks of a marked request.
*   No mixed block is stored by a connector of wtransfer: a request that lived through a commit is
    stale (`wtransfer.kv.fence`), and stores that were planned before are of whole blocks, which the
    request does not write any more.
*   The mark is the number of the request's preemptions at the commit. vLLM counts one wherever it
    takes a running request's blocks away, so the mark ends with the blocks.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from wtransfer_vllm.names import has_our_connector

if TYPE_CHECKING:
    from collections.abc import Callable

VARIABLE = "WTRANSFER_VLLM_IN_FLIGHT"
"""Environment variable of vLLM's processes: treatment of requests that run at a commit.
``recompute``, the default: their KV is computed anew. ``keep``: they go on with what they have."""
MARK = "wtransfer_num_preemptions"
"""Attribute of vLLM's request: its preemptions when its KV became mixed."""
HASHING = ("cache_full_blocks", "cache_partial_block")
"""Methods of vLLM's block pool that give a hash to blocks of a request, its first argument."""
TAG = "_attach_weight_version"
"""The engine core's method that tags the outputs of one batch, oldest first; vLLM 0.32."""


def keeps_in_flight(core: Any) -> bool:
    """Return whether requests that run at a commit keep their KV.

    Args:
        core: vLLM's ``EngineCore``, with its scheduler.

    Raises:
        ValueError: The variable has a word that is not known, or this vLLM cannot keep them; the
            text says what to set instead.
    """
    choice = os.environ.get(VARIABLE) or "recompute"
    if choice not in ("recompute", "keep"):
        raise ValueError(f"{VARIABLE} is {choice!r}, expected 'recompute' or 'keep'")
    if choice == "keep" and (why := _cannot_keep(core)):
        raise ValueError(f"{VARIABLE} is 'keep', but {why}; or set it to 'recompute'")
    return choice == "keep"


def _cannot_keep(core: Any) -> str | None:
    if not hasattr(core, TAG):
        return (
            "this vLLM does not say which weights computed a token, and so not which tokens rest "
            "on older KV: use vLLM 0.32"
        )
    if _has_rust_front_end():
        return (
            "vLLM's Rust front end gives an answer the text of a whole batch, which names the "
            "requests on older KV: start vLLM without VLLM_USE_RUST_FRONTEND"
        )
    if is_pooling(core):
        return (
            "this vLLM embeds or classifies, and an answer would have rows of two sets of weights"
        )
    transfer = getattr(core.vllm_config, "kv_transfer_config", None)
    if transfer is not None and not has_our_connector(core):
        return (
            f"the KV connector {transfer.kv_connector!r} is not one of wtransfer's and would save "
            "KV of two sets of weights: use wtransfer-OffloadingConnector, "
            "SharedStorageConnector or no connector"
        )
    manager = core.scheduler.kv_cache_manager
    managers = manager.coordinator.single_type_managers
    if any(each.block_pool is not manager.block_pool for each in managers):
        return (
            "this model keeps KV in a second pool of blocks (HiSparse), which gets its hashes "
            "after a request has ended: start vLLM without it"
        )
    return None


def is_pooling(core: Any) -> bool:
    """Return whether an engine core's requests are embedded or classified, and no tokens made."""
    model_config = getattr(core.vllm_config, "model_config", None)
    return getattr(model_config, "runner_type", None) == "pooling"


def _has_rust_front_end() -> bool:
    """Return whether answers pass by a front end in which no plug-in is loaded."""
    envs: Any = sys.modules.get("vllm.envs")  # vLLM's own reading of its environment
    try:
        return bool(envs.VLLM_USE_RUST_FRONTEND)
    except AttributeError:  # a release without it
        return False


def is_mixed(request: Any) -> bool:
    """Return whether a request goes on with KV of before a commit."""
    return bool(vars(request).get(MARK) == request.num_preemptions)


def mark_running(scheduler: Any) -> None:
    """Mark the requests that go on with their KV, whose blocks get no hash from here on."""
    _hash_no_mixed_block(scheduler.kv_cache_manager.block_pool)
    for request in scheduler.running:
        # A request without computed tokens has no KV; it begins under the new weights.
        if request.num_computed_tokens:
            setattr(request, MARK, request.num_preemptions)


def unmark(request: Any) -> None:
    """Take the mark off a request that has given its blocks back without a preemption."""
    vars(request).pop(MARK, None)


def _hash_no_mixed_block(pool: Any) -> None:
    """Have a pool leave blocks of marked requests without a hash; idempotent.

    Below vLLM's managers, whose counts go on as if the blocks were found later on: they look at a
    block's hash, and find none.
    """

    def guarded(method: Callable[..., Any]) -> Callable[..., Any]:
        def unless_mixed(request: Any, *args: Any, **kwargs: Any) -> Any:
            return None if is_mixed(request) else method(request, *args, **kwargs)

        return unless_mixed

    for name in HASHING:
        if name not in vars(pool) and hasattr(pool, name):
            setattr(pool, name, guarded(getattr(pool, name)))
