"""Weights, and the check that nothing is left."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def leaves_nothing(leaves_nothing):
    """Look at every test of this folder so."""


@pytest.fixture
def weights():
    """Names and tensors: four of one shape and dtype, so that they can be mistaken."""
    return {f"layer.{i}": torch.arange(12.0).view(3, 4) + 100 * i for i in range(4)}
