"""Trainer and workers in processes of their own, over gloo: nothing is shared but the network."""

import pytest
import torch
import wtransfer
from workers import WorkerProcess, await_workers
from wtransfer.transport.digests import digest


@pytest.fixture
def source():
    return {"big": torch.zeros(1 << 20), "small": torch.zeros(3, dtype=torch.bfloat16)}


@pytest.fixture
def publisher(source):
    options = {"communicator": "gloo", "packed_buffer_size_bytes": 100_000}
    with wtransfer.Publisher(source, engine="nccl", options=options, deadline_s=60.0) as made:
        yield made


@pytest.fixture
def start(publisher):
    started = []

    def start_one(name):
        started.append(WorkerProcess(publisher, name))
        return started[-1]

    yield start_one
    for worker in started:
        worker.close()


def publish(publisher, source, number, workers):
    for tensor in source.values():
        tensor.add_(number)
    report = publisher.publish(f"v{number}")
    assert report.ok, str(report)
    expected = [f"v{number}", *(digest(each, "wsum64") for each in source.values())]
    assert [worker.next_line() for worker in workers] == [expected] * len(workers)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_workers_come_and_go_between_rounds(publisher, source, start):
    first, second = start("first"), start("second")
    await_workers(publisher, 2)
    publish(publisher, source, 1, [first, second])
    publish(publisher, source, 2, [first, second])
    second.kill()
    await_workers(publisher, 1)
    publish(publisher, source, 3, [first])
    third = start("third")
    await_workers(publisher, 2)
    publish(publisher, source, 4, [first, third])
