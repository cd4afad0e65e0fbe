"""Both runs, with real processes; and that they fail when something is wrong."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from wtransfer.demo import command, kv, weights
from wtransfer.demo.command import demo
from wtransfer.demo.output import Check, Result
from wtransfer.testing.leftovers import Leftovers
from wtransfer.testing.mini_engine.config import ModelShape


@pytest.fixture
def run(monkeypatch):
    """Run the weights demo in this process, with real children; train only a little."""
    monkeypatch.setattr(weights, "_TRAIN_S", 0.2)
    smallest = ("--model-size", "tiny", "--rounds", "4")
    return lambda *arguments: CliRunner().invoke(demo, [*smallest, *arguments])


@pytest.fixture
def run_kv(monkeypatch):
    """Run the KV demo in this process, with real instances of a small model."""
    monkeypatch.setattr(kv, "_NUM_DOCUMENT_TOKENS", 200)
    monkeypatch.setattr(kv, "_NUM_NEW_TOKENS", 3)
    monkeypatch.setattr(kv, "_MODEL", ModelShape())
    return lambda *arguments: CliRunner().invoke(demo, ["--kv", *arguments])


def kept(result):
    return [check["kept"] for check in json.loads(result.output)["checks"]]


@pytest.mark.slow  # the main job of the README
def test_the_weights_demo_keeps_its_promises(run):
    result = run("--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert document["ok"] is True
    assert kept(result) == [True] * 8
    rounds = document["rounds"]
    assert [each["outcome"] for each in rounds] == [
        *("committed", "aborted"),
        *("committed", "committed"),
    ]
    assert [each["num_equal"] for each in rounds] == [2, 0, 1, 2]
    steps = [int(each["version"].removeprefix("step-")) for each in rounds]
    assert 0 < steps[0] < steps[1] < steps[2] < steps[3]
    untrained, killed, back, caught_up, trained = document["events"]
    assert "worker-0, untrained: " in untrained
    assert "worker-1 killed (SIGKILL)" in killed
    assert "worker-1 is back" in back
    assert "worker-1 caught up: has step-" in caught_up
    assert f"worker-0, serving {rounds[-1]['version']}: " in trained


@pytest.mark.slow
def test_a_live_model_that_differs_from_what_its_session_reports_fails_the_demo(run, sabotage):
    sabotage(
        "from wtransfer.demo import model\n"
        "honest = model.Generator.next_byte\n"
        "def next_byte(self):\n"
        "    honest(self)\n"
        "    steps = int(self._model.trained_steps)\n"
        "    if steps != self.__dict__.setdefault('steps', steps):\n"
        "        self.steps = steps\n"
        "        weight = self._model.layers.norm.weight\n"
        "        weight.data = weight.data + 1\n"
        "model.Generator.next_byte = next_byte\n"
    )
    result = run("--json")
    assert result.exit_code == 1
    assert kept(result) == [True, False, *[True] * 6]


@pytest.mark.slow
def test_a_worker_that_fails_is_named_with_its_own_words(run, sabotage):
    sabotage(
        "from wtransfer.demo import model\n"
        "def next_byte(self):\n"
        "    raise RuntimeError('out of ink')\n"
        "model.Generator.next_byte = next_byte\n"
    )
    result = run("--json")
    assert result.exit_code == 1
    document = json.loads(result.output)
    assert document["ok"] is False
    assert "the demo's worker-" in document["error"]
    assert "RuntimeError: out of ink" in document["error"]


def test_the_kv_demo_keeps_its_promises_and_leaves_nothing(run_kv):
    leftovers = Leftovers()
    result = run_kv("--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.output)
    assert document["ok"] is True
    assert document["connector"] == "SharedMemoryConnector"
    assert kept(result) == [True] * 5
    rows = document["prompts"]
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
    assert leftovers.found() == []


@pytest.mark.slow
def test_the_kv_demo_runs_with_another_connector_and_prints_a_line_per_prompt(run_kv):
    result = run_kv("--connector", "SharedStorageConnector", "-o", "max_bytes=100000000")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert sum(line.endswith("yes") for line in lines) == 6
    assert any("prefill was killed (SIGKILL)" in line for line in lines)
    assert any("decode was asked alone: prefill " in line for line in lines)
    assert "5 of 5 promises kept" in lines[-1]


@pytest.mark.slow
def test_keys_and_values_that_differ_from_those_computed_fail_the_kv_demo(run_kv, sabotage):
    sabotage(
        "from wtransfer.connectors.shm import SharedMemoryConnector\n"
        "worker = SharedMemoryConnector.worker_cls\n"
        "register, get = worker.register_kv_caches, worker.get_finished\n"
        "def register_kv_caches(self, caches):\n"
        "    self.caches = caches\n"
        "    register(self, caches)\n"
        "def get_finished(self, finished_req_ids):\n"
        "    sent, received = get(self, finished_req_ids)\n"
        "    if received:\n"
        "        for layer in self.caches.values():\n"
        "            layer.neg_()\n"
        "    return sent, received\n"
        "worker.register_kv_caches, worker.get_finished = register_kv_caches, get_finished\n"
    )
    result = run_kv("--json")
    assert result.exit_code == 1, result.output
    assert kept(result) == [False, True, True, True, True]


@pytest.mark.slow
def test_a_connector_that_cannot_be_made_ends_the_kv_demo_with_its_own_words(run_kv):
    result = run_kv("-o", "staging_bytes=big")
    assert result.exit_code == 1
    assert "the demo failed: " in result.output
    assert "staging_bytes" in result.output


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
        (["--rounds", "3"], "Invalid value for '--rounds'"),
        *(
            (["--model-size", size], "neither one of tiny, small, medium, large nor a number")
            for size in ("", "huge", "0", "-1", "nan", "inf", "1e9")
        ),
    ],
)
def test_a_usage_error_exits_with_2_before_anything_starts(arguments, error):
    result = CliRunner().invoke(demo, arguments)
    assert result.exit_code == 2
    assert error in result.output


@pytest.mark.parametrize(("size", "millions"), [("tiny", 4.0), ("large", 150.0), ("25", 25.0)])
def test_sizes_and_options_reach_the_run_and_a_broken_promise_the_exit_status(
    monkeypatch, size, millions
):
    calls = []

    def record(*arguments, quiet):
        calls.append((*arguments, quiet))
        return Result([Check("a promise", quiet, "seen")], {})

    monkeypatch.setattr(weights, "run_weights", record)
    monkeypatch.setattr(kv, "run_kv", record)
    assert CliRunner().invoke(demo, ["--model-size", size, "--json"]).exit_code == 0
    options = ["-o", "a=1", "-o", 'b={"c": [true]}', "-o", "d=text=x"]
    assert CliRunner().invoke(demo, ["--kv", "--connector", "X", *options]).exit_code == 1
    assert calls == [
        (millions, 8, True),
        ("X", {"a": 1, "b": {"c": [True]}, "d": "text=x"}, False),
    ]


def test_the_command_itself_needs_no_torch():
    code = f"import sys, {command.__name__}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def descendants_of(pid):
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True)
    parents = dict(map(int, line.split()) for line in listed.stdout.splitlines())
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "sent"),
    [
        ("--model-size=tiny", signal.SIGKILL),
        pytest.param("--kv", signal.SIGINT, marks=pytest.mark.nightly),
    ],
)
def test_no_process_is_left_when_the_demo_is_ended(argument, sent):
    code = f"from wtransfer.demo.command import demo; demo([{argument!r}])"
    with subprocess.Popen(
        [sys.executable, "-uc", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            for line in process.stdout:
                if line.strip().startswith("1 "):
                    break
            started = descendants_of(process.pid)
            assert len(started) >= 3  # the fork server, and two processes or more
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
