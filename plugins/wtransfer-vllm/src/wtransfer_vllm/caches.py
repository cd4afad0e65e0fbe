"""Invalidate KV of old weights: in vLLM's prefix and encoder caches, and in its connector.

Called in the engine core between two steps, right after the weights have changed.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from wtransfer_vllm.in_flight import is_pooling, mark_running, unmark
from wtransfer_vllm.names import has_our_connector

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer_vllm.block_hashes import BlockHashes

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it

BETWEEN_INPUTS = "WAITING_FOR_STREAMING_REQ"
"""State of a session, vLLM's request of several inputs, that waits for its next one."""
HOLDING = ("WAITING", "PREEMPTED", BETWEEN_INPUTS)
"""States of vLLM's requests in which they may hold KV without running or loading."""
FORGOTTEN = "wtransfer_num_forgotten"
"""Attribute of a session: its computed tokens, whose KV it has lost between two inputs."""
SUSPENDED = ("get_num_new_matched_tokens", "request_finished", "request_finished_all_groups")
"""Methods of a connector's scheduler side: the look-up, and those whose answers hand KV over."""


def forget_kv(
    core: Any, *, keep_running: bool = False, block_hashes: BlockHashes | None = None
) -> None:
    """Drop every cached block and encoder output; running requests are computed anew.

    If vLLM cannot release a block's hash, nothing more is served from the prefix cache until it
    can. A connector of vLLM's own that does not report that it has forgotten is not asked for KV
    until it does.

    Args:
        core: vLLM's ``EngineCore``.
        keep_running: True if running requests go on with the KV that they have, in blocks that
            nothing finds any more.
        block_hashes: What names the blocks of vLLM's own lower tiers, if there are any.
    """
    scheduler = core.scheduler
    if block_hashes is not None:
        block_hashes.forget()
    # 1. The connector's scheduler side gets the weights that the workers have now, so that every
    #    plan from here on is for them, and no worker has to refuse it.
    connector = getattr(scheduler, "connector", None)
    if has_our_connector(core):
        tell_connector(core)
    elif connector is not None:
        try:
            # vLLM's MultiConnector takes silence for consent, so its sub-connectors are asked.
            parts = getattr(connector, "sub_connectors", None) or [connector]
            named = [] if block_hashes is None else block_hashes.parts
            answers = [part.reset_cache() for part in parts if part not in named]
        except Exception as error:
            logger.error("the KV connector could not forget: %s", error)  # noqa: TRY400
            answers = [False]
        _suspend(connector, suspended=not all(answer is True for answer in answers))

    # 2. Requests whose loads are under way start over once those loads have ended, with any
    #    outcome: their blocks hold KV of the old weights. vLLM does so with a request whose load
    #    has failed. The request has no computed token then, which also keeps its blocks from being
    #    looked for among those that a worker reports as not loaded, by which
    #    `kv_load_failure_policy` would end the request with an error; of several KV cache groups
    #    workers report the request itself. Requests that wait with KV of their own (loaded, and not
    #    scheduled since; a session between two inputs) give their blocks back and start over as
    #    well.
    _spare_restarting(scheduler)
    _restart_sessions(scheduler)
    for request in getattr(scheduler, "requests", {}).values():
        if request.status.name == "WAITING_FOR_REMOTE_KVS":
            request.num_computed_tokens = 0
            scheduler.failed_recving_kv_req_ids.add(request.request_id)
        elif request.status.name in HOLDING and request.num_computed_tokens:
            # Older releases have no frees that wait for a step in flight.
            free = getattr(scheduler, "_free_request_blocks", scheduler.kv_cache_manager.free)
            free(request)
            if request.status.name == BETWEEN_INPUTS:
                setattr(request, FORGOTTEN, request.num_computed_tokens)
            request.num_computed_tokens = 0
            unmark(request)

    # 3. Running requests are preempted and computed anew, or marked; no block is found by its hash.
    #    The marks come first: where hashes cannot be taken away, mixed blocks get none, either.
    if keep_running:
        mark_running(scheduler)
    evicted = _evict_blocks(core, keep_running=keep_running)
    manager = getattr(scheduler, "kv_cache_manager", None)
    if manager is not None and not evicted and manager.enable_caching:
        manager.enable_caching = False
        manager.wtransfer_stale = True
    elif manager is not None and evicted and getattr(manager, "wtransfer_stale", False):
        manager.enable_caching = True
        manager.wtransfer_stale = False
    if getattr(core.vllm_config.model_config, "is_multimodal_model", True):
        core.reset_encoder_cache()

    # 4. What preempted requests have gathered of their answers goes: vLLM would add to it.
    if is_pooling(core):
        core.model_executor.collective_rpc(drop_rows)


def drop_rows(worker: Any) -> None:
    """Drop what pooling requests have gathered so far, in a worker: they are computed anew.

    vLLM's second runner begins a preempted request without any.
    """
    for request in getattr(worker.model_runner, "requests", {}).values():
        gathered = getattr(request, "pooling_states", None)
        if gathered is not None:
            gathered.clean()


def _spare_restarting(scheduler: Any) -> None:
    """Have vLLM end no request for a failed load that starts over in any case."""
    name = "_handle_failed_recving"
    handle = getattr(scheduler, name, None)  # older releases take no failed requests
    if handle is not None and name not in vars(scheduler):
        spared = scheduler.failed_recving_kv_req_ids
        setattr(scheduler, name, lambda failed: handle(failed - spared))


def _restart_sessions(scheduler: Any) -> None:
    """Have vLLM compute a session anew that has lost its KV: once it has its next input.

    With that vLLM takes the tokens that were not computed off the session.
    """
    name = "_update_request_as_session"
    update = getattr(scheduler, name, None)  # older releases have no sessions
    if update is None or name in vars(scheduler):
        return

    def update_session(session: Any, *args: Any) -> None:
        num_forgotten = vars(session).pop(FORGOTTEN, None)
        if num_forgotten is None:
            update(session, *args)
            return
        session.num_computed_tokens = num_forgotten
        update(session, *args)
        session.num_computed_tokens = 0

    setattr(scheduler, name, update_session)


def _evict_blocks(core: Any, *, keep_running: bool) -> bool:
    try:
        # With the running requests: their blocks would be served to others once they are full.
        # Without the connector, whose silence vLLM takes for consent, and which some engines lack.
        if not keep_running and core.reset_prefix_cache(True, False) is not False:  # vLLM's order
            return True
    except Exception as error:
        logger.info("%s", error)
    try:
        # Requests that wait for their loads, or that have ended and are still being saved, hold
        # blocks. The running ones are preempted by now, or marked, and without its hash no block is
        # found.
        manager = core.scheduler.kv_cache_manager
        manager.evict_blocks(set(range(manager.block_pool.num_gpu_blocks)))
    except Exception as error:
        logger.error("vLLM could not forget its KV cache: %s", error)  # noqa: TRY400
    else:
        return True
    logger.error("the prefix cache may be stale; it is not read until the next commit")
    return False


def tell_connector(core: Any) -> None:
    """Tell the connector's scheduler side which weights each worker has, as at the start.

    If the call fails, the connector is not asked for KV until it has worked.
    """
    connector = core.scheduler.connector
    try:
        by_rank: dict[Any, Any] = {}
        for metadata in core.model_executor.get_kv_connector_handshake_metadata():
            by_rank.update(metadata or {})
        connector.set_xfer_handshake_metadata_pp_aware(by_rank)
    except Exception:
        logger.exception("the KV connector cannot be told of the weights' change")
        _suspend(connector, suspended=True)
    else:
        _suspend(connector, suspended=False)


def _suspend(connector: Any, *, suspended: bool) -> None:
    """Have a connector find nothing for any request, and hand nothing over; or take that back."""
    for name in SUSPENDED:
        vars(connector).pop(name, None)
    if not suspended:
        return
    logger.warning(
        "%s may have KV of other weights; it is not asked for KV until it is known not to",
        type(connector).__name__,
    )

    def find_nothing(request: Any, *_args: Any, **_kwargs: Any) -> tuple[int, bool]:
        # Whoever is told that it is a prefill for another instance keeps its blocks for that.
        if getattr(request, "kv_transfer_params", None):
            request.kv_transfer_params["do_remote_decode"] = False
        return 0, False

    def handing_nothing_over(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (method(*args, **kwargs)[0], None)

    look_up, *endings = SUSPENDED
    setattr(connector, look_up, find_nothing)
    for name in endings:
        if hasattr(connector, name):
            setattr(connector, name, handing_nothing_over(getattr(connector, name)))
