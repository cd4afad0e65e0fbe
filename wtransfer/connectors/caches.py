"""Compare the KV cache layout of a layer between instances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.transport.tensors import dtype_name

if TYPE_CHECKING:
    import torch


def page_form(name: str, cache: torch.Tensor) -> str:
    """Return a text that is equal where bytes of a page have the same meaning.

    It contains the order of the strides, not their sizes: pages are sent without gaps.

    Args:
        name: Name of the layer.
        cache: Cache of the layer; dim 0 counts blocks.

    Raises:
        ManifestError: The dtype is not in the table of dtypes.
    """
    shape = ",".join(map(str, cache.shape[1:]))
    # Stable: dimensions of equal stride keep their order.
    order = sorted(range(1, cache.dim()), key=cache.stride, reverse=True)
    return f"{name!r}={dtype_name(cache.dtype)}[{shape}]/{','.join(map(str, order))}"
