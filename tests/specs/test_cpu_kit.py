"""The built-in spec passes the kit."""

from __future__ import annotations

from wtransfer.testing.spec import SpecConformance


class TestCPUOffloadingSpec(SpecConformance):
    spec = "CPUOffloadingSpec"
    size_option = "cpu_bytes_to_use"

    def reach(self, worker, where):
        return memoryview(worker.links[0].part.slots[where.slots[0]])
