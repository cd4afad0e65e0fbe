"""One worker of the reference host: a rank's model, cache and connector."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any

import torch

from wtransfer.errors import CommitError
from wtransfer.testing.mini_engine.messages import StepResult
from wtransfer.testing.mini_engine.model import TokenSpan
from wtransfer.weights import process_weights

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from wtransfer.testing.mini_engine.cache import PagedCache
    from wtransfer.testing.mini_engine.messages import StepPlan
    from wtransfer.testing.mini_engine.model import PagedTransformer
    from wtransfer.testing.mini_engine.shards import Shards
    from wtransfer.testing.mini_engine.worker_link import WorkerLink
    from wtransfer.weight_sync.worker.session import WorkerSession
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
        link: The connector; None: there is none.
        session: Receives weights; None: they never change.
        weights: What this process computes with.
    """

    def __init__(
        self,
        model: PagedTransformer,
        cache: PagedCache,
        shards: Shards,
        *,
        link: WorkerLink | None = None,
        session: WorkerSession | None = None,
        weights: ProcessWeights = process_weights,
    ) -> None:
        self.model = model
        """The model."""
        self.session = session
        """Receives weights."""
        self.link = link
        """The connector."""
        self._cache = cache
        self._shards = shards
        self._weights = weights

    def handshake(self) -> Any:
        """Return what the connector says before the first step, as plain data."""
        return self.link.handshake() if self.link else None

    def step(self, plan: StepPlan) -> StepResult:
        """Commit what is pending, and compute the spans between the connector's calls.

        The spans are computed only if all ranks compute with what the plan was made for. Otherwise
        some build on blocks of other weights; the scheduler will hear so, and plan anew. Meanwhile
        the connector must not believe that anything was computed.
        """
        self._commit()
        stamp = self._stamp()
        expected = plan.stamps[self._shards.rank] if plan.stamps else None
        # All ranks compute, or none: they wait for each other in every layer.
        refused = self._shards.any(stamp is None or stamp != expected)
        link = self.link
        if link is None:
            tokens = None if refused else self._compute(plan)
            return StepResult(stamp, tokens is not None, tokens or {})
        with self._withheld(refused):
            link.begin(plan)
            tokens = self._between(plan, link, compute=not refused)
        # An empty worker's side must not believe that there is anything to serve from.
        with self._withheld(stamp is None):
            said = link.end(plan.finished_req_ids)
        return StepResult(stamp, tokens is not None, tokens or {}, said)

    def get_stats(self) -> dict[str, float]:
        """Return the numbers of the connector's worker side."""
        return dict(self.link.connector.get_stats()) if self.link else {}

    def close(self) -> None:
        """Let go of everything; the model keeps its weights."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._shards.close)
            if self.link is not None:
                stack.callback(self.link.close)
            if self.session is not None:
                stack.callback(self.session.close)

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

    def _withheld(self, condition: bool) -> AbstractContextManager[None]:
        return self._weights.withheld() if condition else contextlib.nullcontext()

    def _between(self, plan: StepPlan, link: WorkerLink, *, compute: bool) -> dict[str, int] | None:
        """Load, compute and save; return the tokens, or None if nothing counts."""
        if plan.loads_first:
            link.load()
            compute = compute and not self._shards.any(link.has_failed())
            if not compute:
                # Else they would go on in blocks that others have got by then.
                link.wait_for_loads()
        tokens = self._compute(plan) if compute else None
        if not plan.loads_first:
            link.load()
        # A layer's load may turn out to have failed after all.
        elif tokens is not None and self._shards.any(link.has_failed()):
            tokens = None
        if tokens:
            link.save()
        return tokens

    def _compute(self, plan: StepPlan) -> dict[str, int]:
        spans = [
            TokenSpan(span.tokens, span.start, torch.tensor(span.block_ids)) for span in plan.spans
        ]
        if not spans:
            return {}
        tokens = self.model.forward(spans, self._cache, self._shards, self.link)
        return {span.request_id: token for span, token in zip(plan.spans, tokens, strict=True)}
