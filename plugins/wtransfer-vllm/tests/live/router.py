"""A router's half of vLLM's KV events: what each engine says it has."""

from __future__ import annotations

import collections
import os
import time

import msgspec
import zmq

PATIENCE_S = 60.0
GPU, CPU, TIER = "GPU", "CPU", "STORAGE"


class Router:
    """Listens to the publishers of engines, and keeps a model of what they advertise.

    It takes `AllBlocksCleared` to be of vLLM's own cache only, which is the reading by which most
    stays advertised.

    Make it before the engines: it connects as soon as one of them publishes.
    """

    def __init__(self):
        self.endpoint = f"ipc://@wtransfer-router-{os.getpid()}-{time.monotonic_ns()}"
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        self._socket.connect(self.endpoint)
        self.has = collections.defaultdict(dict)
        """By medium: group and hash of each block, with what was said of it."""
        self.said = []
        """Kind, medium and number of blocks of each event."""
        self._next = 0

    @property
    def options(self):
        """Options of an engine that publishes to it."""
        config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": self.endpoint}
        return {"kv_events_config": config}

    def listen(self):
        """Take what has come."""
        while self._socket.poll(0):
            _, number, payload = self._socket.recv_multipart()
            number = int.from_bytes(number, "big")
            # A batch that was lost would make the model wrong.
            assert number == self._next, f"batch {number}, expected {self._next}"
            self._next += 1
            _, events, *_ = msgspec.msgpack.decode(payload)
            for event in events:
                self._take(event)

    def wait_until(self, holds):
        """Listen until something holds of the router."""
        limit = time.monotonic() + PATIENCE_S
        while True:
            self.listen()
            if holds():
                return
            assert time.monotonic() < limit, self.said[-20:]
            self._socket.poll(100)

    def hashes(self, medium):
        """Return the hashes that are advertised for a medium."""
        return {block_hash for _, block_hash in self.has[medium]}

    def chain(self, medium, tokens):
        """Return the hashes of the whole blocks of a prompt that are advertised, in order."""
        found, parent, num_tokens = [], None, 0
        while True:
            for (_, block_hash), (_, before, of_block, _) in self.has[medium].items():
                end = num_tokens + len(of_block)
                if before == parent and of_block == tokens[num_tokens:end]:
                    found.append(block_hash)
                    parent, num_tokens = block_hash, end
                    break
            else:
                return found

    def close(self):
        self._socket.close(0)

    def _take(self, event):
        kind, medium = event["type"], event.get("medium", GPU)
        known, group = self.has[medium], event.get("group_idx")
        hashes = event.get("block_hashes", ())
        self.said.append((kind, medium, len(hashes)))
        if kind == "AllBlocksCleared":
            known.clear()
        elif kind == "BlockRemoved":
            for block_hash in hashes:
                # What vLLM says of its own blocks is not looked into.
                assert medium == GPU or (group, block_hash) in known, "removed and not stored"
                known.pop((group, block_hash), None)
        else:
            parent, size = event["parent_block_hash"], event["block_size"]
            # Of a window vLLM leaves out hashes of its own blocks, and tells the tokens of all.
            is_whole = len(event["token_ids"]) == size * len(hashes)
            for number, block_hash in enumerate(hashes):
                assert medium == GPU or (group, block_hash) not in known, "stored twice"
                tokens = event["token_ids"][number * size : (number + 1) * size]
                extra = (event.get("extra_keys") or [None] * len(hashes))[number]
                of_group = event["kv_cache_spec_kind"], event.get("kv_cache_spec_sliding_window")
                of_prefix = (parent, tokens, extra) if is_whole else ()
                known[group, block_hash] = [of_group, *of_prefix]
                parent = block_hash
