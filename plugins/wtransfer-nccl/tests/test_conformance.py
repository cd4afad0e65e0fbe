"""The engine passes the kit that third parties get: over gloo, and where mistakes are loud."""

import threading
from typing import ClassVar

import pytest
from wtransfer.testing.communicator import memory_group
from wtransfer.testing.engine import EngineConformance

from wtransfer_nccl.engine import NCCLWeightTransferEngine
from wtransfer_nccl.trainer import NCCLTrainerEngine

SMALL = 100_000


class TestOnDevice(EngineConformance):
    engine = "nccl"
    # Gloo keeps a broadcast that was cut off, with its thread, until its time-out.
    options: ClassVar = {"communicator": "gloo", "timeout_s": 4.0}
    ends_within_s = 8.0


class Groups:
    """Groups in this process, by the names of their meetings."""

    def __init__(self):
        self._groups = {}
        self._lock = threading.Lock()

    def member(self, name, rank, size):
        with self._lock:
            group = self._groups.setdefault(name, memory_group(size))
        return group[rank]


groups = Groups()


class LoudTrainer(NCCLTrainerEngine):
    def form_group(self, rendezvous, world_size):
        return groups.member(rendezvous.name, 0, world_size)


class LoudEngine(NCCLWeightTransferEngine):
    trainer_cls = LoudTrainer

    def form_group(self, rendezvous, init_info, rank):
        return groups.member(rendezvous.name, rank, init_info.world_size)


@pytest.mark.slow
class TestWhereNCCLWouldHang(EngineConformance):
    """Order, sizes, and memory that is still in use are checked by each operation."""

    engine_cls = LoudEngine
    options: ClassVar = {"communicator": "gloo", "packed_buffer_size_bytes": SMALL}


@pytest.mark.nightly
class TestPinnedWhereNCCLWouldHang(EngineConformance):
    """The slots that take turns are never received into before they are free."""

    engine_cls = LoudEngine
    options: ClassVar = {
        "communicator": "gloo",
        "packed_buffer_size_bytes": SMALL,
        "atomic": "pinned",
    }


@pytest.mark.nightly
class TestUnstagedWhereNCCLWouldHang(EngineConformance):
    """No bucket's memory goes while it is received into."""

    engine_cls = LoudEngine
    options: ClassVar = {
        "communicator": "gloo",
        "packed_buffer_size_bytes": SMALL,
        "atomic": "none",
    }
