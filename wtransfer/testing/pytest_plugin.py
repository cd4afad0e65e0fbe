"""Pytest plug-in, loaded by pytest itself: failed asserts of the kits show the values compared.

It imports nothing but pytest: every pytest run of an environment with wtransfer loads it.
"""

from __future__ import annotations

import pytest

KITS = ("connector", "engine", "kit", "policy", "spec", "tier")
# Each by its name: the package is imported already, as this module is in it.
pytest.register_assert_rewrite(*(f"wtransfer.testing.{name}" for name in KITS))
