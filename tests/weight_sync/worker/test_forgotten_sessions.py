"""Sessions that nothing refers to any more, as those of a notebook's cell that is run again."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from wtransfer.errors import CommitError
from wtransfer.weight_sync.http.server import WorkerServer
from wtransfer.weight_sync.worker.session import WorkerSession

CELL = """
model = make()
session = WorkerSession(model, join=address, token=token)
"""
PATIENCE_S = 10.0


@pytest.fixture
def made(fleet, weights):
    return fleet(weights)


@pytest.fixture
def like(weights):
    """Maker of models of the weights' form."""
    return lambda: {name: torch.zeros_like(each) for name, each in weights.items()}


@pytest.fixture
def join(made):
    """Maker of sessions, which nothing but the caller refers to."""

    def make(model):
        return WorkerSession(model, join=made.publisher.address, token=made.publisher.token)

    return make


@pytest.fixture
def told(caplog):
    """What the log says of sessions that were closed by themselves."""

    def look():
        records = [each for each in caplog.records if "nothing refers to" in each.getMessage()]
        assert {each.levelno for each in records} <= {logging.WARNING}
        return [each.getMessage() for each in records]

    return look


def commit(made, session, version):
    """Publish while the worker's model steps: a round waits for one that is being caught up."""
    made.publisher.wait_for_workers(1)
    with ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(made.publisher.publish, version)
        session.wait_for(version, PATIENCE_S)
        return publishing.result()


def test_cell_that_is_run_twice_leaves_one_worker_and_its_rounds_commit(made, like, until, told):
    names = {"WorkerSession": WorkerSession, "make": like}
    names |= {"address": made.publisher.address, "token": made.publisher.token}
    cell = compile(CELL, "cell-7", "exec")
    exec(cell, names)
    assert commit(made, names["session"], "step-1").ok
    exec(cell, names)
    with names["session"] as session:
        instance = session.status().instance
        until(lambda: [each.instance for each in made.publisher.workers()] == [instance])
        for version in ("step-2", "step-3"):
            report = commit(made, session, version)
            assert report.ok
            assert [each.instance for each in report.holders] == [instance]
        assert torch.equal(names["model"]["layer.1"], made.source["layer.1"])
    (text,) = told()
    assert "made at cell-7:3;" in text


def test_sessions_without_a_reference_leave_no_thread_and_no_descriptor(made, until, told):
    """Also with the engine that a round has given each of them."""
    threads, descriptors = set(threading.enumerate()), Path("/proc/self/fd")
    num_descriptors = len(list(descriptors.iterdir()))
    for number in range(20):
        made.join(name=f"w{number}")
    made.publisher.publish("step-1", dry_run=True)
    assert len(made.publisher.workers()) == 20
    made.members.clear()
    until(lambda: not made.publisher.workers(), 20.0)
    made.publisher.close()
    until(lambda: set(threading.enumerate()) <= threads)
    until(lambda: len(list(descriptors.iterdir())) <= num_descriptors)
    assert sorted(text.split()[0] for text in told()) == sorted(f"w{n}" for n in range(20))


def test_session_in_a_cycle_ends_when_the_collector_finds_it(made, join, like, until):
    cycle = [join(like())]
    made.publisher.wait_for_workers(1)
    cycle.append(cycle)
    del cycle
    gc.collect()
    until(lambda: not made.publisher.workers())


def test_session_without_a_reference_follows_its_folder_no_more(tmp_path, like, until, told):
    session = WorkerSession(like(), join=f"file:{tmp_path}")
    assert "wtransfer-follow" in {each.name for each in threading.enumerate()}
    del session
    until(lambda: "wtransfer-follow" not in {each.name for each in threading.enumerate()})
    until(told)


def test_update_that_waits_in_a_session_without_a_reference_is_dropped(made, join, like, until):
    """As by `close`: its publisher learns that it will not be applied."""
    sessions = [join(like())]
    made.publisher.wait_for_workers(1)
    round_ = made.publisher.publish("step-1", wait=False)
    until(lambda: sessions[0].state == "pending")
    sessions.clear()
    with pytest.raises(CommitError, match="no worker holds"):
        round_.result(PATIENCE_S)


def test_session_that_only_its_server_refers_to_lives_as_long_as_that(made, join, like, until):
    session = join(like())
    alive = weakref.ref(session)

    def is_gone():
        gc.collect()
        return alive() is None

    with WorkerServer(session):
        del session
        assert not is_gone()
        made.publisher.wait_for_workers(1)
    until(is_gone)
    until(lambda: not made.publisher.workers())


def test_call_that_waits_keeps_its_session(made, join, like):
    applied = []
    model = like()

    def run():
        applied.append(join(model).commit_pending(PATIENCE_S))

    thread = threading.Thread(target=run)
    thread.start()
    made.publisher.wait_for_workers(1)
    assert made.publisher.publish("step-1").ok
    thread.join(PATIENCE_S)
    assert applied == [True]


def test_session_that_was_closed_ends_without_a_word(made, join, like, until, told):
    session = join(like())
    session.close()
    del session
    session = WorkerSession(like(), join=made.publisher.address, token="secret", name="lost")
    del session
    until(told)
    (text,) = told()
    assert text.startswith("lost is closed")


IN_A_CHILD = """
import gc, os, sys, torch
from wtransfer import Publisher, WorkerSession

publisher = Publisher({"w": torch.ones(3)}, token="secret")
session = WorkerSession({"w": torch.zeros(3)}, join=publisher.address, token="secret")
publisher.wait_for_workers(1, 60)
if (child := os.fork()) == 0:
    del session
    gc.collect()
    os._exit(len(os.listdir("/proc/self/task")))
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 1
round_ = publisher.publish("step-1", wait=False)
session.wait_for("step-1", 60)
assert round_.result(60).ok
session.close()
publisher.close()
"""


def test_session_that_a_forked_child_drops_is_its_parents(run_program):
    program = run_program(IN_A_CHILD)
    assert (program.wait(60), "is closed" in program.err()) == (0, False), program.err()


LEFT = """
import sys, torch
from wtransfer import WorkerSession

def run():
    session = WorkerSession({"w": torch.zeros(3)}, join=sys.argv[1], token="secret")
    return {"open": session, "lost": None}[sys.argv[2]]

left = run()
"""


@pytest.mark.parametrize("left", ["open", "lost"])
def test_process_ends_well_with_a_session_that_was_not_closed(run_program, left):
    program = run_program(LEFT, "unix:@wt-nobody", left)
    assert (program.wait(60), "Traceback" in program.err()) == (0, False), program.err()
    if left == "open":
        assert not program.err()
