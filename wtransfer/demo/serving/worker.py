"""One worker of the reference host: a rank's model, cache and offloading worker."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from wtransfer.demo.serving.messages import Finished, StepResult, from_place
from wtransfer.errors import CommitError
from wtransfer.specs.interface import GPULoadStoreSpec
from wtransfer.weights import process_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.demo.serving.cache import PagedCache
    from wtransfer.demo.serving.messages import Job, StepPlan
    from wtransfer.demo.serving.model import PagedTransformer
    from wtransfer.demo.serving.shards import Shards
    from wtransfer.engines.session import WorkerSession
    from wtransfer.specs.interface import OffloadingWorker
    from wtransfer.weights import ProcessWeights, WeightsStamp

logger = logging.getLogger(__name__)

COMMIT_WAIT_S = 10.0
"""Longest wait for an update that another rank has and this one has not, in seconds."""


class ServingWorker:
    """Takes steps. All its calls come from the thread that owns the model.

    Args:
        model: Whole, on every rank.
        cache: Of this rank's heads.
        shards: This rank's heads, and the other ranks.
        offload: The fenced worker of a spec; None: no tier.
        session: Receives weights; None: they never change.
        weights: What this process computes with.
    """

    def __init__(
        self,
        model: PagedTransformer,
        cache: PagedCache,
        shards: Shards,
        *,
        offload: OffloadingWorker | None = None,
        session: WorkerSession | None = None,
        weights: ProcessWeights = process_weights,
    ) -> None:
        self.model = model
        """The model."""
        self.session = session
        """Receives weights."""
        self.offload = offload
        """Copies between cache and tier."""
        self._cache = cache
        self._shards = shards
        self._weights = weights

    def step(self, plan: StepPlan) -> StepResult:
        """Commit what is pending, begin the jobs, and compute the spans.

        The spans are computed only if all ranks compute with what the plan was made for. Otherwise
        some build on blocks of other weights; the scheduler will hear so, and plan anew.
        """
        self._commit()
        not_begun = self._submit(plan.jobs)
        stamp = self._stamp()
        expected = plan.stamps[self._shards.rank] if plan.stamps else None
        # All ranks compute, or none: they wait for each other in every layer.
        refused = self._shards.any(stamp is None or stamp != expected)
        tokens = {} if refused else self._compute(plan)
        return StepResult(stamp, not refused, tokens, not_begun + self._finished())

    def get_stats(self) -> dict[str, float]:
        """Return the offloading worker's numbers."""
        return dict(self.offload.get_stats()) if self.offload else {}

    def close(self) -> None:
        """Let go of everything; the model keeps its weights."""
        if self.session is not None:
            self.session.close()
        if self.offload is not None:
            self.offload.shutdown()
        self._shards.close()

    def _commit(self) -> None:
        session = self.session
        # Asked of all: one that commits waits for the others, which must not compute meanwhile.
        if session is None or not self._shards.any(session.pending):
            return
        try:
            session.commit_pending(COMMIT_WAIT_S)
        except CommitError:
            # The old weights are whole again, or the session is empty and nothing is computed.
            logger.exception("the update was not applied")

    def _stamp(self) -> WeightsStamp | None:
        """Return what this rank computes with; None if that is nothing to serve from."""
        # An empty worker's weights have a name, which nobody shares; they may be torn all the same.
        if self.session is not None and self.session.state == "empty":
            return None
        return self._weights.stamp()

    def _submit(self, jobs: Sequence[Job]) -> list[Finished]:
        """Begin jobs; return those that could not be begun, of which no result will come."""
        not_begun = []
        for job in jobs:
            assert self.offload is not None, "a host without a tier plans no jobs"
            blocks, tier = from_place(job.blocks), from_place(job.tier)
            assert isinstance(blocks, GPULoadStoreSpec)
            if job.kind == "load":
                begun = self.offload.submit_load(job.job_id, tier, blocks)
            else:
                begun = self.offload.submit_store(job.job_id, blocks, tier)
            if not begun:
                not_begun.append(Finished(job.job_id, success=False))
        return not_begun

    def _compute(self, plan: StepPlan) -> dict[str, int]:
        return {
            span.request_id: self.model.next_token(
                span.tokens,
                span.start,
                self._cache,
                torch.tensor(span.block_ids),
                self._shards,
            )
            for span in plan.spans
        }

    def _finished(self) -> list[Finished]:
        if self.offload is None:
            return []
        return [
            Finished(result.job_id, result.success, result.transfer_size or 0)
            for result in self.offload.get_finished()
        ]
