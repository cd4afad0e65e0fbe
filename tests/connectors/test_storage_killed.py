"""Instances that are killed while they store: no torn block, nothing left. FAULTS 34."""

from __future__ import annotations

import random
import time

import pytest
import storage_jobs
from host import check_whole, names_in

from wtransfer.specs.file import FORMAT, FileTier
from wtransfer.specs.tier import open_tier

pytestmark = pytest.mark.slow  # processes that are killed

PATIENCE_S = 20.0


def start(zygote, tmp_path, target, *args):
    """Start a process, and wait until it is at work."""
    started = tmp_path / f"started-{time.monotonic_ns()}"
    child = zygote.spawn(target, str(tmp_path / "shared"), str(started), *args)
    deadline = time.monotonic() + PATIENCE_S
    while not started.exists():
        assert time.monotonic() < deadline
        assert child.poll() is None
        time.sleep(0.001)
    return child


def check(tier):
    """Fail if a block is there and is not right; return how many there are."""
    into, num_found = bytearray(storage_jobs.NBYTES), 0
    for number in range(storage_jobs.NUM_KEYS):
        if tier.get(bytes([number]) * 36, memoryview(into)):
            assert into == storage_jobs.payload(number)
            num_found += 1
    return num_found


@pytest.mark.parametrize("number", [12, pytest.param(300, marks=pytest.mark.nightly)])
@pytest.mark.timeout(600)
def test_killed_writer_tears_no_block(zygote, tmp_path, number):
    dice, num_killed, num_caught, num_blocks = random.Random(7), 0, 0, 0
    incoming = tmp_path / "shared" / FORMAT / "incoming"
    # Until enough writers were in the middle of a block, or the test's time is up.
    while num_killed < number or num_caught <= number // 20:
        child = start(zygote, tmp_path, "storage_jobs:write_for_ever")
        time.sleep(dice.random() * 0.05)
        child.kill()
        child.wait(PATIENCE_S)
        num_killed += 1
        num_caught += bool(names_in(incoming))
        tier = open_tier(FileTier, {"shared_storage_path": str(tmp_path / "shared")})
        assert names_in(incoming) == []
        num_blocks += check(tier)
        tier.close()
    assert num_blocks > 0


@pytest.mark.parametrize("arena_bytes", [0, 1 << 16], ids=["the tier alone", "under an arena"])
@pytest.mark.parametrize("number", [5, pytest.param(300, marks=pytest.mark.nightly)])
@pytest.mark.timeout(1200)
def test_one_of_two_instances_is_killed(zygote, tmp_path, drawn, number, arena_bytes):
    dice, num_loaded, path = random.Random(11), 0, str(tmp_path / "shared")
    with storage_jobs.host_in(path, drawn, arena_bytes) as made:
        for turn in range(number):
            child = start(zygote, tmp_path, "storage_jobs:serve_for_ever", turn, arena_bytes)
            for served in range(12):
                num_loaded += made.serve(storage_jobs.prompt_of(dice), 2).loaded
                if served == 8:
                    child.kill()
                    child.wait(PATIENCE_S)
            made.settle()
            assert check_whole(tmp_path / "shared") > 0
    assert num_loaded > 0
    with storage_jobs.host_in(path, drawn, arena_bytes):
        assert names_in(tmp_path / "shared" / FORMAT / "incoming") == []
