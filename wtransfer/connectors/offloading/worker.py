"""The worker's side of the offloading connector."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import xxhash

from wtransfer.config import cache_groups
from wtransfer.connectors.interface import ConnectorWorker
from wtransfer.connectors.offloading.metadata import (
    OffloadingHandshake,
    OffloadingWorkerMetadata,
    Outcome,
)
from wtransfer.connectors.serving_config import Instance
from wtransfer.errors import CacheLayoutError, ConnectorRoleError, StallError
from wtransfer.kv.cache_view import byte_rows, page_form
from wtransfer.kv.canonical import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from wtransfer.kv.fence import WorkerFence
from wtransfer.specs.factory import DEFAULT, create_spec
from wtransfer.specs.seed_adapter import adapt_spec

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from wtransfer.connectors.offloading.metadata import Job, OffloadingMetadata
    from wtransfer.specs.interface import OffloadingWorker


logger = logging.getLogger(__name__)


class OffloadingSide(ConnectorWorker):
    """Submits jobs to the spec's worker, and reports their outcomes.

    Args:
        config: The serving engine's configuration.
        kv_cache_config: Shape of the KV cache; None: it stands in ``config.cache_config``.
    """

    default_spec: ClassVar[str] = DEFAULT
    """Name of the spec where the options name none."""

    def __init__(self, config: Any, kv_cache_config: Any = None) -> None:
        super().__init__(config, kv_cache_config)
        self._rank = Instance.of(config).rank
        spec = create_spec(config, kv_cache_config or config.cache_config, self.default_spec)
        self._spec = adapt_spec(spec)
        self._groups = cache_groups(kv_cache_config or config.cache_config)
        self._fence = WorkerFence(self._rank)
        self._made: OffloadingWorker | None = None
        self._layout = b""
        self._saved_step = -1
        self._loading: dict[int, Job] = {}
        self._storing: dict[int, Job] = {}
        # Jobs that no request waits for, until the spec reports them: then they have failed.
        self._overdue: set[int] = set()
        self._outcomes: list[Outcome] = []
        self._failed_blocks: set[int] = set()
        self._received: set[str] = set()
        self._restarting: set[str] = set()
        self._ended: set[str] = set()
        self._counts = Counter(
            unknown_results_total=0,
            late_results_total=0,
            fence_loads_refused_total=0,
            fence_loads_outdated_total=0,
            fence_stores_refused_total=0,
        )

    def register_kv_caches(self, kv_caches: Mapping[str, torch.Tensor]) -> None:
        """Make the spec's worker; contiguous blocks are handed to it as bytes."""
        tensors = [
            CanonicalKVCacheTensor(
                byte_rows(cache, cache[0].nbytes) if cache[0].is_contiguous() else cache,
                cache[0].nbytes,
            )
            for cache in kv_caches.values()
        ]
        forms = {name: page_form(name, cache) for name, cache in kv_caches.items()}
        layers = [group.layer_names or tuple(kv_caches) for group in self._groups]
        grouped = {name for names in layers for name in names}
        # A layer that shares the cache of another is kept with that.
        kept = {_place(cache) for name, cache in kv_caches.items() if name in grouped}
        left_out = [name for name, cache in kv_caches.items() if _place(cache) not in kept]
        if left_out:
            raise CacheLayoutError(
                f"the layers {sorted(left_out)} belong to no group of the KV cache: their keys and "
                "values would not be kept; name them in KVCacheConfig.groups"
            )
        numbers = {name: number for number, name in enumerate(kv_caches)}
        pages = [
            [
                CanonicalKVCacheRef(numbers[name], tensors[numbers[name]].page_size_bytes, form)
                for name, form in forms.items()
                if name in names
            ]
            for names in layers
        ]
        described = ("\n".join(page.form for page in group) for group in pages)
        self._layout = xxhash.xxh3_128_digest("\n\n".join(described).encode())
        self._made = self._spec.get_worker(CanonicalKVCaches(tensors, pages))

    def get_handshake_metadata(self) -> OffloadingHandshake:
        """Return the weight version of this rank, and the digest of its cache layout."""
        return OffloadingHandshake(self._fence.version(), self._layout)

    def handle_preemptions(self, kv_connector_metadata: OffloadingMetadata) -> None:  # type: ignore[override]
        """Wait for the jobs that still read blocks which are taken away.

        Jobs that the spec's worker cannot end have failed, whatever it reports of them later: so
        the bytes that they read from here on are never looked up.
        """
        taken = set(kv_connector_metadata.preempted)
        reading = {number for number, job in self._storing.items() if job.request_id in taken}
        if not reading:
            return
        try:
            self._worker.wait(reading)
        except StallError as error:
            name = type(self._spec).__name__
            logger.error("%s: %s; its stores of preempted requests have failed", name, error)  # noqa: TRY400
            for job_id in reading:
                self._let_go(job_id)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Begin the step's loads."""
        metadata: OffloadingMetadata = self.metadata
        self._ended.update(metadata.ended)
        for job_id in metadata.overdue:
            self._let_go(job_id)
        for request_id, blocks in metadata.gone.items():
            self._failed_blocks.update(blocks)
            self._received.add(request_id)
        for job in metadata.loads:
            self._loading[job.job_id] = job
            if not self._fence.admits(job.versions):
                self._counts["fence_loads_refused_total"] += 1
                self._end(job.job_id, success=False)
            elif not self._worker.submit_load(job.job_id, job.tier, job.blocks):
                self._end(job.job_id, success=False)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: no step computes with blocks that are still loading."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: blocks are stored whole, all layers at once."""

    def wait_for_save(self) -> None:
        """Begin the step's stores; their blocks stay unchanged until these have ended."""
        metadata: OffloadingMetadata = self.metadata
        if self._saved_step == metadata.step:
            return
        self._saved_step = metadata.step
        for job in metadata.stores:
            self._storing[job.job_id] = job
            if not self._fence.admits(job.versions):
                self._counts["fence_stores_refused_total"] += 1
                self._end(job.job_id, success=False)
            elif not self._worker.submit_store(job.job_id, job.blocks, job.tier):
                self._end(job.job_id, success=False)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:  # noqa: ARG002
        """Return requests whose blocks are free of jobs, and those that were loaded."""
        for result in self._worker.get_finished():
            self._end(result.job_id, result.success, result.transfer_size or 0)
        # Workers of other classes may lack this method.
        released: set[int] = getattr(self._worker, "get_released", set)()
        storing = (job for number, job in self._storing.items() if number not in released)
        busy = {job.request_id for job in (*self._loading.values(), *storing)}
        sent = self._ended - busy
        self._ended -= sent
        received, self._received = self._received, set()
        return sent, received

    def get_failed_recving(self) -> set[str]:
        """Return the requests whose load is overdue."""
        restarting, self._restarting = self._restarting, set()
        return restarting

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that could not be loaded."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def build_connector_worker_meta(self) -> OffloadingWorkerMetadata:
        """Return the jobs that have ended, and the weight version of this rank."""
        if self._saved_step != self.metadata.step:
            # A step that computed nothing: the blocks that it was to store are not there.
            self._outcomes += [Outcome(job.job_id, success=False) for job in self.metadata.stores]
        outcomes, self._outcomes = self._outcomes, []
        step = {self._rank: self.metadata.step}
        return OffloadingWorkerMetadata(self._fence.report(), {self._rank: outcomes}, step)

    def get_stats(self) -> Mapping[str, float]:
        """Return the numbers of the spec's worker, and of results that no request waited for."""
        stats = {} if self._made is None else self._made.get_stats()
        return {**stats, **self._counts}

    def shutdown(self) -> None:
        """Shut down the spec's worker."""
        if self._made is not None:
            self._made.shutdown()

    @property
    def _worker(self) -> OffloadingWorker:
        if self._made is None:
            raise ConnectorRoleError("register_kv_caches comes before the first step")
        return self._made

    def _end(self, job_id: int, success: bool, nbytes: int = 0) -> None:
        is_store = self._storing.pop(job_id, None) is not None
        job = self._loading.pop(job_id, None)
        if job_id in self._overdue:
            self._overdue.remove(job_id)
            self._counts["late_results_total"] += 1
            self._outcomes.append(Outcome(job_id, success=False))
            return
        if job is None and not is_store:
            self._counts["unknown_results_total"] += 1
            return
        if job is not None and success and not self._fence.admits(job.versions):
            # Loaded for weights that were replaced while it ran.
            self._counts["fence_loads_outdated_total"] += 1
            success = False
        self._outcomes.append(Outcome(job_id, success, nbytes))
        if job is None:
            return
        if not success:
            self._failed_blocks.update(job.blocks.block_ids)
        self._receive(job.request_id)

    def _let_go(self, job_id: int) -> None:
        """Have no request wait for a job, unless the spec has reported it meanwhile."""
        is_store = self._storing.pop(job_id, None) is not None
        job = self._loading.pop(job_id, None)
        if job is None and not is_store:
            return
        self._overdue.add(job_id)
        if job is not None:
            # In other blocks: the spec may still write into these.
            self._restarting.add(job.request_id)
            self._receive(job.request_id)

    def _receive(self, request_id: str) -> None:
        if not any(other.request_id == request_id for other in self._loading.values()):
            self._received.add(request_id)


class SharedStorageSide(OffloadingSide):
    """The worker's side of `wtransfer.connectors.shared_storage.SharedStorageConnector`."""

    default_spec = "file"


def _place(cache: torch.Tensor) -> tuple[int, torch.Size]:
    """Return the memory of a layer's cache."""
    return cache.data_ptr(), cache.shape
