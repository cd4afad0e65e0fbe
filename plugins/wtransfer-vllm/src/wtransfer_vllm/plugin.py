"""What vLLM calls in each of its processes: front end, engine core, and every worker."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it

ENGINE_CORE = "vllm.v1.engine.core"
CONNECTOR_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
SPEC_FACTORY = "vllm.v1.kv_offload.factory"
MULTI_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"
UNKNOWN = (
    "this vLLM's weight transfer has a shape that wtransfer-vllm does not know, so its engines are "
    "not registered; known are those of vLLM 0.16 to 0.17 and 0.27 to 0.33"
)


def register() -> None:
    """Register our backends, and see that the engine core forgets stale KV. Never raises.

    Whatever goes wrong here concerns our backends only: vLLM starts all the same, and says that
    the backend is not known when somebody asks for it.

    Cost:
        Reads what is installed; imports no backend, and of vLLM only the weight engines' factory.
        Connectors and specs are registered when vLLM imports their factories. How long it took
        stands in its log line; a second call adds nothing and says so at debug level only.
    """
    from wtransfer_vllm.on_import import on_import

    _register("weight transfer backends", _engines)
    on_import(CONNECTOR_FACTORY, lambda module: _register("KV connectors", _connectors, module))
    on_import(SPEC_FACTORY, lambda module: _register("offloading specs", _specs, module))
    on_import(MULTI_CONNECTOR, _guard_multi_connector)


def _register(what: str, add: Callable[..., list[str]], *factory: Any) -> None:
    begun = time.perf_counter()
    try:
        added = add(*factory)
    except Exception:
        logger.exception("wtransfer-vllm could not register %s; vLLM goes on without", what)
        return
    milliseconds = (time.perf_counter() - begun) * 1000
    if added:
        logger.info("wtransfer: %s %s (%.1f ms)", what, ", ".join(added), milliseconds)
    else:
        logger.debug("wtransfer: no %s to add (%.1f ms)", what, milliseconds)


def _engines() -> list[str]:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from wtransfer_vllm.engine_core import watch
    from wtransfer_vllm.generation import CURRENT, generation_of
    from wtransfer_vllm.on_import import on_import
    from wtransfer_vllm.registration import register_engines

    generation = generation_of(WeightTransferEngine)
    # Connectors need the watch as well, whatever brings the weights.
    on_import(ENGINE_CORE, lambda module: watch(module.EngineCore, generation or CURRENT))
    if generation is None:
        logger.warning(UNKNOWN)
        return []
    return register_engines(WeightTransferEngineFactory, generation)


def _connectors(module: Any) -> list[str]:
    from wtransfer_vllm.registration import register_connectors

    return register_connectors(module.KVConnectorFactory)


def _guard_multi_connector(module: Any) -> None:
    from wtransfer_vllm.registration import refuse_as_children

    refuse_as_children(module.MultiConnector)


def _specs(module: Any) -> list[str]:
    from wtransfer_vllm.registration import register_specs

    return register_specs(module.OffloadingSpecFactory)
