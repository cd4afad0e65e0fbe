"""The whole command, with real processes; what it leaves when it is killed: nothing."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from wtransfer.bench.command import bench
from wtransfer.bench.room import needed_nbytes
from wtransfer.bench.scratch import Scratch
from wtransfer.bench.settings import Settings

RUN = [sys.executable, "-m", "wtransfer", "bench", "weights"]
SMALL = ("--quick", "--nbytes", "1MiB", "--rounds", "1", "--small", "50x4KiB")
ROWS = {
    *("adopt", "copy", "adopt-unverified", "copy-unverified", "adopt-cpu", "copy-cpu"),
    *("gloo", "gloo-buckets", "checkpoint", "packed", "small", "memory", "gap", "pause", "death"),
}


def refused(*arguments):
    result = CliRunner().invoke(bench, ["weights", *arguments])
    assert result.exit_code != 0
    return result.output


def descendants(pid):
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


def scratch_of(pids):
    """The folder of a bench, by the arguments of the process that will remove it."""
    for pid in pids:
        last = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").rpartition("\0")[2]
        if last.startswith("/dev/shm/wtransfer-bench-"):
            return Path(last)
    return None


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.mark.slow
def test_every_row_is_measured():
    done = subprocess.run(
        [*RUN, *SMALL, "--json"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert {name: row["error"] for name, row in told["rows"].items()} == dict.fromkeys(ROWS)
    for row in told["rows"].values():
        assert row["low"] <= row["median"] <= row["high"]
        assert (row["reached"] is None) == (row["goal"] is None)
    assert told["rows"]["death"]["beside"]["kills"] == 3
    assert told["rows"]["packed"]["beside"]["workers"] == 2
    assert all(value > 0 for value in told["rows"]["adopt-cpu"]["beside"].values())
    assert told["settings"]["num_rounds"] == 1
    assert set(told["machine"]) >= {"cpu", "num_cores", "kernel", "torch", "load"}


def test_a_scratch_folder_goes_with_all_that_is_in_it():
    with Scratch() as scratch:
        Path(scratch.path, "a").mkdir()
        Path(scratch.path, "a", "file").write_text("ink")
    assert not Path(scratch.path).exists()


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_a_bench_that_is_ended_leaves_neither_processes_nor_files(how):
    process = subprocess.Popen(
        [*RUN, *SMALL, "--rounds", "100000", "--only", "checkpoint", "--commit", "adopt"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: scratch_of(descendants(process.pid)))
        folder = scratch_of(descendants(process.pid))
        wait_until(lambda: list(folder.iterdir()))
        pids = descendants(process.pid)
        # Two that play, whom they were forked from, and who removes the folder.
        assert len(pids) >= 4
        process.send_signal(how)
        assert process.wait(30) != 0
        wait_until(lambda: not folder.exists())
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    finally:
        process.kill()
        process.wait()


def test_what_does_not_fit_is_refused_at_once_with_both_numbers():
    text = refused("--nbytes", "100000GiB")
    assert "this run needs 5e+05 GiB of memory, " in text
    assert "are available" in text


def test_more_workers_need_more_memory_where_each_has_its_own():
    few, many = Settings(workers=(1,)), Settings(workers=(4,))
    assert needed_nbytes(many) - needed_nbytes(few) == 6 * few.nbytes
    assert needed_nbytes(Settings(commits=("adopt",))) < needed_nbytes(Settings())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "speed"), "there is no row 'speed'; there are adopt, copy, adopt-unverified,"),
        (("--nbytes", "big"), "'big' is no size"),
        (("--small", "20000"), "'20000' is not NUMBERxSIZE"),
        (("--workers", "1,0"), "'1,0' are no numbers above 0"),
        (("--commit", "move"), "there is no commit 'move'; there are adopt, copy"),
        (("--rounds", "0"), "0 is not in the range"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, said):
    assert said in " ".join(refused(*arguments).split())


def test_help_and_conducting_need_no_torch():
    code = (
        "import sys, wtransfer.bench.command, wtransfer.bench.run, wtransfer.bench.table;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
