"""The offloading connector passes the kit, over the arena."""

from __future__ import annotations

from typing import ClassVar

import pytest

from wtransfer.testing.connector import ConnectorConformance

pytestmark = pytest.mark.slow  # the connector through shared memory passes the same kit each time


class TestOffloadingConnector(ConnectorConformance):
    connector = "OffloadingConnector"
    options: ClassVar = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 2**23}

    def damage(self, bed):
        bed.producer.workers[0].side.side._made.part.slots[:, 100] ^= 1
        return True
