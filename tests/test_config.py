"""Options are read by several threads of one process."""

from __future__ import annotations

import subprocess
import sys

# Threads that meet a struct for the first time together: with msgspec alone the process ends.
TOGETHER = """
from __future__ import annotations

import sys
import threading
from typing import Annotated

import msgspec
from wtransfer.config import convert_options

sys.setswitchinterval(1e-6)


def struct():
    class Options(msgspec.Struct):
        one: Annotated[int, msgspec.Meta(gt=0)] = 1
        two: Annotated[int, msgspec.Meta(gt=0)] = 2
        three: Annotated[int, msgspec.Meta(gt=0)] = 3
        four: Annotated[int, msgspec.Meta(gt=0)] = 4

    return Options


def read(cls, barrier):
    barrier.wait()
    found.append(convert_options({"one": 5, "four": 6}, cls))


found = []
for _ in range(200):
    cls, barrier = struct(), threading.Barrier(3)
    threads = [threading.Thread(target=read, args=(cls, barrier)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
print(len(found), {(each.one, each.two, each.four) for each in found})
"""


def test_threads_read_options_of_one_kind_for_the_first_time_at_once(tmp_path):
    command = [sys.executable, "-c", TOGETHER]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "600 {(5, 2, 6)}\n"), done.stderr
