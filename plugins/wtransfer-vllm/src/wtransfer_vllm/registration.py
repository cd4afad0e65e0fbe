"""Enter every engine that is found here into vLLM's factory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wtransfer.host.registry import registry

from wtransfer_vllm import names
from wtransfer_vllm.generation import SEED
from wtransfer_vllm.seed_config import allow

if TYPE_CHECKING:
    from wtransfer_vllm.generation import Generation


def register_engines(factory: Any, generation: Generation) -> list[str]:
    """Register our adapter under every engine's name, lazily; a second call does nothing.

    Args:
        factory: vLLM's ``WeightTransferEngineFactory``.
        generation: The shape of its engines.

    Returns:
        The names that were added, as ``weight_transfer_config`` takes them.
    """
    tried = [_register(factory, generation, engine) for engine in registry("engines").names()]
    added = [backend for backend in tried if backend is not None]
    if generation is SEED:
        allow(added)
    return added


def _register(factory: Any, generation: Generation, engine: str) -> str | None:
    # vLLM's own names stay vLLM's: users who wrote them mean its engines.
    for backend in (engine, f"{names.PREFIX}{engine}"):
        if names.is_ours(backend):
            return None
        try:
            factory.register_engine(backend, generation.module, generation.class_name)
        except ValueError:
            continue
        names.remember(backend, engine)
        return backend
    return None
