"""What processes do that are killed while they write to a shared folder."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import sys
import time
from pathlib import Path

import torch

from wtransfer.specs.file import FileTier
from wtransfer.weight_version import process_weights

NBYTES = 2 << 20
NUM_KEYS = 16


def driver():
    """Return the module of that name, which lies beside this one."""
    if "driver" not in sys.modules:
        path = Path(__file__).with_name("driver.py")
        spec = importlib.util.spec_from_file_location("driver", path)
        sys.modules["driver"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["driver"])
    return sys.modules["driver"]


@functools.cache
def payload(number):
    """Return the bytes that belong to a key."""
    # A quarter of what the standard library takes, and it is for each process that is killed.
    generator = torch.Generator().manual_seed(number)
    words = torch.randint(-(2**63), 2**63 - 1, (NBYTES // 8,), generator=generator)
    return words.numpy().tobytes()


def write_for_ever(path, started):
    """Put the same blocks again and again."""
    tier = FileTier({"shared_storage_path": path})
    payloads = [payload(number) for number in range(NUM_KEYS)]
    Path(started).touch()
    while True:
        for number, data in enumerate(payloads):
            tier.put(bytes([number]) * 36, memoryview(data))


def write_half(path, started):
    """Begin to write a block, and never end."""
    tier = FileTier({"shared_storage_path": path})
    with tier._folders.temporary() as (_, fd):
        os.write(fd, b"half a bl")
        Path(started).touch()
        time.sleep(60)


def serve_for_ever(path, started, seed):
    """Be an instance that shares a folder, and serve until the end comes."""
    process_weights.hold("fingerprint-1")
    made = driver()
    transfer = made.transfer_config("SharedStorageConnector", shared_storage_path=path)
    instance = made.Instance(transfer, num_ranks=2)
    Path(started).touch()
    dice = random.Random(seed)
    number = 0
    while True:
        prompt = prompt_of(dice)
        request = instance.serve(f"r{number}", prompt, 2)
        assert request.num_failures == 0 or request.output_token_ids
        number += 1


def prompt_of(dice):
    """Return one of a few hundred prompts, many of which begin alike."""
    return [dice.randrange(3) for _ in range(3)] + list(range(dice.randrange(4, 60)))
