"""The built-in spec passes the kit, under both of its policies and in the seed's configs."""

from __future__ import annotations

from typing import ClassVar

import pytest

from wtransfer.testing.spec import SpecConformance


class Kit(SpecConformance):
    spec = "CPUOffloadingSpec"
    size_option = "cpu_bytes_to_use"

    def reach(self, worker, where):
        return memoryview(worker.part.slots[where.slots[0]])


class TestLru(Kit):
    """By default."""


@pytest.mark.slow
class TestArc(Kit):
    options: ClassVar = {"eviction_policy": "arc"}


@pytest.mark.slow
class TestOneThread(Kit):
    options: ClassVar = {"num_copy_threads": 1}
