"""The loop's thread outlives its callbacks."""

from __future__ import annotations

import asyncio
import threading

import pytest

from wtransfer.transport.loop import Loop


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError])
def test_a_callback_that_raises_is_logged_and_the_loop_goes_on(caplog, error):
    def fail():
        raise error("no")

    went_on = threading.Event()
    loop = Loop("tests-loop")
    loop.start()
    try:
        loop.call_soon(fail)
        loop.call_soon(went_on.set)
        assert went_on.wait(5.0)
    finally:
        loop.call_soon(loop.stop)
        loop.join()
    assert "tests-loop: a handler failed" in caplog.text
