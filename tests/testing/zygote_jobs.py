"""What the children of test zygotes run."""

# ruff: noqa: T201 - lines on stdout are how a child reports

import os
import sys
import threading
import time
from pathlib import Path


def add(one, other=0):
    return one + other


def say(text):
    print(text)
    print(text.upper(), file=sys.stderr)


def nothing():
    pass


def fail():
    raise ValueError("this child fails")


def leave():
    raise SystemExit(7)


def sleep(seconds=600.0):
    print("asleep", os.getpid())
    time.sleep(seconds)


def what_a_child_has():
    """Print threads, and where every descriptor above the standard ones leads."""
    print(threading.active_count())
    for fd in list(Path("/proc/self/fd").iterdir()):
        # The one that listed them is closed again.
        if int(fd.name) > 2 and fd.is_symlink():
            print(fd.readlink())


def make_a_zygote_and_sleep():
    """Also fork a child, whose copies of all descriptors hide the end of this process."""
    from wtransfer.testing.zygote import Zygote

    inner = Zygote(preload=[], paths=[Path(__file__).parent])
    child = inner.spawn("zygote_jobs:sleep", stdout="/dev/null")
    copy = os.fork()
    if copy == 0:
        time.sleep(600)
    print(inner.pid, child.pid, copy)
    time.sleep(600)
