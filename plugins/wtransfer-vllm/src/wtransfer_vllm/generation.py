"""Which shape vLLM's weight transfer has here, told by its signatures and not by its version.

==========  ===============================================  ==================================
generation  worker engine                                    our adapter
==========  ===============================================  ==================================
current     ``(config, vllm_config, device, model)``, with   `wtransfer_vllm.current`
            ``start_`` and ``finish_weight_update``
seed        ``(config, parallel_config)``, with              `wtransfer_vllm.seed`
            ``receive_weights(info, load_weights)``
==========  ===============================================  ==================================
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Generation:
    """One shape of vLLM's contract, and what serves it."""

    name: str
    """Word for logs."""
    module: str
    """Module of the adapter; imported when a worker makes its engine."""
    class_name: str
    """The adapter's class."""
    commits_in: str
    """The worker's method in which a commit happens."""


CURRENT = Generation("current", "wtransfer_vllm.current", "VllmEngine", "finish_weight_update")
SEED = Generation("seed", "wtransfer_vllm.seed", "SeedEngine", "update_weights")


def generation_of(engine: type[Any]) -> Generation | None:
    """Return the generation of vLLM's base class; None if it is none that we know.

    Args:
        engine: vLLM's ``WeightTransferEngine``.
    """
    made_from = _parameters(engine.__init__)
    receives = _parameters(getattr(engine, "receive_weights", None))
    ends_itself = hasattr(engine, "finish_weight_update")
    if made_from == ["config", "vllm_config", "device", "model"] and ends_itself:
        return CURRENT
    if made_from == ["config", "parallel_config"] and "load_weights" in receives:
        return None if ends_itself else SEED
    return None


def _parameters(function: Any) -> list[str]:
    if function is None:
        return []
    return [name for name in inspect.signature(function).parameters if name != "self"]
