"""NCCL itself: two ranks, on two cards, or on one where NCCL allows it.

With ``NCCL_MULTI_RANK_GPU_ENABLE=1`` several ranks share a card, from NCCL 2.30 on.
"""

import os

import pytest
import torch
import torch.distributed
import wtransfer
from workers import WorkerProcess, await_workers
from wtransfer.transport.digests import digest

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
SINCE = (2, 30)


def missing():
    """Return why NCCL cannot be run here; None if it can."""
    if not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} has no NCCL"
    if not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    if torch.cuda.device_count() > 1:
        return None
    if os.environ.get(SHARING) != "1":
        return f"one card; {SHARING}=1 lets two ranks share it"
    version = torch.cuda.nccl.version()
    if version[:2] < SINCE:
        return f"one card, and NCCL is {version}; ranks share a card from {SINCE} on"
    return None


WHY_NOT = missing()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY_NOT is not None, reason=f"{WHY_NOT}")]


@pytest.fixture(autouse=True)
def worker_device(monkeypatch):
    """Workers use the second card, if there is one."""
    last = torch.cuda.device_count() - 1
    monkeypatch.setenv("WTRANSFER_NCCL_DEVICE", f"cuda:{last}")
    return f"cuda:{last}"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("atomic", ["device", "pinned", "none"])
def test_weights_go_from_card_to_card(worker_device, atomic):
    source = {
        "big": torch.zeros(1 << 20, device="cuda:0"),
        "small": torch.zeros(3, dtype=torch.bfloat16, device="cuda:0"),
    }
    options = {"atomic": atomic, "packed_buffer_size_bytes": 1_000_000}
    with wtransfer.Publisher(source, engine="nccl", options=options, deadline_s=60.0) as publisher:
        worker = WorkerProcess(publisher, "worker", worker_device)
        try:
            await_workers(publisher, 1)
            for number in range(1, 6):
                source["big"].add_(number)
                source["small"].sub_(number)
                report = publisher.publish(f"v{number}")
                assert report.ok, str(report)
                digests = [digest(each, "wsum64") for each in source.values()]
                assert worker.next_line() == [f"v{number}", *digests]
            # The process of a trainer outlives its workers, and its group.
            worker.kill()
            await_workers(publisher, 0)
            worker = WorkerProcess(publisher, "replacement", worker_device)
            await_workers(publisher, 1)
            assert publisher.publish("v6").ok
        finally:
            worker.close()
