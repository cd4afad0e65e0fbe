"""The names under which vLLM knows our backends.

A name that vLLM has given to a backend of its own stays vLLM's; ours then has the prefix.
"""

from __future__ import annotations

PREFIX = "wtransfer-"
"""Before a name that vLLM has given to a backend of its own."""

_ours: dict[tuple[str, str], str] = {}


def remember(kind: str, name: str, ours: str) -> None:
    """Note under which name vLLM's factory knows a backend of ours.

    Args:
        kind: ``engines``, ``connectors`` or ``specs``.
        name: Its name in vLLM.
        ours: Its name in wtransfer's registry.
    """
    _ours[kind, name] = ours


def is_ours(kind: str, name: str | None) -> bool:
    """Whether a name in vLLM is a backend of ours; known in every process, each registers them."""
    return (kind, name) in _ours


def our_name(kind: str, name: str) -> str:
    """Return the name that a backend has in wtransfer's registry; of others, the same name."""
    return _ours.get((kind, name), name)


def vllm_names(kind: str) -> dict[str, str]:
    """Return our names of one kind, each with its name in vLLM."""
    return {ours: name for (of, name), ours in _ours.items() if of == kind}
