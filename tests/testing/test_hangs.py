"""Backends that hang for ever: the kit ends, names the call, and so does its process."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from wtransfer.connectors.interface import SCHEDULER_METHODS, WORKER_METHODS
from wtransfer.scaffold.memory_spec import MemorySpec
from wtransfer.testing.fakes import (
    MemoryConnector,
    MemoryEngine,
    MemoryScheduler,
    MemoryTier,
    MemoryWorker,
)
from wtransfer.testing.kit import check_connector, check_engine, check_spec, check_tier

ATTRIBUTES = {"deadline_s": 0.3}


@pytest.fixture
def never():
    """An event that no backend lives to see."""
    event = threading.Event()
    yield event
    event.set()


def test_kit_ends_after_the_third_close_that_hangs(never):
    class HangsInClose(MemoryTier):
        def close(self):
            never.wait()

    report = check_tier(HangsInClose, shelf="{folder}", attributes=ATTRIBUTES)
    assert len(report.failed) == 3
    assert all(
        "close() of " in text and "has not returned in 1.8 s" in text
        for text in report.failed.values()
    )
    (reason,) = {text for text in report.skipped.values() if "have hung" in text}
    assert all(name in reason for name in report.failed)


def test_kit_names_a_spec_that_never_reports(never):
    class NeverReports(MemorySpec):
        def get_worker(self, kv_caches):
            worker = super().get_worker(kv_caches)
            worker.wait = lambda job_ids: never.wait()
            return worker

    report = check_spec(NeverReports, attributes=ATTRIBUTES, memory_bytes_to_use=1 << 22)
    (failed,) = report.failed
    assert failed == "test_one_block_is_stored_and_loaded"
    assert "a call of the spec has not returned in 1.8 s" in report.failed[failed]


def test_kit_ends_where_both_the_call_and_the_shutdown_of_a_spec_hang(never):
    class Hangs(MemorySpec):
        def get_worker(self, kv_caches):
            worker = super().get_worker(kv_caches)
            worker.wait = worker.shutdown = lambda *job_ids: never.wait()
            return worker

    report = check_spec(Hangs, attributes=ATTRIBUTES, memory_bytes_to_use=1 << 22)
    # The end of a test that has hung is not blamed as well.
    assert [text.count("has not returned") for text in report.failed.values()] == [1]


def test_kit_ends_after_the_third_round_that_stalls():
    class WaitsForMore(MemoryEngine):
        """It returns when it is aborted, so no call hangs."""

        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.aborted = threading.Event()

        def receive_weights(self, update_info, load_weights):
            super().receive_weights(update_info, load_weights)
            if len(update_info.names) > 1:
                self.aborted.wait()

        def abort_weight_update(self):
            self.aborted.set()

    # A deadline that a busy machine keeps: else a call is given up in the place of its round.
    report = check_engine(WaitsForMore, attributes={"deadline_s": 2.0})
    assert len(report.failed) == 3
    assert all("StallError: " in text for text in report.failed.values())
    (reason,) = {text for text in report.skipped.values() if "have hung" in text}
    assert all(name in reason for name in report.failed)


RARE = {"reset_cache", "has_connector_metadata", "has_pending_block_frees"}
"""Methods that the mini engine does not call, or only where it lacks blocks."""
METHODS = [
    *((MemoryScheduler, name) for name in sorted(SCHEDULER_METHODS - RARE)),
    *((MemoryWorker, name) for name in sorted(WORKER_METHODS - RARE)),
]


@pytest.mark.nightly  # `test_kits.py` has a method of each side
@pytest.mark.parametrize(("base", "name"), METHODS)
def test_kit_names_the_method_of_a_connector_that_hangs(never, *, base, name):
    def hang(self, *args, **kwargs):
        never.wait()

    # The stack of a thread has the names of functions, not those of attributes.
    hang.__code__ = hang.__code__.replace(co_name=name)
    side = type("Hangs", (base,), {name: hang})
    sides = {"scheduler_cls": side} if base is MemoryScheduler else {"worker_cls": side}
    connector = type("HangsConnector", (MemoryConnector,), sides)
    report = check_connector(connector, attributes={"deadline_s": 1.0}, shelf="{folder}")
    assert any(f"{name}() of Hangs (" in text for text in report.failed.values())
    assert len(report.failed) <= 3


DEADLOCK = """
import threading
from wtransfer.testing.fakes import MemoryTier
from wtransfer.testing.tier import TierConformance

class Deadlocks(MemoryTier):
    callers = 0
    def remove(self, keys):
        type(self).callers += 1
        threading.Event().wait(0.01 if self.callers == 1 else None)
        super().remove(keys)
        type(self).callers -= 1

class TestDeadlocks(TierConformance):
    tier_cls, in_processes, deadline_s = Deadlocks, False, 0.3
    def options_in(self, folder):
        return {"shelf": str(folder)}
"""


@pytest.mark.slow  # torch is imported anew
def test_process_of_the_kit_ends_though_threads_of_a_test_hang(tmp_path):
    file = tmp_path / "test_deadlock.py"
    file.write_text(DEADLOCK, "utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-k",
        "threads_share",
    ]
    done = subprocess.run(
        [*command, str(file)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1, done.stderr
    said = "remove() of Deadlocks (Remove keys; absent keys are ignored.) has not returned in 1.8 s"
    assert said in done.stdout
