"""The built-in connectors, and a third party's that knows nothing of weights, pass the kit."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import ClassVar

import pytest

from wtransfer.deadline import Deadline
from wtransfer.testing.connector import ConnectorConformance

# The processes of the kit find what this one does.
sys.path.append(str(Path(__file__).parent))


def kept_in(folder):
    """Options of a store in files: a load that a busy machine slows down is no miss."""
    return {"shared_storage_path": str(folder), "skip_slow_loads": False}


def damage_files(files, where):
    for file in files:
        kept = bytearray(file.read_bytes())
        kept[round(where * (len(kept) - 1))] ^= 1
        file.write_bytes(kept)
    return bool(files)


def damage_blocks(folder, where):
    return damage_files(list(folder.rglob("blocks/*")), where)


def damage_slots(slots, where):
    slots[:, round(where * (slots.shape[1] - 1))] ^= 1
    return True


class P2P(ConnectorConformance):
    kind = "transfer"
    options: ClassVar = {"staging_bytes": 2**22, "lease_s": 2.0, "deadline_s": 5.0}

    def damage(self, bed, where):
        return damage_slots(bed.producer.workers[0].side.side._buffer.memory.slots, where)


class TestSharedMemoryConnector(P2P):
    connector = "SharedMemoryConnector"


@pytest.mark.slow  # what it has in common with SharedMemoryConnector is tested there each time
class TestProcessGroupConnector(P2P):
    connector = "ProcessGroupConnector"
    options: ClassVar = {**P2P.options, "token": "known to both instances"}


@pytest.mark.slow  # the matrix of connectors shows it each time
class TestOffloadingConnector(ConnectorConformance):
    """Over the arena."""

    connector = "OffloadingConnector"
    options: ClassVar = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 2**23}

    def damage(self, bed, where):
        return damage_slots(bed.producer.workers[0].side.side._made.links[0].part.slots, where)


@pytest.mark.slow  # the same connector as above
class TestOffloadingConnectorOfLargerBlocks(TestOffloadingConnector):
    options: ClassVar = {**TestOffloadingConnector.options, "block_size": 32}
    saved_block_size = 32
    expected_failures: ClassVar = {
        "test_output_equals_reference[128]": "32 tokens are no whole number of such blocks"
    }


@pytest.mark.nightly  # the matrix of weights and the random services show it in the gate
class TestTieringOffloadingSpec(ConnectorConformance):
    """Over an arena over files: of the arena, only the instance that filled it has anything."""

    connector = "OffloadingConnector"
    is_shared = True

    def options_in(self, folder):
        return {"tier": "file", **kept_in(folder), "cpu_bytes_to_use": 2**23}

    def damage(self, bed, where):
        producer, consumer = (each.workers[0] for each in (bed.producer, bed.consumer))
        # Files are written behind the steps; the consumer has put nothing, so it has all buffers.
        deadline, quiet, idle = Deadline(bed.deadline_s), 0, consumer.get_stats()
        # Twice: between the queue and its buffer a block is in neither.
        while quiet < 2:
            deadline.check("puts behind the arena")
            stats = producer.get_stats()
            is_quiet = not stats.get("puts_waiting", 0) and (
                stats["buffers_free"] == idle["buffers_free"]
            )
            quiet = quiet + 1 if is_quiet else 0
            time.sleep(0.0005)
        damage_slots(producer.side.side._made.links[0].part.slots, where)
        return damage_blocks(bed.folder, where)


@pytest.mark.slow  # the matrix of connectors shows it each time
class TestSharedStorageConnector(ConnectorConformance):
    connector = "SharedStorageConnector"
    is_shared = True

    def options_in(self, folder):
        return kept_in(folder)

    def damage(self, bed, where):
        return damage_blocks(bed.folder, where)


@pytest.mark.slow  # its sub-connectors pass the kit by themselves
class TestMultiConnector(ConnectorConformance):
    """The one loads beyond the step, and only what its own instance left; the other within it."""

    connector = "MultiConnector"
    is_shared = True

    def options_in(self, folder):
        offloading, storage = TestOffloadingConnector, TestSharedStorageConnector
        return {
            "connectors": [
                {"kv_connector": each.connector, "kv_connector_extra_config": options}
                for each, options in ((offloading, offloading.options), (storage, kept_in(folder)))
            ]
        }

    def damage(self, bed, where):
        return damage_blocks(bed.folder, where)


class TestTokensConnector(ConnectorConformance):
    """Behind its fence; loads end within their step."""

    connector = "TokensConnector"
    module_path = "tokens_connector"
    is_shared = True

    def options_in(self, folder):
        return {"folder": str(folder)}

    def damage(self, bed):
        files = list(bed.folder.iterdir())
        for file in files:
            os.truncate(file, file.stat().st_size - 1)
        return bool(files)


@pytest.mark.nightly  # the other one passes the same kit, and `test_fenced.py` has both
class TestTokensConnectorWhoseLoadsOutlastTheStep(TestTokensConnector):
    """In the style of the seed."""

    connector = "SeedTokensConnector"

    def options_in(self, folder):
        return {"folder": str(folder), "outlasts": True}
