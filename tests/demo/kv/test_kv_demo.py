"""The whole story, with real processes; and that it notices when something is wrong."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from wtransfer.demo.command import demo
from wtransfer.demo.kv import command
from wtransfer.testing.leftovers import Leftovers
from wtransfer.testing.mini_engine.config import ModelShape


@pytest.fixture(autouse=True)
def small(monkeypatch):
    setting = replace(
        command.DEFAULTS, num_document_tokens=200, num_new_tokens=3, model=ModelShape()
    )
    monkeypatch.setattr(command, "DEFAULTS", setting)


def run(*arguments):
    return CliRunner().invoke(demo, ["--kv", *arguments])


def test_the_story_keeps_its_promises_and_leaves_nothing():
    leftovers = Leftovers()
    result = run("--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.output)
    assert told["ok"] is True
    assert told["connector"] == "SharedMemoryConnector"
    assert [each["promise"] for each in told["checks"] if not each["kept"]] == []
    rows = told["prompts"]
    assert [each["prefill"] for each in rows] == [
        *("alive", "alive", "killed", "gone"),
        *("alive", "alive"),
    ]
    # Block by block, and never the last token.
    expected = [(each["num_prompt"] - 1) // 16 * 16 for each in rows]
    expected[2:4] = [0, 0]
    assert [each["num_loaded"] for each in rows] == expected
    assert all(each["same"] and each["tokens"] == each["expected"] for each in rows)
    assert len({tuple(each["tokens"]) for each in rows}) > 1
    assert all((each["memcpy_share"] is not None) == (each["nbytes"] > 0) for each in rows)
    assert leftovers.found() == []


@pytest.mark.slow
def test_another_connector_tells_the_same_story_in_lines():
    result = run("--connector", "SharedStorageConnector", "-o", "max_bytes=100000000")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert sum(line.endswith("yes") for line in lines) == 6
    assert any("prefill was killed (SIGKILL)" in line for line in lines)
    assert any("decode was asked alone: prefill has ended" in line for line in lines)
    assert "5 of 5 promises kept" in lines[-1]


@pytest.mark.slow
def test_keys_and_values_that_are_not_those_that_were_computed_fail_the_demo(sabotage):
    sabotage(
        "from wtransfer.testing.mini_engine.worker import Worker\n"
        "honest = Worker.step\n"
        "def step(self, plan):\n"
        "    result = honest(self, plan)\n"
        "    if result.connector and result.connector.finished_recving:\n"
        "        for layer in self.cache.layers:\n"
        "            layer.neg_()\n"
        "    return result\n"
        "Worker.step = step\n"
    )
    result = run("--json")
    assert result.exit_code == 1
    kept = [each["kept"] for each in json.loads(result.output)["checks"]]
    assert kept == [False, True, True, True, True]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--connector", "Nobodys"], "Nobodys"),
        pytest.param(["-o", "shelf_bytes=big"], "shelf_bytes", marks=pytest.mark.slow),
    ],
)
def test_a_connector_that_cannot_be_made_ends_the_demo_with_its_own_words(arguments, error):
    result = run("--json", *arguments)
    assert result.exit_code == 1
    told = json.loads(result.output)
    assert told["ok"] is False
    assert error in told["error"]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--kv", "--rounds", "8"], "--rounds is an option of the demo without --kv"),
        (["--kv", "--model-size", "tiny"], "--model-size is an option of the demo without --kv"),
        (
            ["--connector", "SharedMemoryConnector"],
            "--connector is an option of the demo with --kv",
        ),
        (["-o", "a=1"], "-o is an option of the demo with --kv"),
        (["--kv", "-o", "a"], "-o a: options are key=value"),
    ],
)
def test_options_of_the_other_story_are_refused(arguments, error):
    result = CliRunner().invoke(demo, arguments)
    assert result.exit_code == 2
    assert error in result.output


def descendants_of(pid):
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    parents = dict(map(int, line.split()) for line in listed.stdout.splitlines())
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


@pytest.mark.slow
@pytest.mark.parametrize(
    "sent", [signal.SIGINT, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)]
)
def test_nothing_is_left_when_the_demo_is_ended(sent):
    code = "from wtransfer.demo.command import demo; demo(['--kv'])"
    with subprocess.Popen(
        [sys.executable, "-uc", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            for line in process.stdout:
                if line.strip().startswith("1  "):
                    break
            started = descendants_of(process.pid)
            assert len(started) >= 1 + 3, "the zygote and the instances"
            process.send_signal(sent)
            process.communicate(timeout=30)
            assert process.returncode != 0
            end = time.monotonic() + 20.0
            while (left := [each for each in started if Path(f"/proc/{each}").exists()]) and (
                time.monotonic() < end
            ):
                time.sleep(0.05)
            assert left == []
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
