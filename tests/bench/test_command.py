import contextlib
import json
import re
import subprocess
import sys
from xml.etree import ElementTree as ET

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from wtransfer.bench import command, harness, weights
from wtransfer.bench.harness import Goal, Result, Row, Spread
from wtransfer.errors import PeerLostError

INF, NAN = float("inf"), float("nan")
OPERATIONS = ("lookup", "store", "evict", "load")
RUNS = {
    "weights": (
        ("--quick", "--nbytes", "1MiB", "--rounds", "1"),
        {
            *("adopt", "copy", "adopt-cpu", "copy-cpu"),
            *("gloo", "gloo-buckets", "checkpoint", "packed", "small", "memory"),
            *("control", "push", "push-again", "gap", "pause", "death"),
        },
    ),
    "offload": (
        ("--quick", "--nbytes", "1MiB", "--blocks", "64KiB", "--rounds", "1"),
        {
            *("put-64KiB", "get-64KiB", "put-64KiB-unverified", "get-64KiB-unverified"),
            *(f"{each}-{suffix}" for each in OPERATIONS for suffix in ("lru", "arc")),
        },
    ),
    "connectors": (
        ("--quick", "--nbytes", "4MiB", "--blocks", "2MiB,64KiB", "--rounds", "1"),
        {
            f"{way}-{kind}-{size}"
            for way in ("load", "save")
            for kind in ("shm", "process-group", "storage")
            for size in ("2MiB", "64KiB")
        }
        | {f"plan-{each}" for each in ("shm", "process-group", "storage", "offloading")},
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("verb", RUNS)
def test_every_row_is_measured(verb):
    arguments, rows = RUNS[verb]
    done = subprocess.run(
        [sys.executable, "-m", "wtransfer", "bench", verb, *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert {name: row["error"] for name, row in found["rows"].items()} == dict.fromkeys(rows)
    for row in found["rows"].values():
        assert row["low"] <= row["median"] <= row["high"]
        assert (row["reached"] is None) == (row["goal"] is None)
    assert found["settings"]["num_rounds"] == 1
    assert set(found["machine"]) >= {"cpu", "num_cores", "kernel", "torch", "load"}
    assert f"{len(rows)}/{len(rows)} {list(found['rows'])[-1]}" in done.stderr.splitlines()
    if verb == "weights":
        assert found["rows"]["death"]["beside"]["kills"] == 3
        assert found["rows"]["packed"]["beside"]["workers"] == 2
        assert all(value > 0 for value in found["rows"]["adopt-cpu"]["beside"].values())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("weights --only speed", "there is no row 'speed'; there are adopt, copy, adopt-cpu,"),
        ("weights --nbytes big", "'big' is no size; write a number and a unit"),
        ("weights --nbytes -1", "'-1' is no size"),
        ("weights --nbytes 100000GiB", "this run needs"),
        ("weights --workers 1,0", "'1,0' are no numbers above 0"),
        ("weights --rounds 0", "0 is not in the range"),
        ("offload --only speed", "there is no row 'speed'; there are put-2MiB, get-2MiB,"),
        ("offload --blocks 100", "blocks of 100 bytes: expected a multiple of 32"),
        ("offload --blocks 512MiB", "at most the 268435456 of a round"),
        ("connectors --blocks 5000", "blocks of 5000 bytes: expected a multiple of 4096, a number"),
        ("connectors --folder /nowhere/at/all", "'/nowhere/at/all' does not exist"),
    ],
)
def test_usage_error_says_what_to_ask_for(arguments, said):
    result = CliRunner().invoke(command.bench, arguments.split())
    assert result.exit_code != 0
    assert said in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("4KiB", 4096), ("1.5 gib", 3 << 29), ("2GB", 2 * 10**9), ("3 MiB", 3 << 20)],
)
def test_sizes_are_parsed(text, nbytes):
    assert command.parse_nbytes(text) == nbytes


def measure_well(_runner):
    return Result(Spread(0.72, 0.7, 0.8), "ms", Goal("<=", 5.0), {"round_s": 0.5}, limit=9.0)


def fail(_runner):
    raise PeerLostError("a process has died")


ROWS = {"well": Row("well", "a commit", measure_well), "failed": Row("failed", "a kill", fail)}


@pytest.fixture
def bench(monkeypatch):
    """Run of a bench of weights whose rows run no case."""

    def run(*arguments, rows=None):
        monkeypatch.setattr(weights, "rows", lambda _settings: rows or list(ROWS.values()))
        monkeypatch.setattr(harness, "Runner", lambda *_: contextlib.nullcontext())
        return CliRunner().invoke(command.bench, ["weights", *arguments])

    return run


@pytest.mark.parametrize(("chosen", "status"), [("well", 0), ("failed", 1), ("well failed", 1)])
def test_exit_status_is_1_if_a_row_could_not_be_measured(bench, chosen, status):
    result = bench("--json", rows=[ROWS[name] for name in chosen.split()])
    assert result.exit_code == status
    rows = json.loads(result.stdout)["rows"]
    assert rows == {name: command.document(ROWS[name], RESULTS[name]) for name in chosen.split()}


RESULTS = {"well": measure_well(None), "failed": "a process has died"}


def test_document_has_every_number():
    assert command.document(ROWS["failed"], "died") == {"what": "a kill", "error": "died"}
    assert command.document(ROWS["well"], RESULTS["well"]) == {
        "what": "a commit",
        "unit": "ms",
        "median": 0.72,
        "low": 0.7,
        "high": 0.8,
        "goal": {"relation": "<=", "value": 5.0},
        "limit": 9.0,
        "reached": True,
        "beside": {"round_s": 0.5},
        "stages": {},
        "note": "",
        "error": None,
    }


def test_table_shows_numbers_goals_and_what_stands_beside(capsys):
    spread = Spread(0.72, 0.7, 0.8)
    results = {
        Row("adopt", "a round", fail): Result(
            spread, goal=Goal(">=", 0.9), stages={"total_s": 1234.5}
        ),
        Row("pause", "a commit", fail): Result(
            spread, "ms", Goal("<=", 5.0), {"round_s": 0.0123, "update_nbytes": 4096}, limit=9.0
        ),
        Row("death", "a kill", fail): "nobody died",
    }
    command.show(results, command.describe_machine())
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "cores" in lines[0]
    assert "adopt 0.72 0.7 .. 0.8 >= 0.9 ###### | not reached" in lines
    assert "pause 0.72 ms 0.7 .. 0.8 <= 5 ms, all <= 9 ms # | reached" in lines
    assert "death - - - failed" in lines
    assert lines[lines.index("adopt: a round") :] == [
        *("adopt: a round", "stages: total_s 1,234"),
        *("pause: a commit", "beside: round_s 0.0123, update_nbytes 4,096"),
        *("death: a kill", "nobody died"),
    ]


@pytest.mark.parametrize(
    ("value", "drawn"),
    [
        (0.0, "        |"),
        (0.45, "####    |"),
        (0.89, "####### |"),  # it does not touch a goal that it has missed
        (0.9, "########|"),
        (0.91, "########|#"),
        (1.8, "########|########"),
        (1.81, "########|########>"),
        (90.0, "########|########>"),
    ],
)
def test_bar_is_as_long_as_the_number_and_its_goal_is_in_the_middle(value, drawn):
    assert command.goal_bar(value, 0.9) == drawn


@pytest.mark.parametrize(
    ("value", "goal"),
    [(INF, 1.0), (-INF, 1.0), (NAN, 1.0), (1.0, 0.0), (1.0, NAN), (1e308, 1e-308)],
)
def test_a_number_that_is_none_has_no_bar(value, goal):
    assert command.goal_bar(value, goal) == ""


@pytest.mark.parametrize("is_wide", [True, False])
def test_a_narrow_terminal_has_all_digits_and_no_bars(monkeypatch, capsys, is_wide):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120" if is_wide else "80")
    row = Row("put-64KiB-unverified", "a copy", measure_well)
    command.show({row: measure_well(None)}, command.describe_machine())
    out = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    (line,) = (
        line for line in out.splitlines() if line.strip().startswith("put-64KiB-unverified ")
    )
    bar = ["#", "|"] * is_wide
    numbers = ["0.72", "ms", "0.7", "..", "0.8", "<=", "5", "ms,", "all", "<=", "9", "ms"]
    assert line.split() == ["put-64KiB-unverified", *numbers, *bar, "reached"]
    assert ("goal at |" in out) == is_wide


@pytest.mark.parametrize("name", ["nowhere/page.html", "."])
def test_page_that_cannot_be_written_is_refused_before_anything_is_measured(bench, tmp_path, name):
    row = Row("one", "a commit", lambda _runner: pytest.fail("the bench has begun"))
    result = bench("--html", str(tmp_path / name), rows=[row])
    assert result.exit_code == 2
    assert "cannot be written: " in " ".join(result.output.split())


@pytest.mark.parametrize("form", ["--json", "--quick"])
def test_page_that_cannot_be_written_at_the_end_does_not_cost_the_numbers(bench, form):
    result = bench(form, "--html", "/dev/full", rows=[ROWS["well"]])
    assert (result.exit_code, type(result.exception)) == (1, SystemExit)
    assert "0.72" in result.stdout
    assert result.stderr.splitlines()[-1] == "Error: --html /dev/full: No space left on device"


def interrupt(_runner):
    raise KeyboardInterrupt


@pytest.mark.parametrize("before", [None, "the page of another run"])
@pytest.mark.parametrize("asked", ["--only nothing", "--rounds 0", "--nbytes 100000GiB", ""])
def test_a_run_that_does_not_end_leaves_no_page(bench, tmp_path, asked, before):
    path = tmp_path / "page.html"
    if before is not None:
        path.write_text(before)
    result = bench("--html", str(path), *asked.split(), rows=[Row("one", "a commit", interrupt)])
    assert result.exit_code != 0
    assert (path.read_text() if path.exists() else None) == before


def test_completion_in_a_shell_makes_no_file(tmp_path):
    path = tmp_path / "page.html"
    ShellComplete(command.bench, {}, "bench", "_").get_completions(
        ["weights", "--html", str(path)], "--"
    )
    assert not path.exists()


@pytest.mark.parametrize("before", [None, "the page of another run"])
def test_page_is_written_beside_the_numbers(bench, tmp_path, before):
    path = tmp_path / "page.html"
    if before is not None:
        path.write_text(before)
    result = bench("--json", "--html", str(path))
    assert result.exit_code == 1  # of the row that failed
    assert set(json.loads(result.stdout)["rows"]) == set(ROWS)
    html = ET.fromstring(path.read_text("utf-8"))
    assert [each.get("id") for each in html.iter("article")] == list(ROWS)


def test_help_needs_no_torch():
    code = "import sys, wtransfer.bench.command; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
