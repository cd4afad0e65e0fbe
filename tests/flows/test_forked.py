"""FAULTS 20: fork() after init, and use in the child."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from wtransfer.transport.address import random_address


def test_a_session_is_refused_in_a_forked_child_and_the_parent_is_unharmed(flow):
    trainer = flow.trainer()
    worker = flow.worker()
    trainer.ask("wait", n=1)
    trainer.ask("publish", number=1)
    uses = worker.ask("in_fork")
    assert uses == {
        "commit_pending": "ForkedError",
        "discard_pending": "ForkedError",
        "join": "ForkedError",
        "close": "None",
    }
    assert worker.look()["connected"]
    assert trainer.ask("publish", number=2)["ok"]
    flow.holds(worker, 2)


def test_a_publisher_is_refused_in_a_forked_child_and_the_parent_is_unharmed(flow):
    trainer = flow.trainer()
    worker = flow.worker()
    trainer.ask("wait", n=1)
    worker.witness.hold("transfer")
    trainer.ask("begin", number=1)
    worker.until_held()
    uses = trainer.ask("in_fork", timeout_s=60)
    assert uses == {
        "publish": "ForkedError",
        "wait_for_workers": "ForkedError",
        "workers": "ForkedError",
        "close": "None",
        "packed": "ForkedError",
        "result": "ForkedError",
        "abort": "ForkedError",
    }
    worker.go_on()
    assert trainer.ask("result")["ok"]
    assert trainer.ask("publish", number=2)["ok"]
    flow.holds(worker, 2)


@pytest.fixture
def lingering():
    """Forked children that outlive their parents; ended by pid when the test ends."""
    with contextlib.ExitStack() as stack:

        def note(pid):
            stack.callback(_end, pid)
            return pid

        yield note


def _end(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def alive(pid):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


@pytest.mark.slow
def test_a_forked_child_does_not_keep_a_killed_trainers_connections_open(flow, lingering):
    home = {"listen": random_address(), "token": "t"}
    trainer = flow.trainer(**home)
    worker = flow.worker()
    trainer.ask("wait", n=1)
    trainer.ask("publish", number=1)
    worker.witness.hold("transfer")
    trainer.ask("begin", number=2)
    worker.until_held()
    child = lingering(trainer.ask("linger"))
    killed_at = trainer.kill()
    # Otherwise the worker would be free at the publisher's deadline only, after 30 s.
    assert worker.ask("until_free", within_s=10) - killed_at < 10
    assert alive(child)
    worker.go_on()
    # Its address is free again, too.
    successor = flow.trainer(**home)
    successor.ask("wait", n=1)
    assert successor.ask("publish", number=3)["ok"]
    flow.holds(worker, 3)


def test_a_forked_child_does_not_keep_a_killed_workers_connection_open(flow, failing, lingering):
    trainer = flow.trainer()
    worker = flow.worker()
    trainer.ask("wait", n=1)
    trainer.ask("publish", number=1)
    worker.witness.hold("transfer")
    trainer.ask("begin", number=2)
    worker.until_held()
    child = lingering(worker.ask("linger"))
    trainer.order("result")
    killed_at = worker.kill()
    with failing("PeerLostError") as lost:
        trainer.answer()
    assert lost.ended - killed_at < 10
    assert alive(child)
    # The child still maps what its parent had: the trainer takes other memory meanwhile.
    other = flow.worker()
    trainer.ask("wait", n=1)
    for number in (3, 4, 5):
        assert trainer.ask("publish", number=number)["ok"]
        flow.holds(other, number)
