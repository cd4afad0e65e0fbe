"""What the other processes of the tests of leases run. They report one word per line on stdout."""

# ruff: noqa: T201 - lines on stdout are how a child reports

import contextlib
import gc
import os
import resource
import subprocess
import sys
import time
import weakref
from pathlib import Path
from random import Random

import torch

from wtransfer.errors import (
    DescriptorLimitError,
    SegmentGoneError,
)
from wtransfer.transport.lease import SegmentExporter, attach
from wtransfer.transport.memory import Segment

FOREVER_S = 600
PATIENCE_S = 20


def descriptors():
    return sorted(path.name for path in Path("/proc/self/fd").iterdir())


def wait_for(path):
    while not Path(path).exists():
        time.sleep(0.005)


def attach_tensor(address, secret, segment_id):
    """Return a tensor over the whole segment; nothing else keeps the mapping."""
    lease = attach(address, secret, segment_id, PATIENCE_S)
    return torch.from_numpy(lease.mapping)


def hold(address, secret, segment_id):
    tensor = attach_tensor(address, secret, segment_id)
    print("attached")
    time.sleep(FOREVER_S)
    return int(tensor[0])


def hold_until_exit(address, secret, segment_id, go):
    """Let go of nothing; at exit, say so and wait: the model may still be in use."""

    def at_exit():
        print("exiting")
        wait_for(go)

    # Finalizers that run at exit do so in reverse order: after any that `attach` makes.
    weakref.finalize(sys, at_exit)
    sys.modules["a model"] = attach_tensor(address, secret, segment_id)
    print("attached")


def leave_to_a_fork(address, secret, segment_id, go):
    """Fork while holding, let go here; the child holds its copy until `go`."""
    tensor = attach_tensor(address, secret, segment_id)
    value = int(tensor[0])
    pid = os.fork()
    if pid == 0:
        wait_for(go)
        os._exit(0 if int(tensor.min()) == int(tensor.max()) == value else 1)
    del tensor
    gc.collect()
    print("released")
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def release_in_a_fork(address, secret, segment_id, go):
    """Fork while holding; the child lets go and ends at `go`, this process holds on."""
    tensor = attach_tensor(address, secret, segment_id)
    pid = os.fork()
    if pid == 0:
        del tensor
        gc.collect()
        print("released")
        wait_for(go)
        os._exit(0)
    os.waitpid(pid, 0)
    print("child ended")
    time.sleep(FOREVER_S)


def release_beside_a_subprocess(address, secret, segment_id, go):
    """Start another program while holding, then let go; the program goes on."""
    tensor = attach_tensor(address, secret, segment_id)
    with subprocess.Popen(["sleep", str(FOREVER_S)], close_fds=False) as program:
        del tensor
        gc.collect()
        print("released")
        wait_for(go)
        program.kill()


def lend(value):
    """Lend segment 1, full of a value; print address and secret."""
    exporter = SegmentExporter()
    segment = Segment(1 << 16)
    segment.buffer[:] = value
    exporter.export(1, segment)
    print(exporter.address, exporter.secret)
    time.sleep(FOREVER_S)


def without_descriptors(address, secret):
    """Try with 0, 1 ... free descriptors; each must fail cleanly until one works."""
    before = descriptors()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    taken = []
    with contextlib.suppress(OSError):
        while True:
            taken.append(os.open("/dev/null", os.O_RDONLY))
    num_failures = 0
    while True:
        try:
            attach(address, secret, 1, PATIENCE_S)
            break
        except DescriptorLimitError:
            num_failures += 1
            os.close(taken.pop())
    for fd in taken:
        os.close(fd)
    gc.collect()
    assert descriptors() == before
    return num_failures


def read_on(address, secret, seed):
    """Borrow segments 0 and 1 for ever; return 3 if one changes while it is held."""
    random = Random(seed)
    while True:
        try:
            held = attach(address, secret, random.randrange(2), PATIENCE_S)
        except SegmentGoneError:
            continue
        tensor = torch.from_numpy(held.mapping)
        del held
        first = int(tensor[0])
        for _ in range(random.randrange(20)):
            if int(tensor.min()) != first or int(tensor.max()) != first:
                return 3
