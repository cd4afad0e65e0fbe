import io
import json

import pytest

from wtransfer.demo import output
from wtransfer.demo.output import Check, Progress, Result

HEADER = "round   loss"


@pytest.fixture
def terminal(monkeypatch):
    written = io.StringIO()
    real = output.Console
    monkeypatch.setattr(
        output,
        "Console",
        lambda **options: real(file=written, force_terminal=True, width=60, **options),
    )
    return written


def play(legend="the legend"):
    with Progress(HEADER, legend, quiet=False) as progress:
        progress.status("step 50")
        progress.row(("1", "5.50"), is_usual=True)
        progress.event("worker-1 is back [sic]")


def test_rows_and_events_are_aligned_lines_however_long(capsys):
    play("legend" * 40)
    expected = ["round   loss", "    1   5.50", "worker-1 is back [sic]", "legend" * 40]
    assert capsys.readouterr().out.splitlines() == expected


def test_a_terminal_shows_what_is_going_on(terminal, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    play()
    assert "step 50" in terminal.getvalue()
    assert "worker-1 is back [sic]" in terminal.getvalue()


def test_a_quiet_run_prints_nothing_even_on_a_terminal(terminal, capsys):
    with Progress(HEADER, "the legend", quiet=True) as progress:
        progress.row(("1", "5.50"), is_usual=True)
        progress.event("worker-1 is back")
        progress.status("step 50")
    assert terminal.getvalue() == ""
    assert capsys.readouterr().out == ""


def test_a_failed_run_has_no_legend(capsys):
    with pytest.raises(ValueError, match="x"), Progress(HEADER, "the legend", quiet=False):
        raise ValueError("x")
    assert "the legend" not in capsys.readouterr().out


def result(*, kept):
    checks = [Check("all or nothing", True, "seen"), Check("ends clean", kept, "exit 1")]
    return Result(checks, 12.4, {"rounds": []}, ["before: q#.x"])


@pytest.mark.parametrize("kept", [True, False])
def test_the_document_says_what_the_checks_say(capsys, kept):
    result(kept=kept).print(as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document == {
        "ok": kept,
        "seconds": 12.4,
        "rounds": [],
        "checks": [
            {"promise": "all or nothing", "kept": True, "seen": "seen"},
            {"promise": "ends clean", "kept": kept, "seen": "exit 1"},
        ],
    }


def test_the_end_lists_notes_and_promises(capsys):
    result(kept=False).print(as_json=False)
    assert capsys.readouterr().out == (
        "\nbefore: q#.x\n\n[ok] all or nothing\n     seen\n[FAILED] ends clean\n     exit 1\n"
        "\n1 of 2 promises kept, 12 s after imports\n"
    )
