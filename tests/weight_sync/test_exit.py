"""A process that ends with a publisher or a session that is open, or was closed just now."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

DEADLINE_S = 60

WORKER = """
import os, signal, sys, time, torch
from wtransfer import WorkerSession
from wtransfer.engines.shm import ShmWeightTransferEngine

def stop(*_):
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(3600)  # this thread may run on for a moment, and must not return

ShmWeightTransferEngine.receive_weights = stop
with WorkerSession({"w": torch.zeros(3)}, join=sys.argv[1], token="secret") as session:
    while True:
        session.commit_pending(1.0)
"""

TRAINER = """
import sys, time, torch
from wtransfer import Publisher

publisher = Publisher({"w": torch.ones(3)}, listen=sys.argv[1], token="secret", deadline_s=60)
publisher.wait_for_workers(1, 60)
round_ = publisher.publish("v1", wait=False)
while round_.phase not in ("transfer", "over"):
    time.sleep(0.01)
time.sleep(1)
assert round_.phase == "transfer"
print("ends", flush=True)
"""


@pytest.fixture
def run():
    """Starts programs; they are killed at the end."""
    started = []

    def start(program, *arguments):
        command = [sys.executable, "-c", program, *arguments]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for each in started:
        each.kill()
        each.wait()
        each.stdout.close()


@pytest.mark.timeout(240)  # two interpreters import torch, on a machine that may be busy
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs job control")
def test_trainer_that_ends_in_a_stalled_transfer_does_not_wait_out_the_deadline(run):
    address = f"unix:@wt-exit-{os.getpid()}"
    trainer = run(TRAINER, address)
    run(WORKER, address)
    assert trainer.stdout.readline() == "ends\n"
    begun = time.monotonic()
    trainer.wait(2 * DEADLINE_S)
    assert time.monotonic() - begun < DEADLINE_S / 2


BOTH_SIDES = """
import sys, threading, torch
from wtransfer import Publisher, WorkerSession

publisher = Publisher({"w": torch.ones(3)}, engine="gloo", token="secret")
session = WorkerSession({"w": torch.zeros(3)}, join=publisher.address, token="secret")
publisher.wait_for_workers(1, 60)
round_ = publisher.publish("v1", wait=False)
session.wait_for("v1", 60)
assert round_.result(60).ok
if sys.argv[1] == "closed":
    session.close()
    publisher.close()
"""


@pytest.mark.parametrize("left", ["closed", "open"])
def test_process_ends_well_right_after_a_round_of_gloo(run, left):
    assert run(BOTH_SIDES, left).wait(60) == 0
