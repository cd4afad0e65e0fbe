"""The scheduler's part that drives a fenced spec, in the order of `wtransfer.specs.interface`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from wtransfer.demo.serving.messages import Job, as_place
from wtransfer.errors import BlockNotKeptError
from wtransfer.specs.fenced import BlockWitnesses
from wtransfer.specs.interface import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadPolicy,
    ReqContext,
    ScheduleEndContext,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wtransfer.blocks import OffloadKey
    from wtransfer.demo.serving.messages import Finished
    from wtransfer.demo.serving.request import Request
    from wtransfer.specs.fenced import FencedManager
    from wtransfer.weights import WeightsStamp


@dataclass
class JobInFlight:
    """A job that not all ranks have finished."""

    request: Request
    """For which it is done."""
    context: ReqContext
    """The request, as the spec knows it."""
    keys: list[OffloadKey]
    """Its blocks."""
    block_ids: list[int]
    """Where they are in the cache."""
    is_load: bool
    """Whether they come from the tier."""
    waiting_for: set[int]
    """Ranks that have not finished."""
    success: bool = True
    """Whether every rank so far has done it."""
    nbytes: int = field(default=0)
    """Bytes moved by all ranks."""


class Offload:
    """What the scheduler does about the tier.

    Args:
        manager: Of a fenced spec.
        num_ranks: Ranks that each do every job.
    """

    def __init__(self, manager: FencedManager, num_ranks: int) -> None:
        self._manager = manager
        self._num_ranks = num_ranks
        self._job_ids = itertools.count()
        self._in_flight: dict[int, JobInFlight] = {}

    @property
    def is_busy(self) -> bool:
        """Whether jobs are under way, or the manager wants more steps."""
        return bool(self._in_flight) or self._manager.has_pending_work()

    def weights_are(self, stamps: Sequence[WeightsStamp | None]) -> None:
        """Pass on what the ranks compute with."""
        self._manager.weights_are(stamps)

    def announce(self, request: Request) -> None:
        """Tell the spec of a request, once."""
        if request.context is None:
            request.context = ReqContext(request.request_id)
            request.context.set_state(BlockWitnesses())
            wanted = self._manager.on_new_request(request.context)
            request.offers_all = wanted.policy is OffloadPolicy.REQUEST_LEVEL

    def forget(self, request: Request) -> None:
        """Tell the spec that a request asks for nothing more."""
        if request.context is not None:
            self._manager.on_request_finished(request.context)

    def num_hits(self, request: Request, named: Sequence[tuple[OffloadKey, bytes]]) -> int | None:
        """Return how many of these blocks, from the first one on, may be loaded.

        Returns:
            None: that is not known yet; ask again in the next step.
        """
        context = self._witnessed(request, named)
        for count, (key, _) in enumerate(named):
            found = self._manager.lookup(key, context)
            if found is LookupResult.RETRY:
                return None
            if found is not LookupResult.HIT:
                return count
        return len(named)

    def touch(self, request: Request, named: Sequence[tuple[OffloadKey, bytes]]) -> None:
        """Tell the spec that blocks are in use which the cache had itself."""
        context = self._witnessed(request, named)
        self._manager.touch([key for key, _ in named], context)

    def load(
        self, request: Request, keys: list[OffloadKey], first: int, block_ids: list[int]
    ) -> Job | None:
        """Return the job that loads blocks; None if they have gone meanwhile.

        Args:
            request: Whose.
            keys: The blocks.
            first: Position of the first block in the request.
            block_ids: Where they go.
        """
        context = _context(request)
        try:
            source = self._manager.prepare_load(keys, context)
        except BlockNotKeptError:
            return None
        job = JobInFlight(request, context, keys, block_ids, is_load=True, waiting_for=self._ranks)
        return Job(
            job_id=self._enter(job),
            kind="load",
            blocks=as_place(GPULoadStoreSpec(block_ids, block_indices=[first])),
            tier=as_place(source),
        )

    def store(
        self,
        request: Request,
        named: Sequence[tuple[OffloadKey, bytes]],
        first: int,
        block_ids: list[int],
    ) -> tuple[Job, list[int]] | None:
        """Return the job that stores what the tier does not have, and the blocks it holds."""
        context = self._witnessed(request, named)
        output = self._manager.prepare_store([key for key, _ in named], context)
        if output is None or not output.keys_to_store:
            return None
        wanted = set(output.keys_to_store)
        places = [i for i, (key, _) in enumerate(named) if key in wanted]
        blocks = [block_ids[place] for place in places]
        job = JobInFlight(
            request,
            context,
            output.keys_to_store,
            blocks,
            is_load=False,
            waiting_for=self._ranks,
        )
        source = GPULoadStoreSpec(blocks, block_indices=[first + places[0]])
        job_id = self._enter(job)
        return Job(job_id, "store", as_place(source), as_place(output.store_spec)), blocks

    def finish(self, rank: int, finished: Sequence[Finished]) -> Iterator[JobInFlight]:
        """Take one rank's finished jobs, and yield those that all ranks have finished."""
        for result in finished:
            job = self._in_flight.get(result.job_id)
            if job is None or rank not in job.waiting_for:
                continue
            job.waiting_for.remove(rank)
            job.success &= result.success
            job.nbytes += result.nbytes
            if not job.waiting_for:
                del self._in_flight[result.job_id]
                self._complete(job)
                yield job

    def end_step(self, new_request_ids: Sequence[str]) -> None:
        """Tell the spec that a step was planned."""
        self._manager.on_schedule_end(ScheduleEndContext(new_req_ids=tuple(new_request_ids)))
        # Nobody here routes by them; taken all the same, as a host does.
        self._manager.take_events()

    def get_stats(self) -> dict[str, float]:
        """Return the manager's numbers."""
        return dict(self._manager.get_stats())

    def close(self) -> None:
        """Let go of the manager."""
        self._manager.shutdown()

    @property
    def _ranks(self) -> set[int]:
        return set(range(self._num_ranks))

    def _enter(self, job: JobInFlight) -> int:
        job_id = next(self._job_ids)
        self._in_flight[job_id] = job
        return job_id

    def _complete(self, job: JobInFlight) -> None:
        if job.is_load:
            self._manager.complete_load(job.keys, job.context)
            if not job.success:
                self._manager.load_failed(job.keys, job.context)
        else:
            self._manager.complete_store(job.keys, job.context, job.success)

    def _witnessed(self, request: Request, named: Sequence[tuple[OffloadKey, bytes]]) -> ReqContext:
        context = _context(request)
        witnesses = context.get_state(BlockWitnesses)
        assert witnesses is not None
        for key, witness in named:
            witnesses.add(key, witness)
        return context


def _context(request: Request) -> ReqContext:
    assert request.context is not None, "a request is announced before anything is asked about it"
    return request.context
