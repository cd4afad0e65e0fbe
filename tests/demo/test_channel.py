import io
import os
import queue
import signal

import msgspec
import pytest

from wtransfer.demo.channel import (
    Child,
    Ended,
    Join,
    Parent,
    Publish,
    Resume,
    StoppedError,
    TakeDigest,
    Tokens,
)
from wtransfer.errors import ProtocolError


def lines(*messages):
    return b"".join(msgspec.json.encode(each) + b"\n" for each in messages)


@pytest.fixture
def start():
    children = []

    def run(name="w", millions=4.0):
        reports = queue.SimpleQueue()
        child = Child(name, millions, os.environ, reports.put)
        children.append(child)
        return child, reports

    yield run
    for child in children:
        child.kill()


def test_commands_arrive_in_order_then_the_end_for_every_caller():
    commands = [Join("unix:@a"), TakeDigest(), Publish(3, True, 2), Resume()]
    parent = Parent(io.BytesIO(lines(*commands)), io.BytesIO())
    assert [parent.wait(10) for _ in commands] == commands
    for call in (parent.wait, parent.wait, parent.poll):
        with pytest.raises(StoppedError):
            call(*([10] if call == parent.wait else []))


def test_poll_and_a_timed_wait_return_none_without_a_command():
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as stream, os.fdopen(writer, "wb", buffering=0) as commands:
        parent = Parent(stream, io.BytesIO())
        assert parent.poll() is None
        assert parent.wait(0.01) is None
        commands.write(lines(Resume()))
        assert parent.wait(10) == Resume()
        commands.close()
        with pytest.raises(StoppedError):
            parent.wait(10)


def test_a_report_is_one_line_and_a_lost_main_stops_the_child():
    reports = io.BytesIO()
    Parent(io.BytesIO(), reports).report(Tokens("w", None, (1.0, 2.0)))
    assert reports.getvalue() == lines(Tokens("w", None, (1.0, 2.0)))
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb", buffering=0) as gone, pytest.raises(StoppedError):
        Parent(io.BytesIO(), gone).report(Tokens("w", None, ()))


def test_a_child_that_is_asked_to_end_exits_with_0(start):
    child, reports = start()
    assert child.end(60) == 0
    assert reports.get(timeout=10) == Ended(child, None)
    assert child.end(0) == 0


def test_a_killed_child_is_gone_at_once_and_drops_commands(start):
    child, reports = start()
    child.kill()
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
    assert reports.get(timeout=10) == Ended(child, None)
    assert child.end(0) == -signal.SIGKILL


def test_a_child_that_does_not_end_is_killed(start):
    child, _ = start()
    os.kill(child.pid, signal.SIGSTOP)
    assert child.end(0.2) == -signal.SIGKILL


def test_output_that_is_no_report_is_named(start, sabotage):
    sabotage("print('hello', flush=True)")
    child, reports = start()
    ended = reports.get(timeout=30)
    assert ended.child is child
    assert isinstance(ended.error, ProtocolError)
    assert "w wrote b'hello\\n', which is no report" in str(ended.error)


def test_the_error_output_of_a_child_that_fails_is_kept(start, sabotage):
    sabotage("import wtransfer.no_such_module")
    child, reports = start()
    assert reports.get(timeout=30) == Ended(child, None)
    child.send(Resume())
    assert "No module named 'wtransfer.no_such_module'" in child.stderr_tail()
    assert child.end(10) > 0
