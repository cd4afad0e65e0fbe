"""The names under which vLLM knows our engines."""

from __future__ import annotations

PREFIX = "wtransfer-"
"""Before a name that vLLM has given to an engine of its own."""

_engines: dict[str, str] = {}


def remember(backend: str, engine: str) -> None:
    """Note that a backend of vLLM's is an engine of ours."""
    _engines[backend] = engine


def is_ours(backend: str | None) -> bool:
    """Whether a backend is one of ours; known in every process, for each has registered them."""
    return backend in _engines


def engine_name(backend: str) -> str:
    """Return the name that the engine has in ``wtransfer.engines``."""
    return _engines.get(backend, backend.removeprefix(PREFIX))
