import os
import queue

import pytest

from wtransfer.demo.child import Child, Ended
from wtransfer.demo.messages import Resume
from wtransfer.errors import ProtocolError


@pytest.fixture
def start():
    children = []

    def run(module, *arguments):
        reports = queue.SimpleQueue()
        child = Child("it", module, arguments, os.environ, reports.put)
        children.append(child)
        return child, reports

    yield run
    for child in children:
        child.kill()


def test_a_child_that_is_asked_to_end_ends_well(start):
    child, reports = start("wtransfer.demo.worker", "w", "1", "64")
    assert child.end(60) == 0
    ended = reports.get(timeout=10)
    assert isinstance(ended, Ended)
    assert (ended.child, ended.error) == (child, None)
    assert child.end(0) == 0


def test_a_killed_child_is_gone_at_once_and_can_be_written_to_in_vain(start):
    child, reports = start("wtransfer.demo.worker", "w", "1", "64")
    assert child.kill() == -9
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    assert isinstance(reports.get(timeout=10), Ended)


def test_a_child_that_does_not_end_is_killed(start):
    # It waits for a connection and never looks at its standard input.
    child, _ = start("http.server", "--bind", "127.0.0.1", "0")
    assert child.end(0.2) == -9


def test_output_that_is_no_report_is_told(start):
    _, reports = start("platform")
    ended = reports.get(timeout=30)
    assert isinstance(ended, Ended)
    assert isinstance(ended.error, ProtocolError)


@pytest.mark.slow
def test_the_last_words_of_a_child_that_fails_are_kept(start):
    child, reports = start("wtransfer.demo.worker", "w", "no-number")
    assert isinstance(reports.get(timeout=60), Ended)
    child.send(Resume())
    assert "ValueError: invalid literal" in child.last_words()
