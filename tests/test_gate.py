"""CI: a test that fails beside others is run alone; a package apart is tested if it has changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

CI = Path(__file__).parents[1] / ".ci"
ALONE = CI / "alone.py"
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


@pytest.fixture
def clone(tmp_path):
    """A clone of a repository with what has landed, and a commit of ours in it."""
    # As in the fixtures of git itself: no configuration of this machine's.
    environ = {"PATH": os.environ["PATH"], "GIT_CONFIG_GLOBAL": "/dev/null"}
    for role in ("AUTHOR", "COMMITTER"):
        environ |= {f"GIT_{role}_NAME": "a", f"GIT_{role}_EMAIL": "a@localhost"}

    class Clone:
        folder = tmp_path / "clone"

        def git(self, *command, folder=None):
            command = ("git", *command)
            subprocess.run(command, cwd=folder or self.folder, env=environ, check=True)

        def change(self, path, folder=None):
            file = (folder or self.folder) / path
            file.parent.mkdir(exist_ok=True)
            with file.open("a") as text:
                text.write("more\n")
            self.git("add", ".", folder=folder)
            self.git("commit", "--quiet", "-m", path, folder=folder)

        def differs(self, *paths, **more):
            command = (".ci/differs", *paths)
            done = subprocess.run(
                command,
                cwd=self.folder,
                env=environ | more,
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.stderr == ""
            return done.returncode == 0

    one, landed = Clone(), tmp_path / "landed"
    landed.mkdir()
    one.git("init", "--quiet", folder=landed)
    shutil.copytree(CI, landed / ".ci")
    for path in ("room/a", "ground.py", "top/b.py"):
        one.change(path, folder=landed)
    one.git("clone", "--quiet", str(landed), str(one.folder), folder=tmp_path)
    return one


def test_package_is_tested_if_it_differs_from_what_has_landed_by_any_of_several_commits(clone):
    clone.change("room/a")
    clone.change("top/b.py")
    assert clone.differs("room")
    assert clone.differs("ground.py", "top")
    assert not clone.differs("ground.py", ":(glob)*.py")


def test_package_is_tested_where_what_has_landed_is_not_known(clone):
    assert clone.differs("room")
    clone.change("top/b.py")
    assert not clone.differs("room")
    assert clone.differs("room", LANDED="no-such-commit")
    clone.git("remote", "remove", "origin")
    assert clone.differs("room")


def test_package_is_tested_with_a_file_that_git_does_not_know_yet(clone):
    clone.change("top/b.py")
    (clone.folder / "room" / "new").write_text("new", "utf-8")
    assert clone.differs("room")
    assert not clone.differs("ground.py")


def test_commit_that_has_landed_may_be_named(clone):
    clone.change("room/a")
    clone.change("top/b.py")
    assert not clone.differs("room", LANDED="HEAD~1")
    assert clone.differs("room", LANDED="HEAD~2")


def test_path_that_is_misspelt_or_gone_is_no_reason_to_test_nothing(clone):
    clone.change("top/b.py")
    assert clone.differs("romo")
    clone.git("rm", "--quiet", "ground.py")
    clone.git("commit", "--quiet", "-m", "gone")
    assert clone.differs(":(glob)*.py")
