"""The words behind ``wtransfer``."""

from __future__ import annotations

from click.testing import CliRunner

from wtransfer.cli import COMMANDS, main


def test_an_unknown_command_is_answered_with_those_that_exist():
    done = CliRunner().invoke(main, ["foo"])
    assert done.exit_code == 2
    assert f"No such command 'foo'. The commands are {', '.join(sorted(COMMANDS))}." in done.stderr
