"""The thread of an engine: left behind where it hangs, and never confused with the next one's."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace

import pytest

from wtransfer.calls import Call
from wtransfer.engines import border
from wtransfer.engines.border import EngineThread
from wtransfer.errors import ClosedError, RoundAbortedError

PATIENCE_S = 10.0
LOG = logging.getLogger(__name__)


class Engine:
    """Notes the calls that end it."""

    def __init__(self):
        self.done = []
        self.aborted = threading.Event()

    def abort_weight_update(self):
        self.done.append("abort")
        self.aborted.set()

    def shutdown(self):
        self.done.append(f"shutdown on {threading.current_thread().name}")


LEFT = ["abort", "shutdown on wtransfer-shutdown"]


def submit(thread, function):
    return thread.submit(Call(function))


def seat(thread, engine):
    def nothing():
        pass

    call = submit(thread, lambda: thread.seat(engine, "tests", nothing))
    assert call.done.wait(PATIENCE_S)
    assert call.error is None
    return engine


@pytest.fixture
def hasty(monkeypatch):
    monkeypatch.setattr(border, "UNBLOCK_GRACE_S", 0.05)


def test_an_abort_never_reaches_the_engine_that_comes_after_the_one_that_was_meant():
    thread, aborted = EngineThread(LOG), []

    def engine(name):
        return SimpleNamespace(abort_weight_update=lambda: aborted.append(name))

    class EndsMeanwhile(threading.Event):
        """Looks as if its call ran, which then ends, and another has made its engine."""

        def is_set(self):
            thread._engine = engine("after")
            self.set()
            return False

    seat(thread, engine("meant"))
    thread.abort(EndsMeanwhile(), "tests", "an abort")
    assert aborted == ["meant"]
    thread.shutdown()


@pytest.mark.usefixtures("hasty")
def test_a_call_that_was_given_up_takes_no_later_engine_with_it():
    thread, gate = EngineThread(LOG), threading.Event()
    first = seat(thread, Engine())

    def hang():
        gate.wait(PATIENCE_S)
        thread.drop()

    hanging = submit(thread, hang)
    thread.abort(hanging.done, "tests", "an abort")
    assert first.done == LEFT
    assert thread.has_left
    assert thread.engine is None
    second = seat(thread, Engine())
    thread.abort(hanging.done, "tests", "an abort")
    gate.set()
    assert hanging.done.wait(PATIENCE_S)
    assert second.done == []
    assert thread.engine is second
    thread.shutdown()
    # On its own thread, which does not hang.
    assert second.done == ["shutdown on wtransfer-engine"]


@pytest.mark.usefixtures("hasty")
def test_of_two_aborts_of_one_call_the_later_takes_no_later_engine():
    thread, gate, aborts, second = EngineThread(LOG), threading.Event(), [], Engine()

    def abort():
        aborts.append(len(aborts))
        if len(aborts) == 1:
            thread.abort(hanging.done, "tests", "an abort")
            seat(thread, second)

    seat(thread, SimpleNamespace(abort_weight_update=abort))
    hanging = submit(thread, lambda: gate.wait(PATIENCE_S))
    thread.abort(hanging.done, "tests", "an abort")
    assert aborts == [0, 1]
    assert thread.engine is second
    assert second.done == []
    gate.set()
    thread.shutdown()


@pytest.mark.usefixtures("hasty")
def test_an_engine_that_hangs_in_its_shutdown_as_well_is_left_all_the_same():
    thread, gate = EngineThread(LOG), threading.Event()
    engine = SimpleNamespace(shutdown=lambda: gate.wait(PATIENCE_S))
    seat(thread, engine)
    hanging = submit(thread, lambda: gate.wait(PATIENCE_S))
    thread.abort(hanging.done, "tests", "an abort")
    assert not hanging.done.is_set()
    assert submit(thread, lambda: None).done.wait(PATIENCE_S)
    thread.shutdown()
    gate.set()


def test_a_call_that_ends_in_time_leaves_nothing_behind():
    thread, gate = EngineThread(LOG), threading.Event()
    engine = seat(thread, SimpleNamespace(abort_weight_update=gate.set, shutdown=lambda: None))
    aborted = submit(thread, lambda: gate.wait(PATIENCE_S))
    thread.abort(aborted.done, "tests", "an abort")
    assert aborted.result is True
    assert thread.engine is engine
    assert not thread.has_left
    thread.shutdown()


@pytest.mark.usefixtures("hasty")
def test_a_call_that_had_yet_to_run_can_still_be_given_up():
    """Not it, but what it stood behind was left."""
    thread, gate, ran = EngineThread(LOG), threading.Event(), threading.Event()
    submit(thread, lambda: gate.wait(PATIENCE_S))
    queued = submit(thread, lambda: gate.wait(PATIENCE_S))
    submit(thread, ran.set)
    thread.abort(queued.done, "tests", "an abort")
    thread.abort(queued.done, "tests", "an abort")
    assert ran.wait(PATIENCE_S / 2)
    gate.set()
    thread.shutdown()


def test_an_engine_that_was_replaced_meanwhile_is_not_shut_down_twice(monkeypatch):
    monkeypatch.setattr(border, "UNBLOCK_GRACE_S", 0.2)
    thread, gate, second = EngineThread(LOG), threading.Event(), Engine()
    first = seat(thread, Engine())

    def make():
        # After an abort that meant the first one.
        first.aborted.wait(PATIENCE_S)
        thread.drop()
        thread.seat(second, "tests", lambda: None)
        gate.wait(PATIENCE_S)

    thread.abort(submit(thread, make).done, "tests", "an abort")
    assert second.done == ["shutdown on wtransfer-shutdown"]
    assert first.done == ["abort", "shutdown on wtransfer-engine"]
    gate.set()
    thread.shutdown()


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("end", ["abort", "shutdown"])
def test_an_engine_that_is_made_too_late_is_shut_down_and_takes_no_place(end):
    thread, gate, late, noted = EngineThread(LOG), threading.Event(), Engine(), []

    def make():
        gate.wait(PATIENCE_S)
        thread.seat(late, "tests", lambda: noted.append(late))

    making = submit(thread, make)
    if end == "abort":
        thread.abort(making.done, "tests", "an abort")
    else:
        thread.shutdown()
    gate.set()
    assert making.done.wait(PATIENCE_S)
    with pytest.raises(RoundAbortedError, match="'tests' took too long to be made"):
        raise making.error
    assert late.done == ["shutdown on wtransfer-engine"]
    assert thread.engine is None
    assert noted == []
    thread.shutdown()


def test_an_engine_that_cannot_be_noted_is_shut_down_and_takes_no_place():
    thread, engine = EngineThread(LOG), Engine()

    def note():
        raise ValueError("not noted")

    making = submit(thread, lambda: thread.seat(engine, "tests", note))
    assert making.done.wait(PATIENCE_S)
    with pytest.raises(ValueError, match="not noted"):
        raise making.error
    assert engine.done == ["shutdown on wtransfer-engine"]
    assert thread.engine is None
    thread.shutdown()


@pytest.mark.parametrize("is_started", [True, False])
def test_a_call_after_the_shutdown_ends_without_a_thread(caplog, is_started):
    thread, ran, others = EngineThread(LOG), [], set(threading.enumerate())
    if is_started:
        assert submit(thread, lambda: None).done.wait(PATIENCE_S)
    thread.shutdown()
    call = submit(thread, lambda: ran.append(1))
    assert call.done.wait(PATIENCE_S)
    assert isinstance(call.error, ClosedError)
    assert ran == []
    for each in set(threading.enumerate()) - others:
        each.join(PATIENCE_S)
        assert not each.is_alive()
    thread.leave(call.done, "tests", "the end of a round")
    assert not thread.has_left
    assert caplog.messages == []


@pytest.mark.usefixtures("hasty")
def test_an_engine_that_hangs_after_its_shutdown_is_not_said_to_be_rebuilt(caplog):
    thread, gate = EngineThread(LOG), threading.Event()
    hanging = submit(thread, lambda: gate.wait(PATIENCE_S))
    thread.shutdown()
    thread.leave(hanging.done, "tests", "an abort")
    said = "engine tests does not return after an abort; it is left behind"
    assert caplog.messages == [said]
    gate.set()


def test_a_thread_that_made_no_call_is_shut_down_without_one(monkeypatch):
    """As at the end of the interpreter, which starts no more threads."""

    def refuse(_thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    EngineThread(LOG).shutdown()
