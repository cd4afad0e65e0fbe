"""The thread of an engine: given up where it hangs, and never confused with the next one's."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from wtransfer.engines.factory import WeightTransferEngineFactory
from wtransfer.errors import RoundAbortedError
from wtransfer.testing.fakes import MemoryEngine
from wtransfer.weight_sync.messages import Init
from wtransfer.weight_sync.worker import engine_runner as module
from wtransfer.weight_sync.worker.engine_runner import EngineRunner

TIMEOUT_S = 10


@pytest.fixture(scope="module", autouse=True)
def engine_of_tests():
    WeightTransferEngineFactory.register_engine("tests-runner", MemoryEngine)


def test_an_abort_never_reaches_the_engine_that_comes_after_the_one_that_was_meant():
    runner, aborted = EngineRunner(0, 1, None), []

    def engine(name):
        return SimpleNamespace(
            abort_weight_update=lambda: aborted.append(name), shutdown=lambda: None
        )

    class EndsMeanwhile(threading.Event):
        """Looks as if its task ran, which then ends, and another has made its engine."""

        def is_set(self):
            runner._engine = engine("after")
            self.set()
            return False

    runner._engine = engine("meant")
    runner.abort(EndsMeanwhile())
    assert aborted == ["meant"]
    runner.shutdown()


def stuck_engine():
    """Return an engine that no abort ends, and what was done to it."""
    done = []
    return SimpleNamespace(
        abort_weight_update=lambda: done.append("abort"), shutdown=lambda: done.append("shutdown")
    ), done


def test_a_task_that_was_given_up_takes_no_later_engine_with_it(monkeypatch, until):
    monkeypatch.setattr(module, "UNBLOCK_GRACE_S", 0.05)
    runner, gate = EngineRunner(0, 1, None), threading.Event()
    runner._engine, done = stuck_engine()
    hanging = runner.submit(lambda: gate.wait(TIMEOUT_S))
    runner.abort(hanging)
    until(lambda: done == ["abort", "shutdown"])
    runner._engine, done = stuck_engine()
    runner.abort(hanging)
    assert done == []
    gate.set()
    runner.shutdown()


def test_a_task_that_had_yet_to_run_can_still_be_given_up(monkeypatch):
    """Not it, but what it stood behind was left."""
    monkeypatch.setattr(module, "UNBLOCK_GRACE_S", 0.05)
    runner, gate, ran = EngineRunner(0, 1, None), threading.Event(), threading.Event()
    runner.submit(lambda: gate.wait(TIMEOUT_S))
    queued = runner.submit(lambda: gate.wait(TIMEOUT_S))
    runner.submit(ran.set)
    runner.abort(queued)
    runner.abort(queued)
    assert ran.wait(TIMEOUT_S / 2)
    gate.set()
    runner.shutdown()


def test_an_engine_that_was_replaced_meanwhile_is_not_shut_down_twice(monkeypatch, until):
    monkeypatch.setattr(module, "UNBLOCK_GRACE_S", 0.2)
    runner, gate = EngineRunner(0, 1, None), threading.Event()
    (first, done), (second, done_to_second) = stuck_engine(), stuck_engine()
    runner._engine = first

    def make():
        # After an abort that meant the first one.
        until(lambda: done == ["abort"])
        runner._drop()
        runner._engine = second
        gate.wait(TIMEOUT_S)

    runner.abort(runner.submit(make))
    until(lambda: done_to_second == ["shutdown"])
    assert done == ["abort", "shutdown"]
    gate.set()
    runner.shutdown()


def test_a_thread_that_was_given_up_gets_no_engine():
    runner, gate, raised = EngineRunner(0, 1, None), threading.Event(), []

    def come_back_late():
        gate.wait(TIMEOUT_S)
        calls = [
            runner.ensure,
            lambda: runner.optional("start_weight_update"),
            lambda: runner.receive({}, list),
            lambda: runner.make(init),
        ]
        for call in calls:
            with pytest.raises(RoundAbortedError, match="given up"):
                call()
            raised.append(call)

    init = Init(1, "tests-runner", None, None, 0, 1, {"shelf": "nothing is on it"})
    hanging = runner.submit(come_back_late)
    runner.abort(hanging)
    assert runner.submit(lambda: runner.make(init)).wait(TIMEOUT_S)
    engine = runner._engine
    gate.set()
    assert hanging.wait(TIMEOUT_S)
    assert len(raised) == 4
    assert runner._engine is engine is not None
    runner.shutdown()


def test_closing_while_an_engine_hangs_leaves_no_thread_that_waits_for_more():
    # The check that nothing is left runs after each test of this folder.
    runner, gate = EngineRunner(0, 1, None), threading.Event()
    hanging = runner.submit(lambda: gate.wait(TIMEOUT_S) and None)
    runner.shutdown()
    runner.abort(hanging)
    gate.set()
    assert hanging.wait(TIMEOUT_S)
