"""A host that is busy: workers are late, and many attach at the same moment."""

from __future__ import annotations

import contextlib
import time

import pytest
import torch

from wtransfer.weight_sync.trainer.publisher import Publisher

DEADLINE_S = 8.0
NUM_TENSORS = 200


@pytest.mark.parametrize("late_s", [1.3, pytest.param(DEADLINE_S / 2, marks=pytest.mark.slow)])
def test_worker_that_is_late_as_it_attaches_ends_no_round(flow, late_s):
    trainer = flow.trainer(deadline_s=DEADLINE_S)
    workers = flow.workers(2)
    flow.publish(trainer, 1, workers)
    flow.held_in(trainer, workers[0], "attach")
    time.sleep(late_s)
    workers[0].go_on()
    assert trainer.ask("result")["ok"]
    for worker in workers:
        flow.holds(worker, 2)


@pytest.mark.nightly
def test_two_hundred_workers_of_a_host_take_part_in_every_round(zygote):
    weights = {f"w{index}": torch.zeros(64) for index in range(NUM_TENSORS)}
    with contextlib.ExitStack() as stack:
        publisher = Publisher(weights)
        stack.callback(publisher.close)
        where = publisher.address, publisher.token
        for number in range(4):
            crowd = zygote.spawn("flow_crowd:main", *where, f"crowd{number}", 50, NUM_TENSORS)
            stack.callback(crowd.wait, 10.0)
            stack.callback(crowd.kill)
        publisher.wait_for_workers(200, 60.0)
        for number in range(10):
            for tensor in weights.values():
                tensor.fill_(number)
            report = publisher.publish(f"v{number}")
            assert report.ok
            assert len(report.workers) == 200
