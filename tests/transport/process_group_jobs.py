"""A process that is a rank of as many groups as it is told: each order runs on its own thread."""

from __future__ import annotations

import collections
import contextlib
import json
import os
import runpy
import socket
import sys
import threading
import time
import weakref
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash

from wtransfer.engines.collective import RecycledMemory
from wtransfer.errors import GroupError
from wtransfer.transport.process_group import GlooCommunicator
from wtransfer.transport.rendezvous import host_rendezvous, join_rendezvous

MAX_DATAGRAM = 1 << 16
SOCKETS = runpy.run_path(str(Path(__file__).parents[1] / "tcp_sockets.py"))


def content(nbytes, seed):
    """Return bytes that only this seed gives."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


def digest(tensor):
    return xxhash.xxh3_128_hexdigest(tensor.numpy())


class Rank:
    """What the orders do. Each is a method; what it returns or raises is the answer."""

    def __init__(self):
        self.meetings = {}
        self.groups = {}
        self.num_done = 0
        self.kept = []
        self.errors = []
        self.memory = RecycledMemory()
        self.lent = {}
        self.address = None

    # -- groups

    def host(self, host="127.0.0.1", port=0):
        made = host_rendezvous(host, port)
        self.meetings[made.name] = made
        return {"at": made.host, "port": made.port, "name": made.name}

    def join(self, at, port, name):
        self.meetings[name] = join_rendezvous(at, port, name)

    def meet(self, name, rank, size, timeout_s=10.0):
        self.meetings[name].meet(rank, size, timeout_s)

    def leave(self, name):
        """Close a rendezvous; one that a group was formed at lives in its group."""
        self.meetings.pop(name).close()

    def form(
        self,
        group,
        name,
        *,
        rank,
        size,
        host="127.0.0.1",
        timeout_s=10.0,
        gloo_timeout_s=600.0,
        max_abandoned=None,
    ):
        self.groups[group] = GlooCommunicator(
            self.meetings[name],
            rank,
            size,
            host=host,
            timeout_s=timeout_s,
            operation_timeout_s=gloo_timeout_s,
            max_abandoned=max_abandoned,
        )

    def abort(self, group):
        self.groups[group].abort()

    def close(self, group):
        self.groups.pop(group).close()

    # -- operations

    def broadcast(self, group, nbytes, root, seed=0):
        communicator = self.groups[group]
        is_root = communicator.rank == root
        tensor = content(nbytes, seed) if is_root else torch.zeros(nbytes, dtype=torch.uint8)
        communicator.broadcast(tensor, root).wait()
        return digest(tensor)

    def send(self, group, nbytes, to, seed=0):
        self.groups[group].send(content(nbytes, seed), to).wait()

    def recv(self, group, nbytes, source):
        tensor = torch.zeros(nbytes, dtype=torch.uint8)
        self.groups[group].recv(tensor, source).wait()
        return digest(tensor)

    def stream(self, group, nbytes, root):
        """Broadcast without end, three under way; `done` tells how many have ended."""
        communicator = self.groups[group]
        under_way = collections.deque()
        while True:
            tensor = torch.ones(nbytes, dtype=torch.uint8)
            under_way.append(communicator.broadcast(tensor, root))
            if len(under_way) == 3:
                under_way.popleft().wait()
                self.num_done += 1

    def begin_and_keep(self, group, nbytes, root):
        """Begin three broadcasts whose pendings this process keeps."""
        tensors = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(3)]
        self.kept = [self.groups[group].broadcast(tensor, root) for tensor in tensors]

    def wait_for_kept(self):
        """Return what waiting for each comes to."""
        return [self.outcome(pending) for pending in self.kept]

    def outcome(self, pending):
        try:
            pending.wait()
        except GroupError as error:
            return str(error)
        return "done"

    def done(self):
        return self.num_done

    # -- memory that is used again

    def receive_recycled(self, group, nbytes, root):
        lent = self.memory.take(nbytes)
        lent[0] = lent[-1] = 0
        self.lent[group], self.address = weakref.ref(lent), lent.ctypes.data
        pending = self.groups[group].broadcast(torch.from_numpy(lent), root)
        # An error of this call is kept, with this frame.
        del lent
        pending.wait()

    def until_first_byte(self, group):
        while group not in self.lent or not self._has_byte(group, 0):
            time.sleep(0.0005)

    def has_last_byte(self, group):
        return self._has_byte(group, -1)

    def _has_byte(self, group, place):
        lent = self.lent[group]()
        # The call lets go of it when it has returned, with all bytes.
        return lent is None or bool(lent[place])

    def takes_it_again(self):
        """Return whether memory of the same size would lie where the last one lies."""
        return self.memory.take(1).ctypes.data == self.address

    # -- what it holds

    def holdings(self):
        """Count threads that Python does not know, and descriptors by kind; list TCP sockets."""
        # A thread that ends is forgotten by Python a moment before it is gone.
        before, now = None, self._holdings()
        while now != before:
            time.sleep(0.02)
            before, now = now, self._holdings()
        return now

    def _holdings(self):
        descriptors = collections.Counter()
        for fd in Path("/proc/self/fd").iterdir():
            with contextlib.suppress(OSError):
                descriptors[str(fd.readlink()).partition(":[")[0]] += 1
        num_tasks = sum(1 for _ in Path("/proc/self/task").iterdir())
        return {
            "threads": num_tasks - threading.active_count(),
            "descriptors": dict(descriptors),
            "sockets": sorted(SOCKETS["tcp_sockets"]()),
        }

    def listeners(self):
        return SOCKETS["listeners"]()

    def has_default_group(self):
        return dist.is_initialized()


def answer(rank, orders, order):
    begun = time.monotonic()
    try:
        reply = {"value": getattr(rank, order["order"])(**order["options"])}
    except Exception as error:
        # Kept, as an application may: what its frames refer to must not be a group.
        rank.errors.append(error)
        reply = {"error": [type(error).__name__, str(error)]}
    reply |= {"id": order["id"], "begun": begun, "ended": time.monotonic()}
    orders.send(json.dumps(reply).encode())


def serve(path):
    """Take orders until the other end hangs up."""
    rank = Rank()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as orders:
        orders.connect(path)
        while datagram := orders.recv(MAX_DATAGRAM):
            order = json.loads(datagram)
            threading.Thread(target=answer, args=(rank, orders, order), daemon=True).start()
    # An exit in good order takes a second of CPU with torch loaded.
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
