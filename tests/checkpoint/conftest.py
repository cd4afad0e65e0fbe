"""The check that nothing is left."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def leaves_nothing(leaves_nothing):
    """Look at every test of this folder so."""
