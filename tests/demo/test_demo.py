"""The whole demo, with real processes; and that it notices when something is wrong."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from wtransfer.demo import conductor
from wtransfer.demo.command import demo

RUN = "from wtransfer.demo.command import demo; demo()"
SMALLEST = ("--model-size", "tiny", "--rounds", "4")


@pytest.fixture
def run(monkeypatch):
    """Run the command in this process, with its children as processes; train only a little."""
    monkeypatch.setattr(conductor, "_TRAIN_S", 0.2)
    return lambda *arguments: CliRunner().invoke(demo, [*SMALLEST, *arguments])


def children_of(pid):
    listed = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False
    )
    return [int(each) for each in listed.stdout.split()]


def wait_until_gone(pids, seconds=20):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return
        time.sleep(0.05)
    pytest.fail(f"still there after {seconds} s: {pids}")


@pytest.mark.slow  # the main job of the README
def test_the_demo_keeps_its_promises(run):
    result = run("--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert told["ok"] is True
    assert [each["promise"] for each in told["checks"] if not each["kept"]] == []
    outcomes = [each["outcome"] for each in told["rounds"]]
    assert outcomes == ["committed", "aborted", "committed", "committed"]
    assert [each["num_equal"] for each in told["rounds"]] == [2, 0, 1, 2]
    assert told["rounds"][1]["blamed"] == "worker-1"
    assert told["rounds"][1]["failed_in"] == "transfer"
    assert told["last_loss"] < told["first_loss"]
    assert told["usual_gap_s"] > 0
    assert len({each["text"] for each in told["samples"]}) >= 2


@pytest.mark.nightly  # `.ci/run` has no terminal and runs it, too
def test_without_a_terminal_it_writes_lines(run):
    result = run()
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert sum(line.strip().startswith(("1  ", "2  ", "3  ", "4  ")) for line in lines) == 4
    assert any("worker-1 killed (SIGKILL)" in line for line in lines)
    assert any("worker-1 caught up: has step-" in line for line in lines)
    assert "8 of 8 promises kept" in lines[-1]


@pytest.mark.slow
def test_a_live_model_that_is_not_what_the_session_says_fails_the_demo(run, sabotage):
    sabotage(
        "from wtransfer.weight_sync.worker import target\n"
        "honest = target.StateDictTarget.apply\n"
        "def apply(self, tensors):\n"
        "    honest(self, tensors)\n"
        "    last = next(reversed(self._tensors().values()))\n"
        "    last.detach().view(-1)[-1] += 1\n"
        "target.StateDictTarget.apply = apply\n"
    )
    result = run("--json")
    assert result.exit_code == 1
    told = json.loads(result.output)
    kept = {each["promise"]: each["kept"] for each in told["checks"]}
    assert [promise for promise, was in kept.items() if not was] == [
        "the models that serve are bit for bit the published one (digest taken independently)"
    ]


@pytest.mark.slow
def test_a_worker_that_fails_is_named_with_its_own_words(run, sabotage):
    sabotage(
        "from wtransfer.demo import generate\n"
        "def next_byte(self):\n"
        "    raise RuntimeError('out of ink')\n"
        "generate.Generator.next_byte = next_byte\n"
    )
    result = run("--json")
    assert result.exit_code == 1
    told = json.loads(result.output)
    assert told["ok"] is False
    assert "the demo's worker-" in told["error"]
    assert told["error"].endswith("RuntimeError: out of ink")


@pytest.mark.parametrize("arguments", [("--rounds", "3"), ("--model-size", "huge")])
def test_what_cannot_be_shown_is_refused_at_once(arguments):
    result = CliRunner().invoke(demo, arguments)
    assert result.exit_code == 2
    assert "Error: Invalid value" in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGKILL]
)
def test_nothing_is_left_when_the_demo_is_ended(sent):
    command = [sys.executable, "-c", RUN, *SMALLEST]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            for line in process.stdout:
                if line.strip().startswith("1  "):
                    break
            children = children_of(process.pid)
            assert len(children) == 3
            process.send_signal(sent)
            process.communicate(timeout=30)
            wait_until_gone(children)
            assert process.returncode != 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


def test_the_command_itself_needs_no_torch():
    code = "import sys, wtransfer.demo.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
