"""The in-memory backends pass the kits of their kinds."""

from __future__ import annotations

import pytest
import torch

from wtransfer.testing.connector import ConnectorConformance
from wtransfer.testing.engine import EngineConformance
from wtransfer.testing.fakes import SHELVES, MemoryConnector, MemoryEngine, MemorySpec
from wtransfer.testing.spec import SpecConformance


class TestMemoryEngine(EngineConformance):
    engine_cls = MemoryEngine


class TestMemorySpec(SpecConformance):
    spec_cls = MemorySpec
    size_option = "memory_bytes_to_use"

    def reach(self, worker, where):
        return worker.kept[where.slots[0], 0].data.numpy().data


@pytest.mark.nightly  # broken ones of it run through the kit, and built-in ones pass, each time
class TestMemoryConnector(ConnectorConformance):
    connector_cls = MemoryConnector
    is_shared = True
    in_processes = False
    is_long = True
    outlasts = False

    def options_in(self, folder):
        return {"shelf": str(folder), "outlasts": self.outlasts}

    def damage(self, bed, where):
        for kept in SHELVES[str(bed.folder)].values():
            pages = [page.view(torch.uint8).reshape(-1) for page in kept.pages.values()]
            number, place = divmod(round(where * (len(pages) * len(pages[0]) - 1)), len(pages[0]))
            pages[number][place] ^= 1
        return True


class TestMemoryConnectorWhoseLoadsOutlastTheStep(TestMemoryConnector):
    outlasts = True
