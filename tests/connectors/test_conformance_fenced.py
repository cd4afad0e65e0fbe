"""A third party's connector that knows nothing of weights passes the kit, behind its fence."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from wtransfer.testing.connector import ConnectorConformance

# The processes of the kit find what this one does.
sys.path.append(str(Path(__file__).parent))


class Kit(ConnectorConformance):
    module_path = "tokens_connector"
    is_shared = True

    def damage(self, bed):
        files = list(bed.folder.iterdir())
        for file in files:
            os.truncate(file, file.stat().st_size - 1)
        return bool(files)


class TestTokensConnector(Kit):
    """Loads end within their step."""

    connector = "TokensConnector"

    def options_in(self, folder):
        return {"folder": str(folder)}


@pytest.mark.slow  # the other one passes the same kit each time
class TestTokensConnectorWhoseLoadsOutlastTheStep(Kit):
    """In the style of the seed, and loads end beyond their step."""

    connector = "SeedTokensConnector"

    def options_in(self, folder):
        return {"folder": str(folder), "outlasts": True}
