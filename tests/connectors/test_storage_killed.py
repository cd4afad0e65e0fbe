"""Instances that are killed while they store: no torn block, nothing left. FAULTS 34."""

from __future__ import annotations

import random
import time

import pytest
import storage_jobs
from driver import Instance, answer, names_in, transfer_config

from wtransfer.specs.file import FORMAT, FileTier

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


def kills(zygote, tmp_path, number):
    """Kill writers again and again; return how often one of them was in the middle of a block."""
    dice, num_caught, num_blocks = random.Random(7), 0, 0
    incoming = tmp_path / "shared" / FORMAT / "incoming"
    for _ in range(number):
        child = start(zygote, tmp_path, "storage_jobs:write_for_ever")
        time.sleep(dice.random() * 0.05)
        child.kill()
        child.wait(PATIENCE_S)
        num_caught += len(names_in(incoming)) > 0
        tier = FileTier({"shared_storage_path": str(tmp_path / "shared")})
        assert names_in(incoming) == []
        num_blocks += check(tier)
        tier.close()
    assert num_blocks > 0
    return num_caught


def check(tier):
    """Fail if a block is there and is not right; return how many there are."""
    into, num_found = bytearray(storage_jobs.NBYTES), 0
    for number in range(storage_jobs.NUM_KEYS):
        if tier.get(bytes([number]) * 36, memoryview(into)):
            assert into == storage_jobs.payload(number)
            num_found += 1
    return num_found


def test_sweep_spares_what_a_living_process_writes(zygote, tmp_path):
    incoming = tmp_path / "shared" / FORMAT / "incoming"
    child = start(zygote, tmp_path, "storage_jobs:write_half")
    held = names_in(incoming)
    FileTier({"shared_storage_path": str(tmp_path / "shared")}).close()
    assert (len(held), names_in(incoming)) == (1, held)
    child.kill()
    child.wait(PATIENCE_S)
    FileTier({"shared_storage_path": str(tmp_path / "shared")}).close()
    assert names_in(incoming) == []


def test_killed_writer_tears_no_block(zygote, tmp_path):
    assert kills(zygote, tmp_path, 12) > 0


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_writer_killed_200_times_tears_no_block(zygote, tmp_path):
    assert kills(zygote, tmp_path, 200) > 20


def test_one_of_two_instances_is_killed(zygote, tmp_path, weights):
    dice, num_loaded = random.Random(11), 0
    transfer = transfer_config(
        "SharedStorageConnector", shared_storage_path=str(tmp_path / "shared"), max_bytes=60_000
    )
    with Instance(transfer, num_ranks=2) as made:
        for turn in range(5):
            child = start(zygote, tmp_path, "storage_jobs:serve_for_ever", turn)
            for number in range(12):
                prompt = storage_jobs.prompt_of(dice)
                request = made.serve(f"{turn}-{number}", prompt, 2)
                assert request.output_token_ids == answer(prompt, 2, num_ranks=2)
                num_loaded += request.num_loaded
                if number == 8:
                    child.kill()
                    child.wait(PATIENCE_S)
    assert num_loaded > 0
    with Instance(transfer, num_ranks=2):
        assert names_in(tmp_path / "shared" / FORMAT / "incoming") == []
