"""What to write in vLLM to get a backend of wtransfer: for ``wtransfer plugins show``."""

from __future__ import annotations

import importlib
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

OFFLOADING = "OffloadingConnector"


def describe(kind: str, name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return a backend's name in vLLM's factory, and an argument of ``vllm serve`` to copy.

    Args:
        kind: ``engines``, ``connectors`` or ``specs``.
        name: Its name in wtransfer's registry.
        options: Options that a configuration needs at least.

    Raises:
        ImportError: vLLM is not installed here.
    """
    # What is shown goes to the standard output, where vLLM's log would be, too.
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")
    from wtransfer_vllm import names, plugin

    plugin.register()
    for factory in (plugin.CONNECTOR_FACTORY, plugin.SPEC_FACTORY):
        importlib.import_module(factory)
    in_vllm = names.vllm_names(kind).get(name)
    if in_vllm is None:
        return {"name": "none: this vLLM's factory has not taken it"}
    if kind == "engines":
        return {"name": in_vllm, "argument": _argument("weight", {"backend": in_vllm})}
    if kind == "specs":
        connector = names.vllm_names("connectors")[OFFLOADING]
        config = _connector(connector, {"spec_name": name, **options})
        runs_under = f"{in_vllm}, which refuses: it runs under {connector}"
        return {"name": runs_under, "argument": _argument("kv", config)}
    return {"name": in_vllm, "argument": _argument("kv", _connector(in_vllm, options))}


def _connector(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return {**config, "kv_connector_extra_config": dict(options)}


def _argument(what: str, config: Mapping[str, Any]) -> str:
    return f"--{what}-transfer-config '{json.dumps(config)}'"
