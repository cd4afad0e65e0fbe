"""Names of backends in vLLM: their own, or with a prefix where vLLM has one of that name."""

from __future__ import annotations

from typing import Any

PREFIX = "wtransfer-"
_ours: dict[tuple[str, str], str] = {}
"""(kind, name in vLLM) -> name in wtransfer's registry."""


def remember(kind: str, name: str, ours: str) -> None:
    """Record the name of a backend in vLLM's factory.

    Args:
        kind: ``engines``, ``connectors`` or ``specs``.
        name: Its name in vLLM.
        ours: Its name in wtransfer's registry.
    """
    _ours[kind, name] = ours


def is_ours(kind: str, name: str | None) -> bool:
    """Return whether a name in vLLM is a backend of wtransfer; known in every process."""
    return (kind, name) in _ours


def our_name(kind: str, name: str) -> str:
    """Return a backend's name in wtransfer's registry; other backends keep their names."""
    return _ours.get((kind, name), name)


def vllm_names(kind: str) -> dict[str, str]:
    """Return name in wtransfer's registry -> name in vLLM, of one kind."""
    return {ours: name for (of, name), ours in _ours.items() if of == kind}


def has_our_connector(core: Any) -> bool:
    """Return whether vLLM's KV connector is one of wtransfer's."""
    transfer = getattr(core.vllm_config, "kv_transfer_config", None)
    # A module path wins over the names in vLLM's factory.
    return (
        transfer is not None
        and not getattr(transfer, "kv_connector_module_path", None)
        and is_ours("connectors", transfer.kv_connector)
    )
