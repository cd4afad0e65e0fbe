"""The whole command, with real copies and real managers."""

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from wtransfer.bench.command import bench
from wtransfer.bench.jobs import managing, offloading
from wtransfer.bench.offload import OffloadSettings, offload_measures
from wtransfer.errors import DigestMismatchError

RUN = [sys.executable, "-m", "wtransfer", "bench", "offload"]
TINY = ("--nbytes", "1MiB", "--blocks", "64KiB", "--kept", "64,128", "--rounds", "1")
COPIES = {"put-64KiB", "get-64KiB", "put-64KiB-unverified", "get-64KiB-unverified"}
MANAGERS = {
    *(f"{operation}-lru" for operation in ("lookup", "store", "evict", "load")),
    *(f"{operation}-arc" for operation in ("lookup", "store", "evict", "load")),
    *(f"{operation}-growth" for operation in ("lookup", "store", "evict", "load")),
}


def refused(*arguments):
    result = CliRunner().invoke(bench, ["offload", *arguments])
    assert result.exit_code != 0
    return " ".join(result.output.split())


@pytest.mark.slow
def test_every_row_is_measured():
    done = subprocess.run(
        [*RUN, *TINY, "--json"], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert {name: row["error"] for name, row in told["rows"].items()} == dict.fromkeys(
        COPIES | MANAGERS
    )
    for row in told["rows"].values():
        assert 0 < row["low"] <= row["median"] <= row["high"]
        assert (row["reached"] is None) == (row["goal"] is None)
    assert told["settings"]["block_nbytes"] == [64 << 10]


def test_the_goals_are_those_of_the_design():
    rows = {each.name: each for each in offload_measures(OffloadSettings())}
    assert {"put-2MiB", "get-2MiB", "put-128KiB", "put-16KiB-unverified"} <= rows.keys()
    assert OffloadSettings().num_blocks[-1] == 100_000


def test_vllms_manager_stands_beside_ours_or_the_row_says_why_not(capsys):
    managing.measure(num_blocks=64, num_keys=16, num_rounds=1, policy="lru")
    told = json.loads(capsys.readouterr().out)
    assert {"ours_lookup", "ours_store", "ours_evict", "ours_load"} <= told.keys()
    beside = {name for name in told if name.startswith("vllm_")}
    assert bool(beside) != bool(told["missing"])


def test_a_round_times_every_way_to_copy():
    measured = offloading._Bench(32 << 10, 4)
    measured.round(1)
    ways = {"put", "get", "put_unverified", "get_unverified"}
    assert measured.seconds.keys() == ways | {"memcpy_in", "memcpy_out"}
    assert all(len(seconds) == 1 and seconds[0] > 0 for seconds in measured.seconds.values())


@pytest.mark.parametrize("broken", ["put", "get"])
def test_a_bench_whose_copies_do_nothing_fails(broken, monkeypatch):
    monkeypatch.setattr(offloading._Arena, broken, lambda *_: None)
    if broken == "put":
        # Nothing was ever stored: loads fail, and say so.
        with pytest.raises(DigestMismatchError, match="loads_failed_absent_total"):
            offloading._Bench(32 << 10, 4).round(1)
    else:
        with pytest.raises(DigestMismatchError, match="round 1 of the bench brought other bytes"):
            offloading._Bench(32 << 10, 4).round(1)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--only", "speed"), "there is no row 'speed'; there are put-2MiB, get-2MiB,"),
        (("--blocks", "100"), "blocks of 100 bytes: expected a multiple of 32"),
        (("--blocks", "512MiB"), "at most the 268435456 of a round"),
        (("--kept", "3"), "expected 16 and more"),
        (("--nbytes", "100000GiB"), "this run needs"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments, said):
    assert said in refused(*arguments)
