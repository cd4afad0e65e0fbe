"""What vLLM calls in each of its processes: front end, engine core, and every worker."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it

ENGINE_CORE = "vllm.v1.engine.core"
UNKNOWN = (
    "this vLLM's weight transfer has a shape that wtransfer-vllm does not know, so its engines are "
    "not registered; known are those of vLLM 0.16 to 0.17 and 0.27 to 0.33"
)


def register() -> None:
    """Register our engines, and see that the engine core forgets stale KV. Never raises.

    Whatever goes wrong here concerns our backends only: vLLM starts all the same, and says that
    the backend is not known when somebody asks for it.

    Cost:
        Reads what is installed; imports no backend, and of vLLM only the factory. How long it took
        stands in its log line; one for each process, for a second call adds nothing and says so at
        debug level only.
    """
    begun = time.perf_counter()
    try:
        added = _register()
    except Exception:
        logger.exception("wtransfer-vllm could not register its engines; vLLM goes on without")
        return
    milliseconds = (time.perf_counter() - begun) * 1000
    if added:
        names = ", ".join(added)
        logger.info("wtransfer: weight transfer backends %s (%.1f ms)", names, milliseconds)
    else:
        logger.debug("wtransfer: no weight transfer backend to add (%.1f ms)", milliseconds)


def _register() -> list[str]:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from wtransfer_vllm.engine_core import watch
    from wtransfer_vllm.generation import generation_of
    from wtransfer_vllm.on_import import on_import
    from wtransfer_vllm.registration import register_engines

    generation = generation_of(WeightTransferEngine)
    if generation is None:
        logger.warning(UNKNOWN)
        return []
    added = register_engines(WeightTransferEngineFactory, generation)
    if added:
        on_import(ENGINE_CORE, lambda module: watch(module.EngineCore, generation))
    return added
