"""What vLLM's own offloading connector gets under the name of a spec of ours: a refusal.

vLLM's connector ends its worker by an assertion when a job is refused, and refusing jobs that were
planned for other weights is how ours keeps stale KV out. So our specs run under our connector.
"""

from __future__ import annotations

from typing import Any

from wtransfer_vllm import names


def __getattr__(name: str) -> Any:
    """Refuse to be a spec's class.

    Raises:
        ValueError: Always, with what to configure instead; `AttributeError` for Python's own names.
    """
    if name.startswith("__"):
        raise AttributeError(name)
    connector = names.vllm_names("connectors").get("OffloadingConnector", "OffloadingConnector")
    raise ValueError(
        f"the offloading spec {name!r} is wtransfer's and runs under wtransfer's connector: set "
        f'"kv_connector": "{connector}" and "spec_name": "{name}" in --kv-transfer-config'
    )
