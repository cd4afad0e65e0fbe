"""Tensors as one stream of bytes, cut into buckets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

BUCKET_NBYTES = 64 << 20
"""Size of a bucket."""


def cut(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield for each bucket the pieces of memory that it holds, in order.

    Args:
        tensors: Contiguous; large ones are spread over several buckets.
    """
    bucket: list[torch.Tensor] = []
    free = BUCKET_NBYTES
    for tensor in tensors:
        rest = tensor.view(-1).view(torch.uint8)
        while rest.numel():
            bucket.append(rest[:free])
            rest, free = rest[free:], free - bucket[-1].numel()
            if free == 0:
                yield bucket
                bucket, free = [], BUCKET_NBYTES
    if bucket:
        yield bucket


def pack(memory: torch.Tensor, pieces: Iterable[torch.Tensor]) -> torch.Tensor:
    """Copy pieces into a bucket's memory; return what is full of it."""
    end = 0
    for piece in pieces:
        memory[end : end + piece.numel()].copy_(piece)
        end += piece.numel()
    return memory[:end]


def unpack(memory: torch.Tensor, pieces: Iterable[torch.Tensor]) -> None:
    """Copy a bucket's memory into the pieces."""
    start = 0
    for piece in pieces:
        piece.copy_(memory[start : start + piece.numel()])
        start += piece.numel()
