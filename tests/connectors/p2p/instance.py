"""A serving instance without a model: what it "computes" of a block can be told from its tokens.

It drives both sides of a connector in a host's order, with real tensors. In a process of its own it
serves orders at a socket (`main`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import runpy
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import torch
import xxhash

from wtransfer import KVConnectorFactory, KVTransferConfig, ServingConfig
from wtransfer.config import KVCacheConfig, ModelConfig, ParallelConfig
from wtransfer.connectors.interface import KVConnectorOutput, KVConnectorRole
from wtransfer.testing.mini_engine.contract import (
    CachedRequestData,
    NewRequestData,
    Request,
    SchedulerOutput,
)
from wtransfer.testing.mini_engine.contract import KVCacheBlocks as Blocks
from wtransfer.weight_version import process_weights

MAX_DATAGRAM = 1 << 16
PATIENCE_S = 20.0
SOCKETS = runpy.run_path(str(Path(__file__).parents[2] / "tcp_sockets.py"))


def cached(*rows):
    """Return what a step says of requests that have blocks: id, new blocks, computed before."""
    return CachedRequestData(
        [row[0] for row in rows],
        set(),
        [row[1] and (row[1],) for row in rows],
        [row[2] for row in rows],
    )


def page(tokens, layer, rank, nbytes, weights):
    """Return what computing these tokens gives, for the last block of them."""
    seed = xxhash.xxh3_64_intdigest(repr((list(tokens), layer, rank, weights)).encode()) >> 1
    return torch.frombuffer(bytearray(np.random.default_rng(seed).bytes(nbytes)), dtype=torch.uint8)


class Instance:
    """One serving instance: both sides in this process, a worker for each rank."""

    def __init__(
        self,
        engine_id,
        connector="SharedMemoryConnector",
        *,
        ranks=1,
        layers=3,
        num_blocks=64,
        block_size=4,
        page_nbytes=512,
        dtype="uint8",
        model="m",
        weights="w1",
        role="kv_both",
        options=None,
        rank_options=None,
        alone=True,
    ):
        self.block_size, self.layers, self.page_nbytes = block_size, layers, page_nbytes
        self.weights = weights
        # Those of several models of one process have a name that only this process knows.
        self.held = process_weights.hold(weights) if alone else None
        self.free = list(range(num_blocks - 1, -1, -1))
        self.requests = {}
        self.invalid, self.received = set(), set()

        def config(rank, **more):
            return ServingConfig(
                parallel_config=ParallelConfig(rank=rank, world_size=ranks),
                kv_transfer_config=KVTransferConfig(
                    connector, engine_id, role, None, {**(options or {}), **more}
                ),
                cache_config=KVCacheConfig(num_blocks, block_size),
                model_config=ModelConfig(model, dtype),
            )

        make = KVConnectorFactory.create_connector_v1
        self.scheduler = make(config(0), KVConnectorRole.SCHEDULER).side
        own = rank_options or [{}] * ranks
        self.workers = [
            make(config(r, **own[r]), KVConnectorRole.WORKER).side for r in range(ranks)
        ]
        self.caches = []
        numel = page_nbytes // getattr(torch, dtype).itemsize
        for worker in self.workers:
            shape = (num_blocks, block_size, numel // block_size)
            caches = {
                f"layer{n}": torch.zeros(shape, dtype=getattr(torch, dtype)) for n in range(layers)
            }
            worker.register_kv_caches(caches)
            self.caches.append(caches)
        self.scheduler.set_xfer_handshake_metadata(
            {rank: worker.get_handshake_metadata() for rank, worker in enumerate(self.workers)}
        )

    def close(self):
        self.scheduler.shutdown()
        for worker in self.workers:
            worker.shutdown()
        if self.held is not None:
            self.held.close()

    # -- blocks

    def take(self, number):
        return [self.free.pop() for _ in range(number)]

    def bytes_of(self, block, rank, layer):
        return self.caches[rank][f"layer{layer}"][block].reshape(-1).view(torch.uint8)

    def _compute(self, layer, rank, row):
        request, _, start, more = row
        tokens, block_ids = request.prompt_token_ids, self.requests[request.request_id]
        for number in range(start // self.block_size, (start + more) // self.block_size):
            prefix = tokens[: (number + 1) * self.block_size]
            self.bytes_of(block_ids[number], rank, layer).copy_(
                page(prefix, layer, rank, self.page_nbytes, self.weights)
            )

    def wrong(self, tokens, block_ids, num_blocks, weights=None):
        """Return which of the first blocks of a sequence are not what computing it gives."""
        found = []
        for number in range(num_blocks):
            prefix = tokens[: (number + 1) * self.block_size]
            for rank in range(len(self.workers)):
                for layer in range(self.layers):
                    wanted = page(prefix, layer, rank, self.page_nbytes, weights or self.weights)
                    if not torch.equal(wanted, self.bytes_of(block_ids[number], rank, layer)):
                        found.append((number, rank, layer))
        return found

    # -- steps

    def step(self, new=(), rows=(), finished=()):
        """Make one step.

        Args:
            new: Requests that begin: (request, blocks, computed before, tokens of this step).
            rows: Requests that go on: (request, new blocks, computed before, tokens of this step).
            finished: Identities of requests that have ended since.
        """
        step = SchedulerOutput(
            [
                NewRequestData(
                    request.request_id, request.prompt_token_ids, (list(blocks),), before
                )
                for request, blocks, before, _ in new
            ],
            cached(*((row[0].request_id, row[1], row[2]) for row in rows)),
            {row[0].request_id: row[3] for row in (*new, *rows)},
            set(finished),
        )
        metadata = self.scheduler.build_connector_meta(step)
        said, all_received = [], []
        for rank, worker in enumerate(self.workers):
            worker.handle_preemptions(metadata)
            worker.bind_connector_metadata(metadata)
            if step.num_scheduled_tokens:
                for layer in range(self.layers):
                    name = f"layer{layer}"
                    worker.wait_for_layer_load(name)
                    for row in (*new, *rows):
                        self._compute(layer, rank, row)
                    worker.save_kv_layer(name, self.caches[rank][name], None)
            worker.start_load_kv(None)
            worker.wait_for_save()
            sent, received = worker.get_finished(set(finished))
            assert sent is None
            all_received.append(received or set())
            self.invalid |= worker.get_block_ids_with_load_errors()
            said.append(worker.build_connector_worker_meta())
            worker.clear_connector_metadata()
        for other in said[1:]:
            said[0].aggregate(other)
        self._pending = [
            (pending | new_ones)
            for pending, new_ones in zip(
                getattr(self, "_pending", [set()] * len(self.workers)), all_received, strict=True
            )
        ]
        done = set.intersection(*self._pending)
        self._pending = [pending - done for pending in self._pending]
        self.received |= done
        self.scheduler.update_connector_output(
            KVConnectorOutput(None, done or None, said[0], set(self.invalid))
        )
        return metadata

    # -- requests

    def prefill(self, request_id, tokens, *, chunk=None, upto=None, finish=True, decode=True):
        """Compute a prompt; return what the next instance needs."""
        params = {"do_remote_decode": True} if decode else None
        request = Request(request_id, tokens, 1, params)
        self.scheduler.on_new_request(request)
        while self.scheduler.get_num_new_matched_tokens(request, 0)[0] is None:
            self.step()
        blocks = self.take(-(-len(tokens) // self.block_size))
        self.requests[request_id] = blocks
        self.scheduler.update_state_after_alloc(request, Blocks(blocks), 0)
        size = chunk or len(tokens)
        for start in range(0, upto or len(tokens), size):
            row = (request, blocks if not start else [], start, min(size, len(tokens) - start))
            self.step(new=[row]) if not start else self.step(rows=[row])
        return self.finish(request) if finish else request

    def finish(self, request):
        """End a request; return what its user gets."""
        blocks = self.requests.pop(request.request_id)
        stay, params = self.scheduler.request_finished(request, blocks)
        assert not stay
        for block in blocks:
            for layer in range(self.layers):
                for rank in range(len(self.workers)):
                    self.bytes_of(block, rank, layer).fill_(0xEE)  # somebody else's by now
        self.free += blocks
        self.step(finished=[request.request_id])
        return params

    def begin(self, request_id, tokens, params, num_computed=0):
        """Begin to load; return the request and how many tokens are hoped for."""
        request = Request(request_id, tokens, 1, params)
        self.scheduler.on_new_request(request)
        number, later = self.scheduler.get_num_new_matched_tokens(request, num_computed)
        assert later == bool(number)
        blocks = self.take(-(-len(tokens) // self.block_size))
        self.requests[request_id] = blocks
        self.scheduler.update_state_after_alloc(request, Blocks(blocks), number)
        self.step()
        return request, number

    def until_received(self, request_id, patience_s=PATIENCE_S):
        end = time.monotonic() + patience_s
        while request_id not in self.received:
            assert time.monotonic() < end, f"{request_id} was not received"
            time.sleep(0.001)
            self.step()

    def decode(self, request_id, tokens, params, patience_s=PATIENCE_S):
        """Load what there is and judge it."""
        began = time.monotonic()
        request, number = self.begin(request_id, tokens, params)
        blocks = list(self.requests[request_id])
        if number:
            self.until_received(request_id, patience_s)
        load_s = time.monotonic() - began
        matched = number // self.block_size
        missing = [n for n in range(matched) if blocks[n] in self.invalid]
        good = missing[0] if missing else matched
        outcome = {
            "matched": matched,
            "loaded": good,
            "wrong": len(self.wrong(tokens, blocks, good)),
            "seconds": load_s,
        }
        self.invalid -= set(blocks)
        self.finish(request)
        return outcome

    def stats(self):
        return {
            "scheduler": self.scheduler.get_stats(),
            "workers": [worker.get_stats() for worker in self.workers],
        }


class Puppet:
    """An instance in a process of its own. Each method is an order; its result is the answer."""

    def __init__(self):
        self.instance = None

    def make(self, engine_id, **options):
        self.instance = Instance(engine_id, **options)

    def close(self):
        self.instance.close()

    def prefill(self, request_id, tokens, **options):
        return self.instance.prefill(request_id, tokens, **options)

    def decode(self, request_id, tokens, params, **options):
        return self.instance.decode(request_id, tokens, params, **options)

    def stats(self):
        return self.instance.stats()

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
