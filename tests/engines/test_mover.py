"""The engine's thread: one task after the other, whatever becomes of them."""

from __future__ import annotations

import asyncio

import pytest

from wtransfer.engines.mover import MoverThread

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
