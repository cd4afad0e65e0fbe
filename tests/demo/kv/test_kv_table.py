"""What is shown of a prompt."""

from dataclasses import replace

from rich.console import Console

from wtransfer.demo.kv.table import LEGEND, KvLines, cells, drawn


def test_a_row_says_what_was_loaded_and_what_that_saved(story):
    alive, killed = cells(story.rows[0]), cells(story.rows[2])
    assert alive == (
        *("1", "alive", "130", "96", "34", "0.1"),
        *("200", "10", "300", "4.0", "0.250", "yes"),
    )
    assert killed == (
        *("3", "killed", "130", "0", "130", "-"),
        *("200", "10", "300", "-", "-", "yes"),
    )
    assert cells(replace(story.rows[0], tokens=[7]))[-1] == "NO"


def test_lines_are_written_once(story):
    written = []
    rows, story.rows = story.rows, []
    with KvLines(written.append) as lines:
        for row in rows:
            story.rows.append(row)
            lines.show(story)
            lines.show(story)
    assert [line.split()[0] for line in written[1:-1]] == ["1", "prefill", "2", "3", "4", "5", "6"]
    assert written[-1] == LEGEND


def test_the_table_has_every_row_and_event_and_fits_a_terminal(story):
    console = Console(width=80)
    with console.capture() as shown:
        console.print(drawn(story))
    lines = shown.get().splitlines()
    assert not any("…" in line for line in lines)
    numbers = [line.split()[0] for line in lines if "yes" in line]
    assert numbers == ["1", "2", "3", "4", "5", "6"]
    assert "prefill was killed" in lines
