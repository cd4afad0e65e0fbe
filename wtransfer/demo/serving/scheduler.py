"""The scheduler of the reference host: which tokens are computed next, and on which blocks."""

from __future__ import annotations

from collections import Counter, deque
from typing import TYPE_CHECKING

from wtransfer.demo.serving.messages import Job, Span, StepPlan
from wtransfer.demo.serving.request import block_names
from wtransfer.weights import instance_fingerprint, known_stamps

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wtransfer.blocks import OffloadKey
    from wtransfer.demo.serving.messages import StepResult
    from wtransfer.demo.serving.offload import JobInFlight, Offload
    from wtransfer.demo.serving.pool import BlockPool
    from wtransfer.demo.serving.request import BlockNames, Request
    from wtransfer.weights import Stamps

STORE_BATCH = 32
"""Most blocks that are offered to the tier at once: it takes all of them or none."""


class Scheduler:
    """Plans steps, and takes their results.

    A request waits for its blocks, then for those that are loaded for it, then runs to its end:
    it gets all its blocks when it is admitted. It builds on blocks of its own weights only, those
    of the cache and those of the tier, and leaves blocks only as long as these have not changed.
    A request for which nothing was computed when they change begins anew.

    Args:
        pool: The blocks of the cache.
        names: How blocks are named.
        block_size: Tokens per block.
        offload: The tier; None: there is none.
    """

    def __init__(
        self, pool: BlockPool, names: BlockNames, block_size: int, offload: Offload | None = None
    ) -> None:
        self._pool = pool
        self._names = names
        self._block_size = block_size
        self._offload = offload
        self._stamps: Stamps | None = None
        self._waiting: deque[Request] = deque()
        self._loading: dict[str, Request] = {}
        self._running: dict[str, Request] = {}
        self._jobs: list[Job] = []
        self._admitted: list[str] = []
        self.counts: Counter[str] = Counter()
        """What was done so far: ``tokens_computed``, ``tokens_cached`` (found in the cache),
        ``tokens_loaded`` (from the tier), ``bytes_loaded``, ``bytes_stored``, ``loads_failed``,
        ``stores_failed``, ``steps_refused``, ``restarts``, ``weight_changes``."""

    @property
    def is_busy(self) -> bool:
        """Whether more steps are needed."""
        requests = self._waiting or self._loading or self._running
        return bool(requests or self._jobs or (self._offload and self._offload.is_busy))

    @property
    def is_computing(self) -> bool:
        """Whether the next step has something to compute."""
        return bool(self._running)

    def add(self, request: Request) -> None:
        """Take a request.

        Raises:
            ValueError: The cache is too small for it, even if it were alone.
        """
        if self._blocks_of(request) > self._pool.num_blocks:
            raise ValueError(
                f"request {request.request_id!r} needs {self._blocks_of(request)} blocks; the "
                f"cache has {self._pool.num_blocks}"
            )
        self._waiting.append(request)

    def close(self) -> None:
        """Let go of the tier."""
        if self._offload:
            self._offload.close()

    # -- planning

    def plan(self) -> StepPlan:
        """Return the next step; each one is followed by its `update`."""
        if self._stamps is not None:
            self._admit()
        jobs, self._jobs = self._jobs, []
        admitted, self._admitted = self._admitted, []
        if self._offload:
            self._offload.end_step(admitted)
        if self._stamps is None:
            return StepPlan(jobs=jobs)
        spans = [
            Span(
                request.request_id,
                request.tokens[request.num_computed :],
                request.num_computed,
                request.block_ids,
            )
            for request in self._running.values()
        ]
        return StepPlan(list(self._stamps), spans, jobs)

    def _admit(self) -> None:
        while self._waiting and self._admit_one(self._waiting[0]):
            self._admitted.append(self._waiting.popleft().request_id)

    def _admit_one(self, request: Request) -> bool:
        """Give a request its blocks; return whether that was possible."""
        assert self._stamps is not None
        request.stamps = self._stamps
        # The last token is computed in any case: what follows it is not kept anywhere.
        named = self._names.of(request.tokens[:-1])
        cached = self._pool.find(block_names(instance_fingerprint(self._stamps), named))
        self._pool.hold(cached)
        hits: int | None = 0
        if self._offload:
            self._offload.announce(request)
            hits = self._offload.num_hits(request, named[len(cached) :])
        new = self._pool.take(self._blocks_of(request) - len(cached)) if hits is not None else None
        if hits is None or new is None:
            self._pool.release(cached)
            return False
        request.block_ids = cached + new
        request.num_computed = len(cached) * self._block_size
        self._need_not_offer(request)
        self.counts["tokens_cached"] += request.num_computed
        if self._offload:
            self._offload.touch(request, named[: len(cached)])
        self._begin(request, hits)
        return True

    def _begin(self, request: Request, hits: int) -> None:
        """Let a request run, or load first what the tier has for it."""
        first = request.num_computed // self._block_size
        if hits and self._offload:
            keys = [key for key, _ in self._names.of(request.tokens)[first : first + hits]]
            blocks = request.block_ids[first : first + hits]
            job = self._offload.load(request, keys, first, blocks)
            if job:
                self._jobs.append(job)
                request.state = "loading"
                self._loading[request.request_id] = request
                return
        self._run(request)

    def _need_not_offer(self, request: Request) -> None:
        """Note that what a request has so far was found, unless the tier wants that as well."""
        if not request.offers_all:
            request.num_offered = request.num_computed // self._block_size

    def _run(self, request: Request) -> None:
        request.state = "running"
        self._running[request.request_id] = request

    def _blocks_of(self, request: Request) -> int:
        return -(-(request.num_prompt + request.max_new_tokens) // self._block_size)

    # -- results

    def update(self, plan: StepPlan, results: Sequence[StepResult]) -> list[Request]:
        """Take what came of a step, one result for each rank in order; return what has ended."""
        # First: what else the ranks say may be of other weights than this side believed.
        self._learn(results)
        if self._offload:
            for rank, result in enumerate(results):
                for job in self._offload.finish(rank, result.finished):
                    self._take_job(job)
        if not all(result.executed for result in results):
            self.counts["steps_refused"] += bool(plan.spans)
            return []
        return [each for span in plan.spans if (each := self._take_span(span, results[0])).is_done]

    def _learn(self, results: Sequence[StepResult]) -> None:
        stamps = known_stamps([result.stamp for result in results])
        if self._offload:
            self._offload.weights_are([result.stamp for result in results])
        if stamps == self._stamps:
            return
        self.counts["weight_changes"] += self._stamps is not None
        self._stamps = stamps
        self._pool.forget_all()
        for request in [each for each in self._running.values() if not each.began]:
            del self._running[request.request_id]
            self._restart(request)
        for request in self._waiting:
            self._reset(request)

    def _take_span(self, span: Span, result: StepResult) -> Request:
        request = self._running[span.request_id]
        request.began = True
        request.num_computed += len(span.tokens)
        request.tokens.append(result.tokens[span.request_id])
        self.counts["tokens_computed"] += len(span.tokens)
        self._leave(request)
        if request.is_done:
            del self._running[request.request_id]
            request.state = "finished"
            if self._offload:
                self._offload.forget(request)
            self._pool.release(request.block_ids)
        return request

    def _leave(self, request: Request) -> None:
        """Offer what a request has computed to the tier, and to others.

        The cache is this host's own, so it is for the host to see that the weights are those that
        the request began with. The tier has its fence.
        """
        full = request.num_computed // self._block_size
        if full <= request.num_offered:
            return
        named = self._names.of(request.tokens[: full * self._block_size])
        self._name(request, named)
        for first in range(request.num_offered, full, STORE_BATCH):
            batch = slice(first, min(first + STORE_BATCH, full))
            self._store(request, named[batch], first, request.block_ids[batch])
        request.num_offered = full

    def _name(self, request: Request, named: list[tuple[OffloadKey, bytes]]) -> None:
        """Let the cache know what the first blocks of a request contain, unless it is mixed."""
        if self._stamps is None or request.stamps is not self._stamps:
            return
        names = block_names(instance_fingerprint(self._stamps), named)
        for block, name in zip(request.block_ids, names, strict=False):
            self._pool.name(block, name)

    def _store(
        self,
        request: Request,
        named: list[tuple[OffloadKey, bytes]],
        first: int,
        block_ids: list[int],
    ) -> None:
        stored = self._offload.store(request, named, first, block_ids) if self._offload else None
        if stored:
            job, blocks = stored
            self._jobs.append(job)
            # The blocks are the job's until it has ended, whatever becomes of the request.
            self._pool.hold(blocks)

    def _take_job(self, job: JobInFlight) -> None:
        kind = "load" if job.is_load else "store"
        self.counts[f"{kind}s_failed"] += not job.success
        self.counts[f"bytes_{'loaded' if job.is_load else 'stored'}"] += job.nbytes
        if job.is_load:
            self._take_load(job)
        else:
            self._pool.release(job.block_ids)

    def _take_load(self, job: JobInFlight) -> None:
        request = self._loading.pop(job.request.request_id)
        if request.stamps is not self._stamps:
            self._restart(request)
            return
        if job.success:
            # Else its blocks are computed, as if the tier had never had them.
            request.num_computed += len(job.block_ids) * self._block_size
            self._need_not_offer(request)
            self.counts["tokens_loaded"] += len(job.block_ids) * self._block_size
            self._name(request, self._names.of(request.tokens[: request.num_computed]))
        self._run(request)

    def _restart(self, request: Request) -> None:
        self.counts["restarts"] += 1
        self._pool.release(request.block_ids)
        self._reset(request)
        self._waiting.appendleft(request)

    def _reset(self, request: Request) -> None:
        if self._offload:
            self._offload.forget(request)
        request.reset()
