"""The thread of an engine: given up where it hangs, and never confused with the next one's."""

from __future__ import annotations

import threading

import pytest

from wtransfer.engines.factory import WeightTransferEngineFactory
from wtransfer.errors import RoundAbortedError
from wtransfer.testing.fakes import MemoryEngine
from wtransfer.weight_sync.messages import Init
from wtransfer.weight_sync.worker.engine_runner import EngineRunner

TIMEOUT_S = 10


@pytest.fixture(scope="module", autouse=True)
def engine_of_tests():
    WeightTransferEngineFactory.register_engine("tests-runner", MemoryEngine)


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
    gate.set()
    assert hanging.wait(TIMEOUT_S)
    assert len(raised) == 4
    # The engine is there still.
    served = []
    assert runner.submit(lambda: served.append(runner.copies)).wait(TIMEOUT_S)
    assert served
    runner.shutdown()


def test_closing_while_an_engine_hangs_leaves_no_thread_that_waits_for_more():
    # The check that nothing is left runs after each test of this folder.
    runner, gate = EngineRunner(0, 1, None), threading.Event()
    hanging = runner.submit(lambda: gate.wait(TIMEOUT_S) and None)
    runner.shutdown()
    runner.abort(hanging)
    gate.set()
    assert hanging.wait(TIMEOUT_S)
