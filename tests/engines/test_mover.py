"""The engine's thread: one task after the other, whatever becomes of them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from wtransfer.weight_sync.worker import hosted
from wtransfer.weight_sync.worker.mover import MoverThread

PATIENCE_S = 5.0


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError])
def test_a_task_that_raises_is_done_and_the_next_one_runs(caplog, error):
    def fail():
        raise error("no")

    ran = []
    mover = MoverThread("tests-mover")
    failed = mover.submit(fail)
    after = mover.submit(lambda: ran.append(mover.runs_here()))
    mover.stop()
    assert failed.wait(PATIENCE_S)
    assert after.wait(PATIENCE_S)
    mover.join(PATIENCE_S)
    assert ran == [True]
    assert "tests-mover: a task failed" in caplog.text


def test_a_second_abort_of_a_hanging_call_leaves_the_next_thread_alone(monkeypatch):
    monkeypatch.setattr(hosted, "UNBLOCK_GRACE_S", 0.05)
    engine = hosted.HostedEngine(0, 1, None)
    release = threading.Event()
    hanging = engine.submit(lambda: release.wait(20))
    engine.abort(hanging)
    started, on_current_thread = threading.Event(), []

    def call():
        started.set()
        release.wait(0.5)
        on_current_thread.append(engine._mover.runs_here())

    after = engine.submit(call)
    assert started.wait(5)
    engine.abort(hanging)
    release.set()
    assert after.wait(5)
    assert on_current_thread == [True]
    engine.shutdown()
