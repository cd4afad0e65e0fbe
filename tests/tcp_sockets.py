"""TCP sockets of a process, as the kernel lists them."""

import contextlib
from pathlib import Path


def tcp_sockets(pid="self"):
    """Return state and local address of each, as ``/proc/net/tcp`` writes them."""
    proc = Path(f"/proc/{pid}")
    inodes = set()
    for fd in (proc / "fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(fd.readlink()).removeprefix("socket:[").removesuffix("]"))
    lines = []
    for table in ("tcp", "tcp6"):
        lines += (proc / "net" / table).read_text().splitlines()[1:]
    rows = [line.split() for line in lines]
    return [(row[3], row[1]) for row in rows if row[9] in inodes]


def listeners(pid="self"):
    """Return the local address of each that listens."""
    return sorted(address for state, address in tcp_sockets(pid) if state == "0A")
