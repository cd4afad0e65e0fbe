"""The worker's side of the fence: the one that holds the weights, and so has the last word."""

from __future__ import annotations

import functools
import inspect
import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from wtransfer.specs.fence.marks import FencedLoadStoreSpec
from wtransfer.specs.interface import (
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from wtransfer.weights import process_weights

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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
        # By job; None for a store, which is not compared again.
        self._under_way: dict[int, WeightsStamp | None] = {}
        self._refused: list[TransferResult] = []
        self._failed = False
        self._counts = Counter(
            fence_stores_refused_total=0, fence_loads_refused_total=0, fence_loads_outdated_total=0
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
            What the fenced worker says; true for a job that is refused, which ends at once. False
            while a job of this number is under way.
        """
        if job_id in self._under_way:
            return False
        if not isinstance(dst_spec, FencedLoadStoreSpec) or self._admitted(dst_spec) is None:
            return self._refuse(job_id, "fence_stores_refused_total")
        inner = dst_spec.inner
        return self._begin(job_id, None, lambda: self._inner.submit_store(job_id, src_spec, inner))

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        """Begin to load blocks of the job's weights, if those are the present ones.

        Args:
            job_id: As the host counts.
            src_spec: Where they are, marked.
            dst_spec: Where they go.
            expedited: That somebody waits, as vLLM says it; for workers that want to know.

        Returns:
            As `submit_store`.
        """
        # A second job of this number would take the first one's comparison away.
        if job_id in self._under_way:
            return False
        stamp = self._admitted(src_spec) if isinstance(src_spec, FencedLoadStoreSpec) else None
        if stamp is None or not isinstance(src_spec, FencedLoadStoreSpec):
            return self._refuse(job_id, "fence_loads_refused_total")
        inner = src_spec.inner
        submit: Any = self._inner.submit_load
        if expedited and _takes_expedited(submit):
            submit = functools.partial(submit, expedited=True)
        return self._begin(job_id, stamp, lambda: submit(job_id, inner, dst_spec))

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

    def _begin(self, job_id: int, stamp: WeightsStamp | None, submit: Callable[[], bool]) -> bool:
        # Entered before: it may have ended when `submit` returns.
        self._under_way[job_id] = stamp
        begun = False
        try:
            begun = submit()
        finally:
            if not begun:
                del self._under_way[job_id]
        return begun

    def _refuse(self, job_id: int, reason: str) -> bool:
        self._counts[reason] += 1
        self._refused.append(TransferResult(job_id, success=False))
        return True

    def _judged(self, result: TransferResult) -> TransferResult:
        stamp = self._under_way.pop(result.job_id, None)
        if stamp is None or not result.success or stamp == self.stamp():
            return result
        self._counts["fence_loads_outdated_total"] += 1
        return TransferResult(result.job_id, success=False)


def _takes_expedited(submit_load: Any) -> bool:
    try:
        parameters = inspect.signature(submit_load).parameters
    except (TypeError, ValueError):
        return False
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return takes_any or "expedited" in parameters
