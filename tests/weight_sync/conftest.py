"""Fleets in this process, and the check that nothing is left."""

from __future__ import annotations

import pytest
import torch

from wtransfer.testing.fleet import Fleet


@pytest.fixture(autouse=True)
def leaves_nothing(leaves_nothing):
    """Look at every test of this folder so."""


@pytest.fixture
def fleet(leaves_nothing):
    """Maker of fleets that are closed at the end of the test."""
    fleets = []

    def make(source, **options):
        made = Fleet(source, **{"deadline_s": 5.0} | options)
        fleets.append(made)
        return made

    yield make
    while fleets:
        fleets.pop().close()


@pytest.fixture
def weights():
    """Names and tensors: four of one shape and dtype, so that they can be mistaken."""
    return {f"layer.{i}": torch.arange(12.0).view(3, 4) + 100 * i for i in range(4)}
