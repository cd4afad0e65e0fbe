"""Find the sockets of a backend that other hosts reach."""

from __future__ import annotations

import ipaddress
import re
import sys
from pathlib import Path

from wtransfer.testing.leftovers import descendants, descriptors

LISTENS = {"tcp": "0A", "udp": "07"}
"""Table of the kernel -> state of a socket that waits for whoever comes."""


def reachable() -> set[tuple[str, int]]:
    """Return host and port of each socket of this process and its descendants that IP reaches.

    They listen, or take datagrams of whoever sends some.
    """
    own = {target for pid in ("self", *descendants()) for target in descriptors(pid)}
    found = set()
    for name, state in LISTENS.items():
        for table in (Path(f"/proc/net/{name}"), Path(f"/proc/net/{name}6")):
            for line in table.read_text("ascii").splitlines()[1:] if table.exists() else ():
                row = line.split()
                if row[3] == state and f"socket:[{row[9]}]" in own:
                    host, port = row[1].split(":")
                    # Words of 32 bits, in this machine's order.
                    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
                    raw = b"".join(word.to_bytes(4, sys.byteorder) for word in words)
                    found.add((str(ipaddress.ip_address(raw)), int(port, 16)))
    return found


def check_this_host_only(sockets: set[tuple[str, int]], options: object) -> None:
    """Fail if one of these sockets is reached by other hosts, and no option names its address."""
    named = repr(options)

    def is_named(host: str) -> bool:
        return re.search(rf"(?<![\w.:]){re.escape(host)}(?![\w.])", named) is not None

    beyond = [
        f"[{host}]:{port}"
        for host, port in sorted(sockets)
        if not _is_loopback(host) and not is_named(host)
    ]
    assert not beyond, (
        f"it listens at {', '.join(beyond)}, which other hosts reach, and none of the options of "
        "this test says so"
    )


def _is_loopback(host: str) -> bool:
    address = ipaddress.ip_address(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
