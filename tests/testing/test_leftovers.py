"""What a process leaves is told from what other processes leave at the same time."""

from __future__ import annotations

import secrets
import subprocess
import sys
from collections import deque
from multiprocessing import resource_tracker, shared_memory
from pathlib import Path

import pytest

from wtransfer.testing.leftovers import Leftovers, num_kept

SHM = Path("/dev/shm")
WATCH = """
from wtransfer.testing.leftovers import Leftovers
leftovers = Leftovers()
print("ready", flush=True)
input()
print(leftovers.found(within_s=0), flush=True)
"""


@pytest.fixture
def name():
    made = f"leftovers-{secrets.token_hex(8)}"
    yield made
    (SHM / made).unlink(missing_ok=True)


@pytest.mark.parametrize("is_held", [True, False])
def test_shm_files_of_other_processes_are_not_counted(name, is_held):
    with subprocess.Popen(
        [sys.executable, "-c", WATCH], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "ready\n"
        with (SHM / name).open("wb") as file:
            if not is_held:
                file.close()
            found, _ = other.communicate("\n", timeout=30)
    assert found == "[]\n"


def test_shm_file_that_this_process_opened_is_counted(name):
    leftovers = Leftovers()
    (SHM / name).touch()
    assert leftovers.found(within_s=0) == [f"1 x file /dev/shm/{name}"]
    (SHM / name).unlink()
    assert leftovers.found(within_s=0) == []


def test_shared_memory_that_was_closed_and_not_unlinked_is_counted(name):
    leftovers = Leftovers()
    memory = shared_memory.SharedMemory(name, create=True, size=10)
    resource_tracker.unregister(memory._name, "shared_memory")
    memory.close()
    assert f"1 x file /dev/shm/{name}" in leftovers.found(within_s=0)


def test_shm_file_that_a_child_holds_is_counted(name):
    leftovers = Leftovers()
    code = f"file = open('{SHM / name}', 'w'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        child.stdout.readline()
        assert f"1 x file /dev/shm/{name}" in leftovers.found(within_s=0)
        child.communicate("\n", timeout=30)


def test_leftovers_are_named_in_full(name):
    leftovers = Leftovers()
    leftovers.check(within_s=0)
    (SHM / name).touch()
    with pytest.raises(AssertionError, match=f"are left:\n  1 x file /dev/shm/{name}$"):
        leftovers.check(within_s=0)


def test_what_an_object_keeps_is_counted_and_what_has_a_bound_is_not():
    class Side:
        def __init__(self):
            self.kept, self.latest = {}, deque(maxlen=9)

    side = Side()
    before = num_kept(side)
    side.latest.extend(range(9))
    assert num_kept(side) == before
    for number in range(1000, 1020):
        side.kept[number] = [number]
    grown = num_kept(side) - before
    assert grown == {"dict": 40, "list": 20}
