"""The words behind ``wtransfer``."""

from __future__ import annotations

import os
import signal
import threading

import pytest
from click.testing import CliRunner

from wtransfer.cli import COMMANDS, main
from wtransfer.commands.shared import EndSignal, end_signals


def test_an_unknown_command_is_answered_with_those_that_exist():
    done = CliRunner().invoke(main, ["foo"])
    assert done.exit_code == 2
    assert f"No such command 'foo'. The commands are {', '.join(sorted(COMMANDS))}." in done.stderr


def test_a_signal_that_is_held_back_is_raised_when_the_block_is_over():
    reached = []

    def hold_back():
        with end_signals() as signals, signals.held_back():
            os.kill(os.getpid(), signal.SIGTERM)
            reached.append("the end of the block")

    with pytest.raises(EndSignal) as caught:
        hold_back()
    assert reached == ["the end of the block"]
    assert caught.value.exit_code == 128 + signal.SIGTERM


def test_a_signal_that_comes_while_a_condition_has_no_lock_is_raised_all_the_same(monkeypatch):
    condition = threading.Condition()
    release = condition._release_save

    def release_and_end():
        release()
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(condition, "_release_save", release_and_end)
    with pytest.raises(EndSignal), end_signals(), condition:
        condition.wait(0.1)
