"""What processes do that are killed while they write to a shared folder."""

from __future__ import annotations

import functools
import os
import random
from pathlib import Path

import torch

from wtransfer.specs.file import FileTier
from wtransfer.specs.tier import open_tier
from wtransfer.testing.mini_engine.model import LocalWeights

NBYTES = 2 << 20
NUM_KEYS = 16


@functools.cache
def payload(number):
    """Return the bytes that belong to a key."""
    # A quarter of what the standard library takes, and it is for each process that is killed.
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(-(2**63), 2**63 - 1, (NBYTES // 8,), generator=generator)
    return words.numpy().tobytes()


def write_for_ever(path, started):
    """Put the same blocks again and again."""
    tier = open_tier(FileTier, {"shared_storage_path": path})
    payloads = [payload(number) for number in range(NUM_KEYS)]
    Path(started).touch()
    while True:
        for number, data in enumerate(payloads):
            tier.put(bytes([number]) * 36, memoryview(data))


def host_in(path, weights, arena_bytes):
    """Return a host that shares a folder, maybe with an arena of its own over it."""
    from host import Host

    options = {"shared_storage_path": path, "max_bytes": 60_000, "cpu_bytes_to_use": arena_bytes}
    engine_id = f"host {os.getpid()}"
    return Host(weights, "SharedStorageConnector", num_ranks=2, engine_id=engine_id, **options)


def serve_for_ever(path, started, seed, arena_bytes):
    """Be a host that shares a folder, and serve until the end comes."""
    torch.set_num_threads(1)
    made, dice = host_in(path, LocalWeights(0), arena_bytes), random.Random(seed)
    Path(started).touch()
    while True:
        made.serve(prompt_of(dice), 2)


def prompt_of(dice):
    """Return one of a few hundred prompts, many of which begin alike."""
    return [dice.randrange(3) for _ in range(3)] + list(range(dice.randrange(4, 60)))
