import io
import os

import pytest

from wtransfer.demo.inbox import Inbox, StoppedError
from wtransfer.demo.messages import (
    Join,
    Publish,
    Receipt,
    Resume,
    RoundOver,
    Tokens,
    decode_command,
    decode_report,
    encode,
)
from wtransfer.errors import ProtocolError


@pytest.mark.parametrize("command", [Join("unix:@a"), Publish(3, True, 2), Resume()])
def test_a_command_is_one_line_and_comes_back(command):
    line = encode(command)
    assert line.count(b"\n") == 1
    assert decode_command(line) == command


def test_a_report_comes_back():
    over = RoundOver(
        number=1,
        version="round-1",
        outcome="committed",
        step=1,
        loss=2.0,
        digest="d",
        memcpy_s=0.1,
        started_at=1.0,
        receipts=(Receipt("w", "committed", "f", True, 0.0),),
    )
    for report in (over, Tokens("w", None, (1.0, 2.0))):
        assert decode_report(encode(report)) == report


@pytest.mark.parametrize("line", [b"", b"hello\n", b'{"type": "Nothing"}', b'{"type": "Join"}'])
def test_what_is_no_message_is_named(line):
    with pytest.raises(ProtocolError, match="is no message of the demo"):
        decode_command(line)


def test_an_inbox_gives_commands_in_order_then_the_end_to_everybody():
    inbox = Inbox(io.BytesIO(encode(Join("a")) + encode(Resume())))
    assert [inbox.wait(), inbox.wait()] == [Join("a"), Resume()]
    for ask in (inbox.wait, inbox.wait, inbox.poll):
        with pytest.raises(StoppedError):
            ask()


def test_an_inbox_does_not_wait_unless_asked_to():
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as lines, os.fdopen(writer, "wb", buffering=0) as commands:
        inbox = Inbox(lines)
        assert inbox.poll() is None
        assert inbox.wait(0.01) is None
        commands.write(encode(Resume()))
        assert inbox.wait(10) == Resume()
        commands.close()
        with pytest.raises(StoppedError):
            inbox.wait(10)
