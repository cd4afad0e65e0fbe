"""The copies of vLLM's offloading worker without a GPU, which vLLM's own needs: as late as it may.

All else of vLLM's connector, first tier and lower tiers is vLLM's. Named as a worker's extension,
which vLLM imports in each worker before it makes the connector.
"""

from breaking import Breaking
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

__all__ = ["Breaking"]


class LateWorker(OffloadingWorker):
    """Copies a store when it must, or after the next step; a load at its first report."""

    def __init__(self, kv_caches, region):
        self._groups = kv_caches.group_data_refs
        self._blocks, self._chunks = [], []
        for each in kv_caches.tensors:
            self._blocks.append(each.tensor.view(-1, each.page_size_bytes))
            self._chunks.append(region.create_next_worker_view(each.page_size_bytes))
        self._region = region
        self._new, self._due, self._done = {}, {}, []

    def submit_store(self, job_id, source, target):
        self._new[job_id] = (source, target, True)
        return True

    def submit_load(self, job_id, source, target):
        self._due[job_id] = (target, source, False)
        return True

    def wait(self, job_ids):
        for job_id in job_ids:
            for jobs in (self._new, self._due):
                if job_id in jobs:
                    self._copy(job_id, *jobs.pop(job_id))

    def get_finished(self):
        self.wait(list(self._due))
        self._due, self._new = self._new, {}
        done, self._done = self._done, []
        return done

    def _copy(self, job_id, in_cache, in_memory, is_store):
        begin = 0
        for refs, size in zip(self._groups, in_cache.group_sizes, strict=True):
            blocks = in_cache.block_ids[begin : begin + size]
            chunks = in_memory.block_ids[begin : begin + size]
            begin += size
            for ref in refs:
                cache, memory = self._blocks[ref.tensor_idx], self._chunks[ref.tensor_idx]
                if is_store:
                    memory[chunks] = cache[blocks]
                else:
                    cache[blocks] = memory[chunks]
        self._done.append(TransferResult(job_id=job_id, success=True))

    def shutdown(self):
        self._region.cleanup()


def get_worker(spec, kv_caches):
    assert spec.blocks_per_chunk == 1
    if not spec._worker:
        region = SharedOffloadRegion(
            engine_id=spec._engine_id,
            num_chunks=spec.num_chunks,
            rank=spec.config.parallel.rank,
            kv_bytes_per_chunk=spec.kv_bytes_per_chunk,
            cpu_page_size=spec.cpu_page_size_per_worker,
        )
        spec._worker = LateWorker(kv_caches, region)
    return spec._worker


TieringOffloadingSpec.get_worker = get_worker
