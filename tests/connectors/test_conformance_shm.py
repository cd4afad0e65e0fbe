"""The shared memory connector passes the kit."""

from __future__ import annotations

from typing import ClassVar

from wtransfer.testing.connector import ConnectorConformance


class TestSharedMemoryConnector(ConnectorConformance):
    connector = "SharedMemoryConnector"
    kind = "transfer"
    options: ClassVar = {"shelf_bytes": 2**22, "lease_s": 2.0, "deadline_s": 5.0}

    def damage(self, bed):
        buffer = bed.producer.workers[0].side.side._buffer
        for number in range(buffer.num_slots):
            buffer.memory.slots[number, buffer.geometry.nbytes // 2] ^= 1
        return True
