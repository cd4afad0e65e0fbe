import io
import json

import pytest
from rich.console import Console

from wtransfer.demo.command import tell
from wtransfer.demo.document import document
from wtransfer.demo.row import row_of
from wtransfer.demo.table import Lines, LiveTable, cells
from wtransfer.demo.verdict import judge


def test_a_row_has_the_numbers_of_its_round(story):
    row = row_of(story, story.rounds[0])
    assert row.gb_per_s == pytest.approx(1.0)
    assert row.memcpy_share == pytest.approx(0.1)
    assert row.commit_pause_s == pytest.approx(0.002)
    assert row.gap_normal_s == pytest.approx(0.010)
    assert row.gap_transfer_s == pytest.approx(0.010)
    assert row.gap_commit_s == pytest.approx(0.012)
    assert (row.num_equal, row.num_receipts) == (2, 2)


def test_a_live_model_with_other_weights_is_not_counted_as_equal(story):
    story.lives["worker-0"][0].proofs.clear()
    row = row_of(story, story.rounds[0])
    assert (row.num_equal, row.num_receipts) == (1, 2)


def test_an_aborted_round_has_no_rate_and_says_so(story):
    row = row_of(story, story.rounds[1])
    assert row.gb_per_s is row.memcpy_share is row.commit_pause_s is None
    assert row.gap_transfer_s == pytest.approx(0.010)
    assert "aborted" in cells(row)
    assert cells(row)[-1] == "-"


def test_lines_say_every_round_and_event_once(story):
    written = []
    lines = Lines(written.append)
    lines.show(story)
    lines.show(story)
    lines.close(story)
    assert [sum(f"round-{n}" in line for line in written) for n in (1, 2, 3, 4)] == [1, 1, 1, 1]
    assert written.count("worker-1 is back") == 1


def test_the_live_table_shows_rounds_events_and_what_goes_on(story):
    out = io.StringIO()
    with LiveTable(Console(file=out, force_terminal=True, width=140, height=8)) as table:
        table.show(story)
        table.close(story)
    for expected in ("round-4", "aborted", "worker-1 is back", "2/2", "step 50"):
        assert expected in out.getvalue()


def test_the_document_is_json_and_says_what_the_verdict_says(story):
    checks = judge(story)
    got = json.loads(json.dumps(document(story, checks, 12.5)))
    assert got["ok"] is True
    assert got["seconds"] == 12.5
    assert [each["outcome"] for each in got["rounds"]] == [
        "committed",
        "aborted",
        "committed",
        "committed",
    ]
    assert got["killed"]["worker"] == "worker-1"
    assert got["usual_gap_s"] == pytest.approx(0.010)
    story.exits["trainer"] = 1
    assert document(story, judge(story), 1.0)["ok"] is False


def test_the_end_shows_samples_promises_and_gaps(story, capsys):
    story.exits["trainer"] = 1
    tell(story, judge(story), 12.5)
    said = capsys.readouterr().out
    assert "before (worker-0, untrained):\n  q#.x" in said
    assert "after (worker-0, round-4):\n  The class" in said
    assert "[FAILED] every process ends when asked" in said
    assert "usually 10.0 ms; at most 10.0 ms between the rounds" in said
    assert "7 of 8 promises kept, 12 s after imports" in said
