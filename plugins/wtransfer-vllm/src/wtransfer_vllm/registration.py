"""Enter every backend that is found here into vLLM's factories, lazily; a second call does nothing.

=========== ======================================= ============================================
kind        vLLM's factory                          what it makes
=========== ======================================= ============================================
engines     ``WeightTransferEngineFactory``         `wtransfer_vllm.current`, `wtransfer_vllm.seed`
connectors  ``KVConnectorFactory``                  `wtransfer_vllm.connector`, one class per name
specs       ``OffloadingSpecFactory``               a refusal: `wtransfer_vllm.spec_refusal`
=========== ======================================= ============================================
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from wtransfer.registry.registry import registry

from wtransfer_vllm import names
from wtransfer_vllm.generation import SEED
from wtransfer_vllm.seed_config import allow

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer_vllm.generation import Generation

CONNECTORS = "wtransfer_vllm.connector"
REFUSAL = "wtransfer_vllm.spec_refusal"


def register_engines(factory: Any, generation: Generation) -> list[str]:
    """Register our adapter under the name of every weight engine.

    Args:
        factory: vLLM's ``WeightTransferEngineFactory``.
        generation: The shape of its engines.

    Returns:
        The names that were added, as ``weight_transfer_config`` takes them.
    """
    added = _register(
        "engines",
        lambda name, _: factory.register_engine(name, generation.module, generation.class_name),
    )
    if generation is SEED:
        allow(added)
    return added


def register_connectors(factory: Any) -> list[str]:
    """Register our adapter under the name of every connector.

    Args:
        factory: vLLM's ``KVConnectorFactory``.

    Returns:
        The names that were added, as ``kv_connector`` takes them.
    """
    return _register(
        "connectors", lambda name, _: factory.register_connector(name, CONNECTORS, name)
    )


def register_specs(factory: Any) -> list[str]:
    """Register, under the name of every offloading spec, what says where it works.

    Args:
        factory: vLLM's ``OffloadingSpecFactory``.

    Returns:
        The names that were added.
    """
    return _register("specs", lambda name, ours: factory.register_spec(name, REFUSAL, ours))


def refuse_as_children(multi_connector: Any) -> None:
    """Have vLLM's MultiConnector refuse connectors of ours, which run under ours.

    It hands on one child's words only, and takes a child's silence at a commit for consent.

    Args:
        multi_connector: vLLM's class.
    """
    construct = multi_connector.__init__

    @functools.wraps(construct)
    def checked(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        options = vllm_config.kv_transfer_config.kv_connector_extra_config
        children = [child.get("kv_connector") for child in options.get("connectors", ())]
        ours = [name for name in children if names.is_ours("connectors", name)]
        if ours:
            ours_multi = names.vllm_names("connectors").get("MultiConnector", "MultiConnector")
            raise ValueError(
                f"{ours[0]!r} is wtransfer's connector and runs under wtransfer's MultiConnector: "
                f'set "kv_connector": "{ours_multi}" in --kv-transfer-config'
            )
        construct(self, vllm_config, *args, **kwargs)

    multi_connector.__init__ = checked


def _register(kind: str, register: Callable[[str, str], object]) -> list[str]:
    tried = [_register_one(kind, ours, register) for ours in registry(kind).names()]
    return [name for name in tried if name is not None]


def _register_one(kind: str, ours: str, register: Callable[[str, str], object]) -> str | None:
    # vLLM's own names stay vLLM's: users who wrote them mean its backends.
    for name in (ours, f"{names.PREFIX}{ours}"):
        if names.is_ours(kind, name):
            return None
        try:
            register(name, ours)
        except ValueError:
            continue
        names.remember(kind, name, ours)
        return name
    return None
