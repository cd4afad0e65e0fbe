"""The shm engine passes the kit that third parties get."""

from typing import ClassVar

import pytest

from wtransfer.testing.engine import EngineConformance


class TestShm(EngineConformance):
    engine = "shm"


@pytest.mark.nightly
class TestShmInSmallBuckets(EngineConformance):
    engine = "shm"
    options: ClassVar = {"bucket_nbytes": 100}
