"""FAULTS 34 and 37 for the arena: ranks killed at any moment leave nothing, and nothing torn."""

import contextlib
import os
import random
import secrets
import time
from pathlib import Path

import pytest
import xxhash

ENGINE = {
    "world_size": 2,
    "num_slots": 5,
    "num_blocks": 2,
    "num_layers": 4,
    "page_nbytes": [1 << 16],
    "deadline_s": 10.0,
}
FEW_AND_MANY = [
    4,
    pytest.param(20, marks=pytest.mark.slow),
    pytest.param(100, marks=[pytest.mark.nightly, pytest.mark.timeout(600)]),
]


def sockets(engine_id):
    """Return the sockets of an engine's arena; others may run beside this test."""
    name = f"wtransfer-arena-{os.geteuid()}-{xxhash.xxh3_64_hexdigest(engine_id.encode())}-"
    lines = Path("/proc/net/unix").read_text().splitlines()
    return {line.split()[-1] for line in lines if name in line}


def names_in_memory(pid):
    """Return what a process holds that has a name in a file system of memory."""
    proc = Path(f"/proc/{pid}")
    held = [line.split()[-1] for line in (proc / "maps").read_text().splitlines()]
    for descriptor in (proc / "fd").iterdir():
        with contextlib.suppress(OSError):
            held.append(str(descriptor.readlink()))
    assert any("memfd:wtransfer" in name for name in held), "this is where an arena shows"
    return [name for name in held if name.startswith(("/dev/shm", "/run"))]


@pytest.mark.parametrize("times", FEW_AND_MANY)
def test_when_everyone_is_killed_nothing_is_left(start_rank, times):
    moment = random.Random(5)
    for turn in range(times):
        engine = {**ENGINE, "engine_id": f"engine-{secrets.token_hex(4)}"}
        ranks = [start_rank(rank=rank, **engine) for rank in range(2)]
        for rank in ranks:
            rank.order("churn", start=turn)
        assert len(sockets(engine["engine_id"])) >= 2, "else there is nothing to leave behind"
        assert [name for rank in ranks for name in names_in_memory(rank.pid)] == []
        time.sleep(moment.uniform(0, 0.03))
        for rank in ranks:
            assert rank.kill() == -9
        assert not any(Path(f"/proc/{rank.pid}").exists() for rank in ranks)
        assert sockets(engine["engine_id"]) == set()


@pytest.mark.parametrize("times", FEW_AND_MANY)
def test_a_rank_killed_while_it_stores_leaves_no_torn_block(start_rank, times):
    """The other rank keeps the arena; what is in it is judged by headers alone."""
    engine = {**ENGINE, "engine_id": f"engine-{secrets.token_hex(4)}"}
    zero = start_rank(rank=0, **engine)
    zero.ask("store", number=1, slot=0)
    moment = random.Random(7)
    seen = {"whole": 0, "empty": 0, "begun": 0, "wrong": 0}
    for turn in range(times):
        victim = start_rank(rank=1, **engine)
        for state, number in victim.ask("look").items():
            seen[state] += number
        victim.order("churn", start=100 * turn)
        while not zero.ask("num_headers_of", rank=1):
            time.sleep(0.001)
        time.sleep(moment.uniform(0, 0.05))
        os.kill(victim.pid, 9)
        victim.kill()
        assert zero.ask("load", number=1, slot=0) == [True, True]
    assert seen["wrong"] == 0
    assert seen["whole"] > 0
    if times == 100:
        assert seen["begun"] > 0, "no kill ever came in the midst of a store"
