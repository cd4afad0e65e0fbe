import signal
import subprocess
import sys
import time
from pathlib import Path

import bench_cases
import pytest

from wtransfer.bench import harness
from wtransfer.bench.harness import Goal, Result, Row, Spread, measure_rows
from wtransfer.errors import PeerLostError, StallError


def run(runner, trainer, worker=None, num_workers=1, **options):
    functions = [getattr(bench_cases, name or trainer) for name in (trainer, worker)]
    return runner.run("a test", *functions, num_workers, **options)


def test_case_returns_what_its_functions_return(runner):
    found = runner.run("a test", bench_cases.echo, bench_cases.echo, 2, word="ink")
    assert found.trainer == [0, 2, {"word": "ink"}]
    assert found.workers == [[1, 2, {"word": "ink"}], [2, 2, {"word": "ink"}]]
    assert list(Path(runner.folder).iterdir()) == []


def test_case_is_run_once_for_all_rows_and_fails_for_all(runner, monkeypatch):
    reported = []
    monkeypatch.setattr(runner, "_report", reported.append)

    def measure(runner):
        runner.run("fails", bench_cases.fail)

    def measure_well(runner):
        runner.run("runs", bench_cases.echo, number=reported.count("runs"))
        return Result(Spread(1, 1, 1))

    rows = [
        Row(name, "", what) for name, what in (("a", measure), ("b", measure), ("c", measure_well))
    ]
    results = list(measure_rows(rows, runner, reported.append).values())
    assert reported == ["1/3 a", "fails", "2/3 b", "3/3 c", "runs"]
    assert "ValueError: out of ink" in results[0]
    assert results[1] == results[0]
    assert results[2].spread.median == 1


@pytest.mark.parametrize(("trainer", "worker"), [("fail", "wait"), ("wait", "fail")])
def test_process_that_fails_ends_the_case_and_its_last_words_are_in_the_error(
    runner, children, trainer, worker
):
    words = r"(?s)bench_cases:fail\) ended with 1 .*ValueError: out of ink$"
    with pytest.raises(PeerLostError, match=words):
        run(runner, trainer, worker, num_workers=2)
    assert children() == []


def test_killed_worker_ends_the_case_unless_it_is_replaced(runner):
    with pytest.raises(PeerLostError, match="ended with -9"):
        run(runner, "wait", "kill_self")
    assert run(runner, "count_starts", replace_killed=True).trainer >= 3


def test_case_that_takes_too_long_is_ended(runner, children, monkeypatch):
    monkeypatch.setattr(harness, "CASE_S", 0.3)
    with pytest.raises(StallError, match="the case 'a test' of the bench"):
        run(runner, "wait")
    assert children() == []


def test_worker_that_does_not_leave_is_killed(runner, monkeypatch):
    monkeypatch.setattr(harness, "LEAVE_S", 0.2)
    found = run(runner, "return_pid_of_worker")
    assert not Path(f"/proc/{found.trainer}").exists()
    assert found.workers == []


def test_median_has_the_goal_and_every_measurement_the_limit():
    def reached(relation, value, limit=None):
        return Result(Spread(2.0, 1.0, 5.0), goal=Goal(relation, value), limit=limit).reached

    assert Result(Spread(2.0, 1.0, 5.0)).reached is None
    assert (reached("<=", 2.0), reached("<=", 1.9)) == (True, False)
    assert (reached(">=", 2.0), reached(">=", 2.1)) == (True, False)
    assert (reached("<=", 2.0, limit=5.0), reached("<=", 2.0, limit=4.9)) == (True, False)


def descendants(pid):
    found = []
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += [int(child), *descendants(int(child))]
    return found


def folder_of(pids):
    """Return the folder of a bench, by the arguments of the process that will remove it."""
    for pid in pids:
        last = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").rpartition("\0")[2]
        if last.startswith("/dev/shm/wtransfer-bench-"):
            return Path(last)
    return None


def wait_until(condition):
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_bench_that_is_ended_leaves_neither_processes_nor_files(how):
    small = ("--quick", "--nbytes", "1MiB", "--rounds", "100000")
    process = subprocess.Popen(
        [sys.executable, "-m", "wtransfer", "bench", "weights", *small, "--only", "checkpoint"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: folder_of(descendants(process.pid)))
        folder = folder_of(descendants(process.pid))
        wait_until(lambda: list(folder.rglob("*.safetensors")))
        pids = descendants(process.pid)
        # Trainer, worker, the process that they were forked from, and the one that removes files.
        assert len(pids) >= 4
        process.send_signal(how)
        assert process.wait(30) != 0
        wait_until(lambda: not folder.exists())
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
    finally:
        process.kill()
        process.wait()
