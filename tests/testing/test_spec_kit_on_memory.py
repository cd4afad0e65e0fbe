"""The smallest spec passes the kit."""

from __future__ import annotations

from wtransfer.testing.memory_spec import MemorySpec
from wtransfer.testing.spec import SpecConformance


class TestMemorySpec(SpecConformance):
    spec_cls = MemorySpec
    size_option = "memory_bytes_to_use"

    def reach(self, worker, where):
        return memoryview(worker.slots[where.slots[0]].pages[0, 1].numpy())
