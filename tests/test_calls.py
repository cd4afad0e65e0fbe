"""Calls on other threads: in order, given up at a deadline, or beside a transfer."""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import gc
import os
import signal
import sys
import threading
import time
import weakref

import pytest
import torch

from wtransfer import calls
from wtransfer.calls import (
    Announcer,
    Changed,
    SerialThread,
    check_process,
    forget_frames,
    map_concurrently,
    on_callers_stream,
    start_call,
)
from wtransfer.errors import ClosedError, EngineError, ForkedError, StallError
from wtransfer.weight_sync.trainer.engine_runner import EngineCall

PATIENCE_S = 5.0


class StrikeInCallback:
    """Raises at a place within an event's callback of an event loop, as a signal handler may.

    Args:
        event: ``call``: before the callback has done anything; ``line``: half way.
    """

    def __init__(self, event):
        self.event, self.struck = event, False

    def __call__(self, frame, event, _):
        code, set_ = frame.f_code, asyncio.Event.set.__code__
        if code is not set_ or self.struck:
            return None
        half_way = event == "line" and frame.f_locals["self"]._value
        if event == self.event == "call" or (self.event == "line" and half_way):
            self.struck = True
            raise OSError("struck")
        return self


@pytest.mark.timeout(20)
@pytest.mark.parametrize("is_told", [True, False])
@pytest.mark.parametrize("event", ["call", "line"])
def test_wait_of_an_event_loop_ends_though_a_handler_has_raised_in_a_callback(event, is_told):
    changed, state = Changed(), []

    async def wait():
        loop, logged = asyncio.get_running_loop(), []
        loop.set_exception_handler(lambda _, context: logged.append(context))
        strike = StrikeInCallback(event)
        sys.settrace(strike)
        try:
            if is_told:
                loop.call_soon(lambda: (state.append(1), changed.notify_all()))
            found = await changed.wait_for_async(lambda: list(state), None if is_told else 0.25)
        finally:
            sys.settrace(None)
        return found, logged

    found, logged = asyncio.run(wait())
    assert found == state
    assert [str(each["exception"]) for each in logged] == ["struck"]


@pytest.mark.parametrize("error", [ValueError, SystemExit, asyncio.CancelledError])
def test_a_call_that_raises_is_done_and_the_next_one_is_made(error):
    def fail():
        raise error("no")

    thread = SerialThread("tests-serial")
    failed, after = thread.submit(fail), thread.submit(thread.runs_here)
    thread.stop()
    assert failed.done.wait(PATIENCE_S)
    assert after.done.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert isinstance(failed.error, error)
    assert after.result is True


def test_calls_behind_one_that_hangs_are_made_by_a_successor_and_in_order():
    thread, successor, go_on, made = SerialThread("one"), SerialThread("two"), threading.Event(), []
    hanging = thread.submit(go_on.wait)
    for number in range(3):
        thread.submit(lambda number=number: made.append((number, successor.runs_here())))
    while thread._calls.qsize() > 3:
        pass
    for call in thread.abandon():
        successor.resubmit(call)
    assert successor.submit(lambda: None).done.wait(PATIENCE_S)
    assert made == [(0, True), (1, True), (2, True)]
    assert not hanging.done.is_set()
    go_on.set()
    for each in (thread, successor):
        each.stop()
        each.join(PATIENCE_S)


def test_a_check_ends_the_wait_for_a_call_and_nothing_overtakes_it():
    thread, go_on = SerialThread("tests-serial"), threading.Event()

    def check():
        raise ConnectionError("the peer is gone")

    with pytest.raises(ConnectionError):
        thread.call(go_on.wait, "the first", PATIENCE_S, check)
    with pytest.raises(StallError, match="the first was given up and has not returned yet"):
        thread.call(lambda: None, "the second", 0.05)
    go_on.set()
    thread.stop()
    thread.join(PATIENCE_S)


def test_a_call_that_is_given_up_is_not_overtaken():
    thread, go_on = SerialThread("tests-serial"), threading.Event()
    with pytest.raises(StallError, match=r"no progress on the first within 0\.05 s"):
        thread.call(go_on.wait, "the first", 0.05)
    with pytest.raises(StallError, match="the first was given up and has not returned yet"):
        thread.call(lambda: None, "the second", 0.05)
    go_on.set()
    assert thread.call(lambda: 7, "the third", PATIENCE_S) == 7
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 / 0, "the fourth", PATIENCE_S)
    thread.stop()
    with pytest.raises(ClosedError, match="cannot begin the fifth"):
        thread.call(lambda: None, "the fifth", PATIENCE_S)
    thread.join(PATIENCE_S)


def test_a_thread_that_cannot_start_is_started_by_the_next_call(monkeypatch):
    thread, start = SerialThread("tests-serial"), threading.Thread.start

    def fail(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", fail)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        thread.submit(lambda: None)
    monkeypatch.setattr(threading.Thread, "start", start)
    assert thread.call(lambda: 7, "the second", PATIENCE_S) == 7
    thread.stop()
    thread.join(PATIENCE_S)


def test_no_second_thread_helps_to_start_one_where_no_handler_runs(monkeypatch):
    def refuse(*_):
        raise RuntimeError("can't start new thread")

    thread = SerialThread("tests-serial")
    thread.call(lambda: None, "the start", PATIENCE_S)
    # The name by which `calls` starts its helper; `threading` has its own.
    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    call = thread.call(lambda: start_call(threading.current_thread, "own"), "it", PATIENCE_S)
    assert call.done.wait(PATIENCE_S)
    assert call.outcome().name == "own"
    with pytest.raises(RuntimeError, match="can't start new thread"):
        start_call(lambda: None, "from the main thread, where one may raise")
    thread.stop()
    thread.join(PATIENCE_S)


def test_a_notification_ends_every_wait_at_once(monkeypatch):
    monkeypatch.setattr(calls, "CHECK_S", 60.0)  # the next look is not what ends them
    changed, said = Changed(), []
    waits = [start_call(lambda: changed.wait_for(lambda: said), "tests-wait") for _ in range(3)]
    time.sleep(0.2)  # until they wait
    said.append(1)
    changed.notify_all()
    assert all(each.done.wait(PATIENCE_S) for each in waits)


def test_the_late_result_of_a_call_that_was_given_up_is_not_kept():
    thread, go_on, kept = SerialThread("tests-serial"), threading.Event(), []

    def gather():
        go_on.wait(PATIENCE_S)
        tensor = torch.zeros(3)
        kept.append(weakref.ref(tensor))
        return tensor

    with pytest.raises(StallError):
        thread.call(gather, "gathering", 0.05)
    go_on.set()
    thread.stop()
    thread.join(PATIENCE_S)
    gc.collect()
    assert kept[0]() is None


def test_a_thread_that_waits_keeps_nothing_of_its_last_call():
    thread, tensor = SerialThread("tests-serial"), torch.zeros(3)
    kept = weakref.ref(tensor)
    assert thread.submit(tensor.sum).done.wait(PATIENCE_S)
    del tensor
    thread.submit(lambda: None).done.wait(PATIENCE_S)
    gc.collect()
    assert kept() is None
    thread.stop()
    thread.join(PATIENCE_S)


@pytest.mark.gpu
def test_a_call_is_made_on_the_stream_of_its_caller():
    thread, stream = SerialThread("tests-serial"), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call = on_callers_stream(torch.cuda.current_stream)
        assert thread.call(call, "a look", PATIENCE_S) == stream
    thread.stop()


def test_an_error_keeps_no_tensors_once_its_frames_are_forgotten():
    kept = []

    def fail():
        tensor = torch.zeros(3)
        kept.append(weakref.ref(tensor))
        raise ValueError("no")

    call = start_call(fail, "tests-own")
    assert call.done.wait(PATIENCE_S)
    forget_frames(call.error)
    gc.collect()
    assert kept[0]() is None


def test_frames_of_causes_in_a_circle_are_forgotten():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    forget_frames(one)


def test_call_of_a_finaliser_waits_for_no_lock_of_its_own_thread():
    """The collector may run within `Thread.start`."""
    made = threading.Event()
    with threading._active_limbo_lock:
        calls.start_in_finaliser(made.set, "tests-finaliser")
    assert made.wait(PATIENCE_S)


# -- announcements


VARIABLE = contextvars.ContextVar("tests_round")


def test_an_announcement_is_made_in_the_context_of_its_round():
    seen = []
    with Announcer(lambda info: seen.append((info, VARIABLE.get(None))), 2) as announcer:
        for number in range(5):
            VARIABLE.set(number)
            announcer.announce({"bucket": number})
    assert sorted(seen, key=lambda each: each[1]) == [({"bucket": n}, n) for n in range(5)]


def test_leaving_on_an_error_waits_for_no_announcement_and_makes_no_more():
    go_on, begun, made = threading.Event(), threading.Event(), []

    def tell(info):
        begun.set()
        go_on.wait(PATIENCE_S)
        made.append(info)

    def send():
        with Announcer(tell) as announcer:
            announcer.announce({"bucket": 0})
            announcer.announce({"bucket": 1})
            assert begun.wait(PATIENCE_S)
            raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        send()
    assert made == []
    go_on.set()
    for each in threading.enumerate():
        if each.name == "wtransfer-announce":
            each.join(PATIENCE_S)
    assert made == [{"bucket": 0}]


def test_the_error_of_an_announcement_is_raised_at_the_end():
    go_on = threading.Event()

    def tell(_info):
        go_on.wait(PATIENCE_S)
        raise OSError("nobody there")

    def announce():
        with Announcer(tell) as announcer:
            announcer.announce({})
            go_on.set()

    with pytest.raises(OSError, match="nobody there"):
        announce()


def test_an_announcement_after_one_that_failed_is_not_made():
    def tell(_info):
        raise OSError("nobody there")

    announcer = Announcer(tell)
    announcer.announce({})
    with pytest.raises(OSError, match="nobody there"):
        announcer.wait()
    with pytest.raises(OSError, match="nobody there"):
        announcer.announce({})
    announcer.__exit__(OSError, OSError("nobody there"), None)


def test_error_whose_text_raises_ends_its_call_and_not_the_thread():
    class NoTextError(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def fail():
        raise NoTextError

    notified = threading.Event()
    thread = SerialThread("tests-serial")
    failed = EngineCall("send_weights", fail, "engines:a", notified.set)
    thread.resubmit(failed)
    after = thread.submit(thread.runs_here)
    thread.stop()
    assert after.done.wait(PATIENCE_S)
    thread.join(PATIENCE_S)
    assert isinstance(failed.error, EngineError)
    assert "send_weights raised NoTextError" in failed.error.message
    assert notified.is_set()


@pytest.mark.timeout(60)
def test_signal_that_another_thread_gets_ends_the_wait_for_hosts():
    """It wakes no wait of the main thread by itself, as one that comes just before a wait."""
    release = threading.Event()

    def interrupt():
        release.wait(0.2)  # until the main thread waits
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        release.wait()

    try:
        with pytest.raises(KeyboardInterrupt):
            map_concurrently({"a": interrupt}, 600.0)
    finally:
        release.set()


def test_an_object_is_refused_outside_the_process_that_made_it():
    check_process(os.getpid(), "Publisher")
    with pytest.raises(ForkedError, match="this Publisher belongs to the parent process"):
        check_process(os.getppid(), "Publisher")
