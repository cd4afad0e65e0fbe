"""Tensors of a set, all of whose values change from round to round."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from wtransfer.demo.model import ByteTransformer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer.bench.sets import TensorSet

# Whole numbers up to this one are exact in bfloat16.
_NUM_VALUES = 200


class Served(nn.Module):
    """A small transformer that generates text, and much that has to be moved beside it.

    Args:
        shapes: What is moved beside it.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.transformer = _transformer(seed=0)
        self.ballast = nn.ParameterDict(
            {name.replace(".", "_"): _zeros(shape) for name, shape in shapes.items()}
        )
        self.requires_grad_(requires_grad=False)

    def renew(self, number: int) -> None:
        """Give everything other values than in the round before, such that text can be made."""
        self.transformer.load_state_dict(_transformer(seed=1 + number).state_dict())
        renew(dict(self.ballast), number)


def _transformer(seed: int) -> ByteTransformer:
    return ByteTransformer.of_size(4.0, seed).eval()


def make(tensors: TensorSet) -> dict[str, torch.Tensor]:
    """Return the tensors of a set, all 0; memory that nobody has written to is not taken yet."""
    return {name: _zeros(shape) for name, shape in tensors.shapes().items()}


def _zeros(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16)


def renew(tensors: Mapping[str, torch.Tensor], number: int) -> None:
    """Give every element another value than it had in the round before."""
    for tensor in tensors.values():
        tensor.fill_(1 + number % _NUM_VALUES)


def are_those_of(tensors: Mapping[str, torch.Tensor], number: int) -> bool:
    """Whether first and last element of every tensor have the value of a round."""
    value = 1 + number % _NUM_VALUES
    flat = (tensor.view(-1) for tensor in tensors.values())
    return all(float(each[0]) == value == float(each[-1]) for each in flat)
