import io
import json

import pytest

from wtransfer.demo import output
from wtransfer.demo.output import Check, Progress, Result


def play(legend):
    with Progress("round   loss", legend, quiet=False) as progress:
        progress.status("training")
        progress.row(("1", "5.50"))
        progress.event("worker-1 is back [sic]")


def test_rows_and_events_are_aligned_lines_however_long(capsys):
    play("legend" * 40)
    expected = ["round   loss", "    1   5.50", "worker-1 is back [sic]", "legend" * 40]
    assert capsys.readouterr().out.splitlines() == expected


def test_a_terminal_shows_what_is_going_on(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    written, console = io.StringIO(), output.Console
    monkeypatch.setattr(
        output, "Console", lambda quiet: console(file=written, force_terminal=True, quiet=quiet)
    )
    play("the legend")
    assert "training" in written.getvalue()
    assert "worker-1 is back [sic]" in written.getvalue()


def test_a_failed_run_has_no_legend(capsys):
    with pytest.raises(ValueError, match="x"), Progress("round", "the legend", quiet=False):
        raise ValueError("x")
    assert "the legend" not in capsys.readouterr().out


def test_document_and_lines_say_what_the_checks_say(capsys):
    checks = [Check("all or nothing", True, "seen"), Check("ends clean", False, "exit 1")]
    Result(checks, {"rounds": []}).print(as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "rounds": [],
        "checks": [
            {"promise": "all or nothing", "kept": True, "seen": "seen"},
            {"promise": "ends clean", "kept": False, "seen": "exit 1"},
        ],
    }
    Result(checks, {}).print(as_json=False)
    assert capsys.readouterr().out == (
        "\n[ok] all or nothing\n     seen\n[FAILED] ends clean\n     exit 1\n"
        "\n1 of 2 promises kept\n"
    )
