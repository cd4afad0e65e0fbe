"""Configuration of a backend of wtransfer in vLLM, for ``wtransfer plugins show``."""

from __future__ import annotations

import importlib
import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping


def describe(kind: str, name: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return a backend's name in vLLM's factory, and an argument of its server to copy.

    Args:
        kind: ``engines``, ``connectors`` or ``specs``.
        name: Its name in wtransfer's registry.
        options: Options that a configuration needs at least.

    Raises:
        ImportError: vLLM is not installed here.
    """
    # The description goes to the standard output, to which vLLM would log as well.
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
    connector, shown = in_vllm, in_vllm
    if kind == "specs":
        connector = names.vllm_names("connectors")["OffloadingConnector"]
        shown = f"{in_vllm}, which refuses: it runs under {connector}"
        options = {"spec_name": name, **options}
    config = {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": dict(options),
    }
    return {"name": shown, "argument": _argument("kv", config)}


def _argument(what: str, config: Mapping[str, Any]) -> str:
    return f"--{what}-transfer-config '{json.dumps(config)}'"
