"""Whether vLLM's workers take updates in another floating dtype than their checkpoint's.

vLLM's configuration of weight transfer has no room for options, so the environment says it.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from wtransfer.weight_sync.worker.schema import canonical_names

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import torch
    from wtransfer.engines.interface import TensorSpec

VARIABLE = "WTRANSFER_VLLM_CAST"
"""Environment variable of vLLM's processes."""
HINT = f"{VARIABLE}=1 in the environment of vLLM"
"""For errors."""


def may_cast() -> bool:
    """Return whether a floating dtype may be converted at the commit.

    Raises:
        ValueError: The variable is neither 0 nor 1.
    """
    value = os.environ.get(VARIABLE) or "0"
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE} is {value!r}, expected 0 or 1")
    return value == "1"


def in_form(
    tensors: Mapping[str, torch.Tensor], schema: Mapping[str, TensorSpec] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors in the dtypes of the checkpoint, one by one.

    Here and not in the model's loaders: some compare or keep what they are given, and each layer's
    kernels shall see the very bytes that a checkpoint would have had.

    Args:
        tensors: A whole update that fits.
        schema: The checkpoint's form; None: there is none, and the update is taken as it is.
    """
    canonical = canonical_names(schema or {})
    for name, tensor in tensors.items():
        spec = (schema or {}).get(canonical.get(name, name))
        yield name, tensor if spec is None else tensor.to(spec.dtype)
