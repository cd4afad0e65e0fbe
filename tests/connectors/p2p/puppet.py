"""A host in a process of its own that serves orders at a socket (`main`).

With a socket that has a path, as abstract ones do not lead to other network namespaces.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import json
import runpy
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch

from wtransfer.testing.mini_engine.config import ModelShape
from wtransfer.testing.mini_engine.model import LocalWeights

HERE = Path(__file__).parent
MAX_DATAGRAM = 1 << 16
LARGE = ModelShape(num_layers=4, width=128, num_heads=2, num_kv_heads=2)
SOCKETS = runpy.run_path(str(HERE.parents[1] / "tcp_sockets.py"))


def _host():
    spec = importlib.util.spec_from_file_location("host", HERE.parent / "host.py")
    sys.modules["host"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Host


class Puppet:
    """Each method is an order; its result is the answer."""

    def make(self, connector, **options):
        self.host = _host()(
            LocalWeights(0), connector, model=LARGE, block_size=16, num_blocks=128, **options
        )

    def prefill(self, prompt):
        return self.host.prefill(prompt)

    def decode(self, prompt, params):
        served = self.host.serve(prompt, 1, params)
        return {"matched": served.matched, "loaded": served.loaded, "load_s": served.load_s}

    def stats(self):
        return self.host.stats

    def listeners(self):
        """Return the hosts at which this process listens by TCP, as the kernel writes them."""
        return [address.partition(":")[0] for address in SOCKETS["listeners"]()]

    def holdings(self):
        """Count descriptors, threads, and mappings of shared segments."""
        lines = Path("/proc/self/maps").read_text().splitlines()
        return [
            sum(1 for _ in Path("/proc/self/fd").iterdir()),
            threading.active_count(),
            sum("/memfd:wtransfer" in line for line in lines),
        ]


def main(path):
    """Serve orders at a socket until its other end is closed."""
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    puppet = Puppet()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(path)
        while datagram := connection.recv(MAX_DATAGRAM):
            order = json.loads(datagram)
            reply = {"id": order["id"], "begun": time.monotonic()}
            try:
                reply["value"] = getattr(puppet, order["order"])(**order["options"])
            except Exception as error:
                reply["error"] = [type(error).__name__, f"{error}"]
            reply["ended"] = time.monotonic()
            with contextlib.suppress(OSError):
                connection.send(json.dumps(reply).encode())


if __name__ == "__main__":
    main(sys.argv[1])
