"""A third party's spec: bytes by key, in memory or in a folder; it checks nothing and trusts all.

It knows nothing of weights, headers or checksums: whatever keeps stale blocks away is not in here.
"""

from __future__ import annotations

import collections
import concurrent.futures
import threading
from pathlib import Path

import torch

from wtransfer.errors import BlockNotKeptError
from wtransfer.specs.interface import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadingSpec,
    OffloadingWorker,
    PrepareStoreOutput,
    RequestOffloadingContext,
    TransferResult,
)

MEMORY: dict[str, dict[str, bytes]] = collections.defaultdict(dict)
"""Shelf -> name -> bytes; of this process."""


class ShelfPlaces(LoadStoreSpec):
    def __init__(self, names):
        self.names = names


class ShelfManager(OffloadingManager):
    """Keeps the least recently used blocks out, whatever else happens."""

    def __init__(self, num_blocks, kept):
        self._num_blocks = num_blocks
        self._kept = collections.OrderedDict.fromkeys(kept)
        self._storing = set()
        self._pins = collections.Counter()
        self.evicted = 0
        self.shut_down = False

    def on_new_request(self, req_context):
        return RequestOffloadingContext()

    def lookup(self, key, req_context):
        if key in self._storing:
            return LookupResult.HIT_PENDING
        return LookupResult.HIT if key in self._kept else LookupResult.MISS

    def prepare_load(self, keys, req_context):
        if any(key not in self._kept or key in self._storing for key in keys):
            raise BlockNotKeptError("not on the shelf")
        self._pins.update(keys)
        for key in keys:
            self._kept.move_to_end(key)
        return ShelfPlaces([key.hex() for key in keys])

    def complete_load(self, keys, req_context):
        self._pins.subtract(keys)

    def prepare_store(self, keys, req_context):
        new = [key for key in dict.fromkeys(keys) if key not in self._kept]
        excess = len(self._kept) + len(new) - self._num_blocks
        free = [k for k in self._kept if not self._pins[k] and k not in self._storing]
        evicted = [key for key in free if key not in keys][: max(excess, 0)]
        if len(evicted) < excess:
            return None
        for key in evicted:
            del self._kept[key]
        self.evicted += len(evicted)
        self._kept.update(dict.fromkeys(new))
        self._storing.update(new)
        return PrepareStoreOutput(new, ShelfPlaces([key.hex() for key in new]), evicted)

    def complete_store(self, keys, req_context, success=True):
        self._storing.difference_update(keys)
        for key in keys if not success else ():
            self._kept.pop(key, None)

    def shutdown(self):
        self.shut_down = True


class MemoryShelf:
    def __init__(self, name):
        self._blocks = MEMORY[name]

    def names(self):
        return list(self._blocks)

    def put(self, name, block):
        self._blocks[name] = block

    def get(self, name):
        return self._blocks[name]


class FolderShelf:
    def __init__(self, folder):
        self._folder = Path(folder)

    def names(self):
        return [path.name for path in self._folder.iterdir()]

    def put(self, name, block):
        (self._folder / name).write_bytes(block)

    def get(self, name):
        return (self._folder / name).read_bytes()


class ShelfWorker(OffloadingWorker):
    """Copies on a thread, one job after the other."""

    def __init__(self, kv_caches, shelf, rank):
        self._pages = [each.tensor.view(torch.uint8).flatten(1) for each in kv_caches.tensors]
        self._shelf = shelf
        self._rank = rank
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._jobs = {}
        self._lock = threading.Lock()

    def _name(self, name):
        return f"{name}.{self._rank}"

    def submit_store(self, job_id, src_spec, dst_spec):
        def store():
            for block, name in zip(src_spec.block_ids, dst_spec.names, strict=True):
                parts = [page[block].numpy().tobytes() for page in self._pages]
                self._shelf.put(self._name(name), b"".join(parts))
            return sum(page.shape[1] for page in self._pages) * len(src_spec.block_ids)

        self._jobs[job_id] = self._thread.submit(store)
        return True

    def submit_load(self, job_id, src_spec, dst_spec):
        def load():
            nbytes = 0
            for block, name in zip(dst_spec.block_ids, src_spec.names, strict=True):
                parts = torch.frombuffer(
                    bytearray(self._shelf.get(self._name(name))), dtype=torch.uint8
                )
                for page, part in zip(
                    self._pages, parts.split([p.shape[1] for p in self._pages]), strict=True
                ):
                    page[block] = part
                nbytes += parts.numel()
            return nbytes

        self._jobs[job_id] = self._thread.submit(load)
        return True

    def get_finished(self):
        done = [job_id for job_id, job in self._jobs.items() if job.done()]
        return [self._result(job_id) for job_id in done]

    def _result(self, job_id):
        job = self._jobs.pop(job_id)
        if job.exception() is not None:
            return TransferResult(job_id, success=False)
        return TransferResult(job_id, success=True, transfer_size=job.result())

    def wait(self, job_ids):
        concurrent.futures.wait([job for i, job in self._jobs.items() if i in job_ids])

    def shutdown(self):
        self._thread.shutdown()


class ShelfSpec(OffloadingSpec):
    """Options: ``num_blocks``, and ``folder`` or ``shelf`` (a name in this process's memory)."""

    def __init__(self, config):
        self._options = config.extra_config
        self._rank = config.parallel.rank
        self._manager = None
        self._worker = None

    def _shelf(self):
        if "folder" in self._options:
            return FolderShelf(self._options["folder"])
        return MemoryShelf(self._options["shelf"])

    def get_manager(self):
        if self._manager is None:
            kept = {bytes.fromhex(name.partition(".")[0]) for name in self._shelf().names()}
            self._manager = ShelfManager(self._options["num_blocks"], sorted(kept))
        return self._manager

    def get_worker(self, kv_caches):
        if self._worker is None:
            self._worker = ShelfWorker(kv_caches, self._shelf(), self._rank)
        return self._worker
