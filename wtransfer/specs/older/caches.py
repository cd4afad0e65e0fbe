"""A worker's cache as specs in the seed's style know it: a tensor for each layer, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wtransfer.errors import OffloadingOptionError

if TYPE_CHECKING:
    import torch

    from wtransfer.specs.interface import CanonicalKVCaches


class BlocksFirst:
    """The part of an attention backend that the seed's handlers ask: how a cache is laid out."""

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, **_: Any
    ) -> tuple[int, int, int]:
        """Return the order of dimensions: blocks, tokens, everything of a token."""
        return (num_blocks, block_size, 2 * num_kv_heads * head_size)

    @staticmethod
    def get_kv_cache_stride_order(**_: Any) -> tuple[int, int, int]:
        """Return that dimensions lie in memory in this order."""
        return (0, 1, 2)


def seed_caches(
    kv_caches: CanonicalKVCaches, spec: Any
) -> tuple[dict[str, torch.Tensor], dict[str, type[BlocksFirst]]]:
    """Return what ``get_handlers`` takes: tensors and attention backends by layer.

    The tensors are views of the same memory, as bytes: ``(num_blocks, block_size, bytes)``.

    Args:
        kv_caches: The cache.
        spec: Knows the tokens per block, and the names of the layers where it says so.
    """
    block_size = int(getattr(spec, "gpu_block_size", 1))
    tensors = [
        _by_token(each.tensor, each.page_size_bytes, block_size) for each in kv_caches.tensors
    ]
    caches = {f"layer.{number}": tensor for number, tensor in enumerate(tensors)}
    return caches, dict.fromkeys(caches, BlocksFirst)


def _by_token(tensor: torch.Tensor, nbytes: int, block_size: int) -> torch.Tensor:
    import torch

    if nbytes % block_size:
        raise OffloadingOptionError(
            f"Pages of {nbytes} bytes cannot be divided among the {block_size} tokens of a block; "
            "a spec in the seed's style cannot be used with this cache."
        )
    pages = tensor.view(tensor.shape[0], -1).view(torch.uint8)
    return pages[:, :nbytes].view(tensor.shape[0], block_size, nbytes // block_size)
