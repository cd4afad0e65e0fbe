"""A process that ends with a publisher or a session that is open, or was closed just now."""

from __future__ import annotations

import os
import signal
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


@pytest.mark.timeout(240)  # the deadline is a minute
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="needs job control")
def test_trainer_that_ends_in_a_stalled_transfer_does_not_wait_out_the_deadline(run_program):
    address = f"unix:@wt-exit-{os.getpid()}"
    trainer = run_program(TRAINER, address)
    run_program(WORKER, address)
    begun = time.monotonic()
    while trainer.out() != "ends\n":
        assert time.monotonic() < begun + DEADLINE_S, trainer.err()
        time.sleep(0.01)
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
def test_process_ends_well_right_after_a_round_of_gloo(run_program, left):
    program = run_program(BOTH_SIDES, left)
    assert program.wait(60) == 0, program.err()
