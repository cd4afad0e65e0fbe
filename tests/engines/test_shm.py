"""The shm engine passes the kit that third parties get."""

from wtransfer.testing.engine import EngineConformance


class TestShm(EngineConformance):
    engine = "shm"


class TestShmInSmallBuckets(EngineConformance):
    engine = "shm"
    options = {"bucket_nbytes": 100}
