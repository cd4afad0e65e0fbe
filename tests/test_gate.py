"""A test that fails beside others is run again alone; CI goes on only if it passes each time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ALONE = Path(__file__).parents[1] / ".ci" / "alone.py"
PYTEST = (sys.executable, "-m", "pytest")
FAILING = """
from pathlib import Path

def test_{name}():
    runs = Path("runs-{name}")
    runs.write_text(runs.read_text() + "x" if runs.exists() else "x")
    assert len(runs.read_text()) {passes}, "the first text of {name}"
"""


@pytest.fixture
def gate(tmp_path):
    """Run tests whose number of runs decides whether they pass; then those that failed, alone."""
    (tmp_path / "pytest.ini").write_text("[pytest]")
    environ = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environ.pop("PYTEST_ADDOPTS", None)
    files = 0

    def run(*command):
        return subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )

    def gate(tests_of_files):
        nonlocal files
        for tests in tests_of_files:
            files += 1
            text = "".join(FAILING.format(name=n, passes=p) for n, p in tests.items())
            (tmp_path / f"test_{files}.py").write_text(text)
        first = run(*PYTEST)
        (tmp_path / "output").write_text(first.stdout)
        done = run(sys.executable, str(ALONE), "output", "report", *PYTEST)
        report = tmp_path / "report"
        return done, report.read_text() if report.exists() else ""

    return gate


def test_failed_test_that_passes_three_times_alone_is_listed_with_its_first_failure(gate):
    done, report = gate([{"late": "> 1", "whole": "> 0"}, {"later": "> 1"}])
    assert done.returncode == 0
    assert done.stdout.count("== alone") == 6
    for name in ("test_1.py::test_late\n", "test_2.py::test_later\n"):
        assert name in report
    assert report.count("AssertionError: the first text of late\n") == 1
    assert report.count("AssertionError: the first text of later\n") == 1
    assert "short test summary" not in report


@pytest.mark.parametrize("passes", ["in (2, 3)", "in (2, 4)", "> 4"])
def test_failed_test_that_fails_once_alone_fails_the_run(gate, passes):
    done, report = gate([{"broken": passes}])
    assert done.returncode == 1
    assert "test_1.py::test_broken fails alone as well" in done.stderr
    assert report == ""


@pytest.mark.parametrize(
    "files",
    [[{"one": "> 1", "two": "> 1"}], [{f"test_{number}": "> 1"} for number in range(9)]],
    ids=["two in a file", "nine"],
)
def test_a_broken_room_fails_the_run(gate, files):
    done, _ = gate(files)
    assert done.returncode == 1
    assert "too many tests failed to be run alone" in done.stderr
    assert "== alone" not in done.stdout


def test_a_run_that_no_test_failed_is_not_repaired(gate):
    done, _ = gate([{"whole": "> 0"}])
    assert done.returncode == 1
    assert "no test did" in done.stderr
