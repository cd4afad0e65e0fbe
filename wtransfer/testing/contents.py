"""Compare tensors by SHA-256, independently of the digests of the package."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import torch

from wtransfer.dtypes import DTYPES

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
    """Return a tensor of random bits, the same for the same seed, on the default device.

    Floats may be NaN or infinite: every pattern of bits has to travel.

    Args:
        dtype: Any wire dtype.
        shape: Any, also ``()`` and with zeros.
        seed: Any integer.
    """
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.empty(shape, dtype=dtype)
    as_bytes = tensor.view(-1).view(torch.uint8)
    end = 2 if dtype is torch.bool else 256
    # Drawn on the host, so that the bits are the same on every device.
    drawn = torch.randint(
        0, end, as_bytes.shape, generator=generator, dtype=torch.uint8, device="cpu"
    )
    as_bytes.copy_(drawn)
    return tensor


def _content(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], str]:
    flat = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return str(tensor.dtype), tuple(tensor.shape), hashlib.sha256(flat.numpy().data).hexdigest()
