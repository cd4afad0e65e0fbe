"""Promise 4: no observer on a worker delays a round, whatever it does; order and facts stay."""

from __future__ import annotations

import re
import threading
import time

import pytest
import torch

from wtransfer.registry import hooks
from wtransfer.testing.fleet import committing
from wtransfer.weight_sync.worker.target import StateDictTarget

DEADLINE_S = 2.0

WORKER = """
import logging, sys, threading, time
import torch
import wtransfer
from wtransfer.registry import hooks

logging.basicConfig(level="WARNING", format="%(message)s")
# Longer than the publisher's deadline: a round that waited for an observer would fail.
hooks.WITHIN_S = 4.0
address, token, kind = sys.argv[1:]

class Noting:
    @wtransfer.hookimpl
    def wtransfer_round_started(self, version, worker):
        print("started", version, worker, flush=True)

    @wtransfer.hookimpl
    def wtransfer_weights_committed(self, version, worker):
        print("committed", version, worker, flush=True)

    @wtransfer.hookimpl
    def wtransfer_round_aborted(self, version, worker):
        print("aborted", version, worker, flush=True)

class Troubling:
    def trouble(self):
        if kind == "hangs":
            threading.Event().wait()
        elif kind == "is slow":
            time.sleep(2.5)
        raise ValueError("no")

    @wtransfer.hookimpl
    def wtransfer_round_started(self):
        self.trouble()

    @wtransfer.hookimpl
    def wtransfer_weights_committed(self):
        self.trouble()

    @wtransfer.hookimpl
    def wtransfer_round_aborted(self):
        self.trouble()

wtransfer.hooks.register(Noting())
wtransfer.hooks.register(Troubling())  # registered last: called first
model = {"w": torch.zeros(3)}
with wtransfer.WorkerSession(model, join=address, token=token, name="w0") as session:
    while True:
        session.commit_pending(1.0)
"""


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("hangs", r"wtransfer_round_started has not returned within .* from __main__.Troubling"),
        pytest.param(
            "is slow",
            r"wtransfer_round_started took \d\.\d s in __main__.Troubling",
            marks=pytest.mark.slow,
        ),
        ("raises", "failed in wtransfer_weights_committed"),
    ],
)
def test_round_waits_for_no_observer_of_a_worker(fleet, run_program, until, kind, named):
    made = fleet({"w": torch.ones(3)}, engine="shm", deadline_s=DEADLINE_S)
    publisher = made.publisher
    worker = run_program(WORKER, publisher.address, publisher.token, kind)
    publisher.wait_for_workers(1, 60.0)
    assert publisher.publish("v1").ok
    assert publisher.publish("dry", dry_run=True).ok
    assert publisher.publish("v2").ok
    until(lambda: len(worker.out().splitlines()) == 6, 30.0)
    assert worker.out().splitlines() == [
        "started v1 w0",
        "committed v1 w0",
        "started dry w0",
        "aborted dry w0",
        "started v2 w0",
        "committed v2 w0",
    ]
    assert re.search(named, worker.err())


class Observer:
    """Does something when the weights are committed on a worker."""

    def __init__(self, act):
        self.act, self.over, self.took_s = act, threading.Event(), None

    @hooks.hookimpl
    def wtransfer_weights_committed(self, worker):
        if worker is not None:
            begun = time.monotonic()
            self.act()
            self.took_s = time.monotonic() - begun
            self.over.set()


@pytest.fixture
def observe():
    made = []

    def register(act):
        made.append(Observer(act))
        hooks.register(made[-1])
        return made[-1]

    yield register
    for each in made:
        hooks.unregister(each)


def test_commit_returns_while_an_observer_has_not(fleet, weights, observe):
    gate = threading.Event()
    observer = observe(lambda: gate.wait(4.0))
    made = fleet(weights)
    session = made.join().session
    round_ = made.publisher.publish("v1", wait=False)
    # As a host does, which has paused its engine meanwhile.
    assert session.commit_pending(10.0)
    assert not observer.over.is_set()
    gate.set()
    assert round_.result(10.0).ok
    assert observer.over.wait(10.0)


def test_closing_waits_for_what_observers_are_still_to_be_told(fleet, weights, observe):
    observer = observe(lambda: time.sleep(0.3))
    made = fleet(weights)
    session = made.join().session
    with committing(session):
        assert made.publisher.publish("v1").ok
    session.close()
    assert observer.over.is_set()


def test_observer_may_close_the_session(fleet, weights, observe):
    made = fleet(weights)
    session = made.join().session
    observer = observe(session.close)
    round_ = made.publisher.publish("v1", wait=False)
    assert session.commit_pending(10.0)
    assert observer.over.wait(10.0)
    assert observer.took_s < hooks.WITHIN_S / 2
    assert round_.result(10.0).ok


class GatedTarget(StateDictTarget):
    """Applies an update once it is let go."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.applying, self.gate = threading.Event(), threading.Event()

    def apply(self, tensors):
        self.applying.set()
        assert self.gate.wait(10.0)
        super().apply(tensors)


def test_commit_during_which_its_session_is_closed_is_notified(fleet, weights, observe):
    observer = observe(lambda: None)
    made = fleet(weights)
    target = GatedTarget({name: tensor.clone() for name, tensor in weights.items()})
    session = made.join(target).session
    made.publisher.publish("v1", wait=False)
    stepping = threading.Thread(target=session.commit_pending, args=(10.0,))
    stepping.start()
    assert target.applying.wait(10.0)
    session.close()
    target.gate.set()
    stepping.join(10.0)
    assert observer.over.wait(10.0)
