"""What tensors hold, by means that have nothing to do with what is under test."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from wtransfer.manifest import DTYPES

if TYPE_CHECKING:
    from collections.abc import Mapping

TRAVELLING_DTYPES: tuple[torch.dtype, ...] = tuple(
    dtype for name in DTYPES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
)
"""Every wire dtype that this torch has."""


def contents(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Return name -> dtype, shape and SHA-256 of the bytes: equal if and only if the tensors are.

    Args:
        tensors: Any dtypes, shapes and strides.
    """
    return {name: _content(tensor) for name, tensor in tensors.items()}


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return a tensor of random bits, the same for the same seed.

    Floats may be NaN or infinite: every pattern of bits has to travel.

    Args:
        dtype: Any that travels.
        shape: Any, also ``()`` and with zeros.
        seed: Any integer.
    """
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator, dtype=torch.uint8).bool()
    tensor = torch.empty(shape, dtype=dtype)
    bits = tensor.view(-1).view(torch.uint8)
    bits.copy_(torch.randint(0, 256, bits.shape, generator=generator, dtype=torch.uint8))
    return tensor


def _content(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(flat.numpy().data).hexdigest()
