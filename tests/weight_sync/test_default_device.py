"""Programs may have set torch's default device; the memory that we take is where it is needed."""

import threading

import pytest
import torch

from wtransfer.testing.contents import contents, random_tensor
from wtransfer.testing.fleet import Fleet

pytestmark = pytest.mark.usefixtures("libuv")


class ThreadsElsewhere(threading.Thread):
    """A thread for which torch makes tensors without memory, unless it is told where."""

    def run(self):
        with torch.device("meta"):
            super().run()


@pytest.fixture
def elsewhere(monkeypatch, source):  # the trainer's tensors are there before
    """From here on, in every thread, as `torch.set_default_device` does it in one."""
    monkeypatch.setattr(threading, "Thread", ThreadsElsewhere)
    with torch.device("meta"):
        yield


@pytest.fixture
def source():
    return {
        "big": random_tensor(torch.bfloat16, (300, 1000), seed=1),
        "strided": random_tensor(torch.float32, (70, 80), seed=2).t(),
        "small": random_tensor(torch.float32, (3,), seed=3),
        "empty": torch.empty(0, 4),
    }


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("commit", ["adopt", "copy"])
@pytest.mark.parametrize("engine", ["shm", "memory", "gloo", "file"])
def test_a_default_device_moves_nothing(engines, source, tmp_path, engine, commit):
    options = {"path": str(tmp_path / "store")} if engine == "file" else {}
    with Fleet(source, engine=engines.get(engine, engine), options=options) as fleet:
        members = [
            fleet.join({name: tensor.clone() for name, tensor in source.items()}, commit=commit)
            for _ in range(2)
        ]
        for version in ("v1", "v2"):
            source["big"].view(torch.uint8).add_(1)
            source["small"].view(torch.uint8).add_(1)
            report = fleet.publish(version)
            assert report.ok, str(report)
            assert [member.contents for member in members] == [contents(source)] * 2
