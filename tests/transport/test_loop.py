"""One thread serves all ends of a process, and outlives its callbacks."""

from __future__ import annotations

import asyncio
import threading

import pytest

from wtransfer.transport.lease import SegmentExporter
from wtransfer.transport.loop import Loop


def channel_threads():
    return [thread for thread in threading.enumerate() if thread.name == "wtransfer-channel"]


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError])
def test_a_callback_that_raises_is_logged_and_the_loop_goes_on(caplog, error):
    def fail():
        raise error("no")

    went_on = threading.Event()
    loop = Loop.enter(went_on)
    loop.call_soon(fail)
    loop.call_soon(went_on.set)
    assert went_on.wait(5.0)
    loop.leave(went_on)
    loop.call_soon(lambda: None)
    loop.wait(went_on)
    assert "a handler of the channel failed" in caplog.text
    assert channel_threads() == []


def test_one_thread_serves_every_listener_dialer_and_exporter(channel, messages):
    pairs = [channel.pair() for _ in range(4)]
    SegmentExporter().close()
    assert len(channel_threads()) == 1
    for number, both in enumerate(pairs):
        both.to_worker.send(messages.Word(str(number)))
        assert both.worker.message().text == str(number)
    # Those that are left go on without those that end.
    pairs[0].listener.close()
    pairs[0].dialer.close()
    pairs[1].to_trainer.send(messages.Word("still here"))
    assert pairs[1].trainer.message() == messages.Word("still here")
    for both in pairs:
        both.dialer.close()
        both.listener.close()
    assert channel_threads() == []
