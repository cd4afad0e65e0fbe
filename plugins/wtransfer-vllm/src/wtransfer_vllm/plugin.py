"""Register every backend of wtransfer in vLLM's factories, in each of vLLM's processes.

=========== ================================ ================= ==================================
kind        vLLM's factory                   entered           what vLLM gets
=========== ================================ ================= ==================================
engines     ``WeightTransferEngineFactory``  at once           a class of `wtransfer_vllm.engine`
connectors  ``KVConnectorFactory``           on its import     a class of its name, made by
                                                               `wtransfer_vllm.connector`
specs       ``OffloadingSpecFactory``        on its import     a refusal, made by this module
=========== ================================ ================= ==================================

This module is imported in every process of vLLM (front end, engine core, workers), so it imports
neither torch nor a backend.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import inspect
import logging
import sys
import time
from typing import TYPE_CHECKING, Any, Literal, get_args

from wtransfer_vllm.names import PREFIX, is_ours, remember, vllm_names

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

logger = logging.getLogger(f"vllm.{__name__}")  # a child of vLLM's, so that its log has it

ENGINE_CORE = "vllm.v1.engine.core"
OUTPUT_PROCESSOR = "vllm.v1.engine.output_processor"
CONNECTOR_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
SPEC_FACTORY = "vllm.v1.kv_offload.factory"
MODELS = "vllm.entrypoints.openai.models.serving"
MULTI_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.multi_connector"


def register() -> None:
    """Register the backends, and have the engine core forget stale KV. Never raises.

    A failure concerns these backends only: vLLM starts without them, and reports an unknown backend
    when one is asked for.

    Cost:
        Reads what is installed; imports no backend, and of vLLM only the weight engines' factory.
        The log line has the time. A second call adds nothing, and says so at debug level only.
    """
    _register("weight transfer backends", register_engines)
    on_import(
        CONNECTOR_FACTORY, functools.partial(_register, "KV connectors", _register_connectors)
    )
    on_import(SPEC_FACTORY, functools.partial(_register, "offloading specs", _register_specs))
    on_import(MULTI_CONNECTOR, _refuse_sub_connectors)


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


def register_engines() -> list[str]:
    """Enter the engines in vLLM's factory of workers; return the names of new ones. Idempotent."""
    from vllm.distributed.weight_transfer.base import WeightTransferEngine
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from wtransfer_vllm.adapters import load_once
    from wtransfer_vllm.engine_core import FINISH, UPDATE, concerns, watch
    from wtransfer_vllm.spans import follow_requests

    adapter = _adapter_of(WeightTransferEngine)
    commits_in = UPDATE if adapter == "SeedEngine" else FINISH
    on_import(OUTPUT_PROCESSOR, lambda module: follow_requests(module.RequestState))
    # Also where no engine is registered: a connector needs the watch with any source of weights.
    on_import(ENGINE_CORE, lambda module: watch(module.EngineCore, commits_in))
    on_import(
        MODELS, lambda module: load_once(getattr(module, "OpenAIServingModels", None), concerns)
    )
    if adapter is None:
        logger.warning(
            "this vLLM's weight transfer has a shape that wtransfer-vllm does not know, so its "
            "engines are not registered; known are those of vLLM 0.16 to 0.17 and 0.27 to 0.33"
        )
        return []
    register_engine = WeightTransferEngineFactory.register_engine
    added = _register_all(
        "engines", lambda name, _: register_engine(name, "wtransfer_vllm.engine", adapter)
    )
    if adapter == "SeedEngine":
        _allow_in_seed_config(added)
    return added


def _adapter_of(base: type[Any]) -> str | None:
    """Return the adapter for vLLM's base class, told by its signatures and not by its version."""
    constructor, receive = (
        list(inspect.signature(function).parameters)[1:]
        for function in (base.__init__, getattr(base, "receive_weights", base.__init__))
    )
    finishes = hasattr(base, "finish_weight_update")
    if constructor == ["config", "vllm_config", "device", "model"] and finishes:
        return "VllmEngine"
    if constructor == ["config", "parallel_config"] and "load_weights" in receive and not finishes:
        return "SeedEngine"
    return None


def _allow_in_seed_config(backends: Iterable[str]) -> None:
    """Let the seed era's configuration, whose ``Literal`` names vLLM's backends, take these."""
    from vllm.config.weight_transfer import WeightTransferConfig

    known = get_args(WeightTransferConfig.__annotations__["backend"])
    further = [name for name in backends if name not in known]
    if not known or not further:
        return
    from pydantic.dataclasses import rebuild_dataclass

    wider = Literal.__getitem__((*known, *further))  # 3.10 has no star within brackets
    WeightTransferConfig.__annotations__["backend"] = wider
    WeightTransferConfig.__dataclass_fields__["backend"].type = wider
    rebuild_dataclass(WeightTransferConfig, force=True)


def _register_connectors(module: Any) -> list[str]:
    register_connector = module.KVConnectorFactory.register_connector
    return _register_all(
        "connectors", lambda name, _: register_connector(name, "wtransfer_vllm.connector", name)
    )


def _register_specs(module: Any) -> list[str]:
    register_spec = module.OffloadingSpecFactory.register_spec
    return _register_all("specs", lambda name, ours: register_spec(name, __name__, ours))


def _refuse_sub_connectors(module: Any) -> None:
    """Have vLLM's MultiConnector refuse connectors of wtransfer.

    MultiConnector hands on the metadata of one sub-connector only, and takes the silence of one at
    a commit for consent.
    """
    construct = module.MultiConnector.__init__

    @functools.wraps(construct)
    def checked(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        for sub_connector in options.get("connectors", ()):
            name = sub_connector.get("kv_connector")
            if is_ours("connectors", name):
                multi = vllm_names("connectors").get("MultiConnector", "MultiConnector")
                raise ValueError(
                    f"{name!r} is wtransfer's connector and runs under wtransfer's MultiConnector: "
                    f'set "kv_connector": "{multi}" in --kv-transfer-config'
                )
        construct(self, vllm_config, *args, **kwargs)

    module.MultiConnector.__init__ = checked


def __getattr__(name: str) -> Any:
    """Refuse to be the class of an offloading spec, for which vLLM's factory looks here.

    vLLM's connector ends its worker by an assertion when a job is refused, and refusing jobs that
    were planned for other weights is how stale KV is kept out.

    Raises:
        ValueError: The name is that of a spec; the text says what to configure instead.
        AttributeError: There is no spec of this name.
    """
    if name not in vllm_names("specs"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    connector = vllm_names("connectors").get("OffloadingConnector", "OffloadingConnector")
    raise ValueError(
        f"the offloading spec {name!r} is wtransfer's and runs under wtransfer's connector: set "
        f'"kv_connector": "{connector}" and "spec_name": "{name}" in --kv-transfer-config'
    )


# -- backends of one kind


def _register_all(kind: str, register: Callable[[str, str], object]) -> list[str]:
    from wtransfer.registry.resolve import registry

    added = []
    for ours in registry(kind).names():
        # A name that vLLM has given to a backend of its own stays vLLM's.
        for name in (ours, f"{PREFIX}{ours}"):
            if is_ours(kind, name):
                break
            try:
                register(name, ours)
            except ValueError:
                continue
            remember(kind, name, ours)
            added.append(name)
            break
    return added


# -- modules that are not imported yet


def on_import(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with a module: at once if it is imported, else right after its import.

    vLLM's front end runs its plug-ins before it imports the engine core, and may fork the engine
    core from itself, where plug-ins are not run again. An import here would cost every process
    seconds.
    """
    module = sys.modules.get(name)
    if module is not None:
        then(module)
    else:
        sys.meta_path.insert(0, _Finder(name, then))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module once, as the other finders do, and has its loader call `then`."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002  # the finder's contract
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._then(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
