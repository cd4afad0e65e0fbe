"""The shm engine passes the kit that third parties get, and keeps no memory past its use."""

from __future__ import annotations

import ctypes
import errno
import socket
import time
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from wtransfer.calls import start_call
from wtransfer.config import ParallelConfig, WeightTransferConfig
from wtransfer.engines.factory import WeightTransferEngineFactory
from wtransfer.engines.shm import ShmInitInfo, ShmTrainerEngine, ShmWeightTransferEngine
from wtransfer.errors import (
    ClosedError,
    EngineError,
    NotInitializedError,
    SegmentGoneError,
    StagingMemoryError,
)
from wtransfer.manifest import Manifest
from wtransfer.testing.engine import EngineConformance
from wtransfer.testing.faults import Fault
from wtransfer.testing.leftovers import Leftovers
from wtransfer.transport import memory
from wtransfer.transport.layout import TensorLayout


class TestShm(EngineConformance):
    engine = "shm"


@pytest.mark.nightly
class TestShmInSmallBuckets(EngineConformance):
    engine = "shm"
    options: ClassVar = {"bucket_nbytes": 100}


def segments(sharing):
    """Return the inodes of the segments mapped here: "s" by a trainer, "p" by a worker."""
    lines = [line.split() for line in Path("/proc/self/maps").read_text("utf-8").splitlines()]
    return {each[4] for each in lines if "/memfd:wtransfer" in each and each[1][3] == sharing}


def test_lease_ends_with_the_round(fleet, engines, faults, weights):
    made = fleet(weights, engine=engines["shm"])
    made.join(commit="copy", keep_previous=False)
    for version in ("v1", "v2", "v3"):
        assert made.publish(version).ok
        assert segments("p") == set()
        assert len(segments("s")) <= 2
    faults.arm(Fault("raise", tensor=2))
    with pytest.raises(EngineError, match="injected"):
        made.publish("fails")
    end = time.monotonic() + 5
    while segments("p"):
        assert time.monotonic() < end
        time.sleep(0.01)


def test_sockets_are_beside_that_of_the_publisher_and_leave_with_it(fleet, weights, tmp_path):
    made = fleet(weights, engine="shm", listen=f"unix:{tmp_path}/publisher")
    made.join()
    for version in ("v1", "v2"):
        assert made.publish(version).ok
    control, data = sorted(tmp_path.iterdir())
    assert data.name.startswith(f"{control.name}.")
    made.close()
    assert set(tmp_path.iterdir()) == set()


@pytest.mark.parametrize("commit", ["adopt", "copy"])
def test_aborted_rounds_take_no_more_segments(fleet, engines, faults, commit):
    # Large enough to be adopted.
    made = fleet({f"w{i}": torch.zeros(1 << 14) for i in range(4)}, engine=engines["shm"])
    for _ in range(2):
        made.join(commit=commit)
    used = set()
    for number in range(4):
        faults.arm(Fault("raise", tensor=2, worker=number % 2))
        with pytest.raises(EngineError, match="injected"):
            made.publish("fails")
        assert made.publish(f"v{number}").ok
        used |= segments("s")
    assert len(used) == 2


def test_segment_whose_memory_was_not_all_taken_is_not_written_to(fleet, engines, monkeypatch):
    made = fleet({"w": torch.zeros(3 << 20)}, engine=engines["shm"])
    made.join()
    advise = memory._madvise

    def out_of_memory(address, nbytes, advice):
        if advice != memory._MADV_POPULATE_WRITE:
            return advise(address, nbytes, advice)
        ctypes.set_errno(errno.ENOMEM)
        return -1

    with monkeypatch.context() as patch:
        patch.setattr(memory, "_madvise", out_of_memory)
        with pytest.raises(StagingMemoryError, match="taking 12,582,912 bytes of shared memory"):
            made.publish("v1")
        failed = segments("s")
    assert made.publish("v2").ok
    assert len(segments("s") - failed) == 1


def test_shutdown_frees_everything_though_engines_are_still_referenced(fleet, weights):
    kept = []

    class KeptTrainer(ShmTrainerEngine):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            kept.append(self)

    class KeptWorker(ShmWeightTransferEngine):
        trainer_cls = KeptTrainer

        def __init__(self, *args):
            super().__init__(*args)
            kept.append(self)

    WeightTransferEngineFactory.register_engine("tests-shm-kept", KeptWorker)
    leftovers = Leftovers()
    made = fleet(weights, engine="tests-shm-kept")
    made.join(commit="copy")
    for version in ("v1", "v2"):
        assert made.publish(version).ok
    made.close()
    assert len(kept) == 2
    assert leftovers.found() == []


def test_late_request_for_an_older_update_is_refused(fleet, weights):
    received = []

    class NotedWorker(ShmWeightTransferEngine):
        def receive_weights(self, update_info, load_weights):
            received.append((self, update_info))
            super().receive_weights(update_info, load_weights)

    WeightTransferEngineFactory.register_engine("tests-shm-noted", NotedWorker)
    made = fleet(weights, engine="tests-shm-noted")
    made.join(commit="copy", keep_previous=False)
    for version in ("v1", "v2", "v3"):
        assert made.publish(version).ok
    assert len(segments("s")) == 2, "v3 has the memory of v1"
    worker, first = received[0]
    worker.start_weight_update()
    with pytest.raises(SegmentGoneError):
        worker.receive_weights(first, list)


def test_wait_for_a_trainer_that_does_not_answer_ends_with_the_round():
    worker = ShmWeightTransferEngine(WeightTransferConfig("shm"), ParallelConfig())
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind("")
        silent.listen()
        address = f"unix:@{silent.getsockname().decode()[1:]}"
        worker.init_transfer_engine(ShmInitInfo(address, "secret"))
        worker.set_layout(TensorLayout(Manifest(())))
        worker.start_weight_update()
        info = worker.parse_update_info({"segment": 0, "first": 0, "last": 0})
        receiving = start_call(lambda: worker.receive_weights(info, list), "receiving")
        with silent.accept()[0]:
            worker.abort_weight_update()
            assert receiving.done.wait(20)
    assert isinstance(receiving.error, ClosedError)
    worker.shutdown()


def test_receiving_without_a_layout_is_refused():
    worker = ShmWeightTransferEngine(WeightTransferConfig("shm"), ParallelConfig())
    worker.init_transfer_engine(ShmInitInfo("unix:@nowhere", "secret"))
    info = worker.parse_update_info({"segment": 0, "first": 0, "last": 1})
    with pytest.raises(NotInitializedError, match="no layout"):
        worker.receive_weights(info, list)
    worker.shutdown()
