"""Ray in a network namespace of its own: its processes listen on every interface that there is.

A test runs a program by `run`; the program has its Ray within `started`.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SIOCSIFFLAGS, IFF_UP = 0x8914, 1
LOOPBACK = "127.0.0.1"
APART = ["unshare", "--map-root-user", "--net"]
MARK = "WTRANSFER_RAY_TEST"
ENV = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # Otherwise Ray writes a token into the home folder, and reports how it is used.
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A machine that others fill is no reason to end an actor.
    "RAY_memory_monitor_refresh_ms": "0",
}


def why_not():
    """Return why there can be no namespace; empty: there can."""
    tried = subprocess.run([*APART, "true"], capture_output=True, text=True, check=False)
    return tried.stderr if tried.returncode else ""


def run(program, *arguments, timeout_s, env=None):
    """Run a program, whose first argument is a folder for Ray, and end all that it leaves.

    Returns:
        Its output, and the processes that were left of it after some seconds.
    """
    # Sockets lie in it, whose paths may have 107 bytes.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(Path(__file__).parent)]))
    own = {"RAY_AUTH_TOKEN": secrets.token_hex(32), MARK: mark, "PYTHONPATH": path}
    try:
        done = subprocess.run(
            [*APART, sys.executable, program, folder, *arguments],
            env={**os.environ, **ENV, **own, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        left = _await_none(mark)
        assert done.returncode == 0, done.stderr[-4000:]
        return done.stdout, left
    finally:
        for pid in _processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


def _processes(mark):
    """Return the processes that descend from the run with this mark."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _await_none(mark):
    limit = time.monotonic() + 20
    while _processes(mark) and time.monotonic() < limit:
        time.sleep(0.1)
    return _processes(mark)


@contextlib.contextmanager
def started(folder, num_cpus):
    """Have a Ray of this process's own within the block, with its files in a folder."""
    import ray

    _raise_loopback()
    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        _node_ip_address=LOOPBACK,
        _temp_dir=folder,
    )
    try:
        yield
    finally:
        ray.shutdown()


def _raise_loopback():
    """Make 127.0.0.1 work in a new network namespace, where nothing else is."""
    interfaces = [name for _, name in socket.if_nameindex()]
    if interfaces != ["lo"]:
        raise SystemExit(f"not in a network namespace of its own: {interfaces}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        fcntl.ioctl(line, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", IFF_UP))
