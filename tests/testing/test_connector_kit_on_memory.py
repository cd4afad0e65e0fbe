"""The smallest connector passes the kit, whether its loads end within their step or beyond it."""

from __future__ import annotations

import pytest

from wtransfer.testing.connector import ConnectorConformance
from wtransfer.testing.connector_memory import SHELVES, MemoryConnector

# What the kit promises is seen each time it runs on the built-in ones.
pytestmark = pytest.mark.nightly


class Memory(ConnectorConformance):
    connector_cls = MemoryConnector
    is_shared = True
    in_processes = False
    outlasts = False

    def options_in(self, folder):
        return {"shelf": str(folder), "outlasts": self.outlasts}

    def damage(self, site):
        for kept in SHELVES[str(site.folder)].values():
            next(iter(kept.pages.values())).numpy().reshape(-1)[3] += 1
        return True


class TestMemoryConnector(Memory):
    pass


class TestMemoryConnectorWhoseLoadsOutlastTheStep(Memory):
    outlasts = True
