"""Worker's side: reads and writes the files, on a thread."""

import concurrent.futures
import contextlib

import torch
from safetensors.torch import load_file, save_file

from wtransfer import OffloadingWorker
from wtransfer.specs.interface import TransferResult


class DiskWorker(OffloadingWorker):
    def __init__(self, folder, kv_caches, blocks_per_chunk, rank):
        # Every rank has its own part of a block.
        self.folder = folder / str(rank)
        self.folder.mkdir(exist_ok=True)
        self.blocks_per_chunk = blocks_per_chunk
        self.groups = [
            [kv_caches.tensors[ref.tensor_idx].tensor for ref in refs]
            for refs in kv_caches.group_data_refs
        ]
        self.pool = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="acme-disk")
        self.jobs = {}

    def submit_store(self, job_id, src_spec, dst_spec):
        self.jobs[job_id] = self.pool.submit(self.store, src_spec, dst_spec)
        return True

    def submit_load(self, job_id, src_spec, dst_spec):
        self.jobs[job_id] = self.pool.submit(self.load, src_spec, dst_spec)
        return True

    def get_finished(self):
        done = [job_id for job_id, job in self.jobs.items() if job.done()]
        return [
            TransferResult(job_id, self.jobs.pop(job_id).exception() is None) for job_id in done
        ]

    def wait(self, job_ids):
        concurrent.futures.wait([self.jobs[each] for each in job_ids & self.jobs.keys()])

    def shutdown(self):
        self.pool.shutdown(cancel_futures=True)

    def store(self, cache, files):
        for name in files.gone:
            with contextlib.suppress(FileNotFoundError):
                (self.folder / name).unlink()
        for name, blocks in self.chunks(cache, files):
            pages = {
                f"{place}.{layer}": tensor[block].clone()
                for place, group, block in blocks
                for layer, tensor in enumerate(self.groups[group])
            }
            save_file(pages, self.folder / f"{name}.new")
            (self.folder / f"{name}.new").rename(self.folder / name)

    def load(self, files, cache):
        for name, blocks in self.chunks(cache, files):
            pages = load_file(self.folder / name)
            for place, group, block in blocks:
                for layer, tensor in enumerate(self.groups[group]):
                    tensor[block] = pages[f"{place}.{layer}"].view(torch.uint8)

    def chunks(self, cache, files):
        """Yield each file with its blocks: (place in the file, group, number)."""
        names, numbers = iter(files.names), iter(cache.block_ids)
        found = []
        sizes = zip(cache.group_sizes, cache.block_indices, strict=True)
        for group, (size, first) in enumerate(sizes):
            for number in range(size):
                place = (first + number) % self.blocks_per_chunk
                if number == 0 or place == 0:
                    found.append((next(names), []))
                found[-1][1].append((place, group, next(numbers)))
        return found
