"""What a worker's KV caches have in common with those of other instances."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wtransfer.transport.tensors import dtype_name

if TYPE_CHECKING:
    import torch


def page_form(name: str, cache: torch.Tensor) -> str:
    """Return what a page is: bytes mean the same only where all of it is the same.

    Of the strides it has the order only: pages travel without gaps, whatever the cache has.

    Args:
        name: Of the layer.
        cache: Its cache; dim 0 counts blocks.

    Raises:
        ManifestError: A dtype that does not travel.
    """
    shape = ",".join(map(str, cache.shape[1:]))
    # Stable, so that dimensions of one stride keep theirs.
    order = sorted(range(1, cache.dim()), key=cache.stride, reverse=True)
    return f"{name!r}={dtype_name(cache.dtype)}[{shape}]/{','.join(map(str, order))}"
