"""A worker's KV cache as a connector hands it to a spec: memory, and the pages of each block in it.

Source: names and fields are those of vLLM's offloading interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass
class CanonicalKVCacheTensor:
    """Memory that holds one page of every block."""

    tensor: torch.Tensor
    """Shape ``(num_blocks, ...)``; the pages of a block lie together. `OffloadingConnector` gives
    bytes: uint8, ``(num_blocks, page_size_bytes)``."""
    page_size_bytes: int
    """Bytes of a page, padding included."""


@dataclass
class CanonicalKVCacheRef:
    """The page of one layer."""

    tensor_idx: int
    """Index of the tensor."""
    page_size_bytes: int
    """Bytes that are used."""
    form: str = ""
    """Layer, dtype, shape and order of the page's dimensions as text, equal where its bytes have
    equal meaning; empty where the host does not say."""


@dataclass
class CanonicalKVCaches:
    """A worker's whole KV cache, as far as copying it is concerned."""

    tensors: list[CanonicalKVCacheTensor]
    """The memory, each piece once."""
    group_data_refs: list[list[CanonicalKVCacheRef]]
    """For each group, the pages that a block of it consists of, in order."""
