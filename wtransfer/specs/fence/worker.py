"""The worker's side of the fence: the one that holds the weights, and so has the last word."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from wtransfer.specs.fence.marks import FencedLoadStoreSpec
from wtransfer.specs.interface import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from wtransfer.weights import process_weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wtransfer.weights import ProcessWeights, WeightsStamp

logger = logging.getLogger(__name__)


class FencedWorker(OffloadingWorker):
    """A worker that does a job only while this process computes with the weights it is for.

    A job that is refused touches no byte. It ends like any other, without success, so that a host
    needs to know nothing of the fence.

    * A store is compared when it is submitted. If the weights change while it runs, its bytes are
      still those that were computed before: a block belongs to its job until that is finished.
    * A load is compared when it is submitted and once more when it has ended: what it brought is
      for weights that may have gone in between.

    Args:
        worker: Of any spec.
        rank: This rank, counted as in the list given to `FencedManager.weights_are`.
        weights: What this process computes with.
    """

    def __init__(
        self, worker: OffloadingWorker, rank: int = 0, weights: ProcessWeights = process_weights
    ) -> None:
        self._inner = worker
        self._rank = rank
        self._weights = weights
        self._loads: dict[int, WeightsStamp] = {}
        self._refused: list[TransferResult] = []
        self._failed = False
        self._counts = Counter(
            fence_stores_refused=0, fence_loads_refused=0, fence_loads_outdated=0
        )

    def stamp(self) -> WeightsStamp | None:
        """Return what this rank computes with, for the host to tell the scheduler's side."""
        try:
            return self._weights.stamp()
        except Exception:
            if not self._failed:
                logger.exception("the fence cannot tell what this process computes with: it shuts")
            self._failed = True
            return None

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Begin to store what was computed with the job's weights, if those are the present ones.

        Returns:
            What the fenced worker says; true for a job that is refused, which ends at once.
        """
        if not isinstance(dst_spec, FencedLoadStoreSpec) or self._admitted(dst_spec) is None:
            return self._refuse(job_id, "fence_stores_refused")
        return self._inner.submit_store(job_id, src_spec, dst_spec.inner)

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Begin to load blocks of the job's weights, if those are the present ones.

        Returns:
            As `submit_store`.
        """
        stamp = self._admitted(src_spec) if isinstance(src_spec, FencedLoadStoreSpec) else None
        if stamp is None or not isinstance(src_spec, FencedLoadStoreSpec):
            return self._refuse(job_id, "fence_loads_refused")
        self._loads[job_id] = stamp
        begun = False
        try:
            begun = self._inner.submit_load(job_id, src_spec.inner, dst_spec)
        finally:
            if not begun:
                del self._loads[job_id]
        return begun

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended, the refused ones among them."""
        refused, self._refused = self._refused, []
        return refused + [self._judged(result) for result in self._inner.get_finished()]

    def wait(self, job_ids: set[int]) -> None:
        """Wait for jobs; refused ones have ended."""
        self._inner.wait(job_ids - {result.job_id for result in self._refused})

    def get_stats(self) -> Mapping[str, float]:
        """Return the worker's numbers, and those of the fence."""
        return {**self._inner.get_stats(), **self._counts}

    def shutdown(self) -> None:
        """Pass on."""
        self._inner.shutdown()

    def _admitted(self, marked: FencedLoadStoreSpec) -> WeightsStamp | None:
        """Return the present stamp if the job is for it."""
        now = self.stamp()
        if self._rank >= len(marked.stamps) or marked.stamps[self._rank] != now:
            return None
        return now

    def _refuse(self, job_id: int, reason: str) -> bool:
        self._counts[reason] += 1
        self._refused.append(TransferResult(job_id, success=False))
        return True

    def _judged(self, result: TransferResult) -> TransferResult:
        stamp = self._loads.pop(result.job_id, None)
        if stamp is None or not result.success or stamp == self.stamp():
            return result
        self._counts["fence_loads_outdated"] += 1
        return TransferResult(result.job_id, success=False)
