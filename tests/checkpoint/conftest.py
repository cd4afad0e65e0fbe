"""Fleets that publish to a folder of versions."""

from __future__ import annotations

import contextlib

import pytest
import torch

from wtransfer.checkpoint.versions import VersionStore
from wtransfer.testing.fleet import Fleet


@pytest.fixture(autouse=True)
def leaves_nothing(leaves_nothing):
    """Look at every test of this folder so."""


@pytest.fixture
def weights():
    """Four tensors of one shape and dtype, so that they can be mistaken."""
    return {f"layer.{i}": torch.arange(12.0).view(3, 4) + 100 * i for i in range(4)}


@pytest.fixture
def store(tmp_path):
    """A folder of versions that does not exist yet."""
    return VersionStore(tmp_path / "store")


@pytest.fixture
def publishing(leaves_nothing, store, weights):
    """Maker of fleets with one worker that publish to the store."""
    with contextlib.ExitStack() as fleets:

        def make(**options):
            options = {"path": str(store.root), **options}
            made = Fleet(weights, engine="file", options=options, deadline_s=5.0)
            fleets.enter_context(made)
            made.join()
            return made

        yield make
