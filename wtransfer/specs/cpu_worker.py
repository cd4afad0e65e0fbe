"""A rank's side of `CPUOffloadingSpec`: its cache, its part of the arena, and the jobs between."""

from __future__ import annotations

import functools
import logging
import os
from typing import TYPE_CHECKING

import numpy as np

from wtransfer.errors import ForkedError
from wtransfer.specs.copying.chunks import Bounds, Chunks, MalformedJobError, chunks_of
from wtransfer.specs.copying.device_pages import Pinned
from wtransfer.specs.copying.jobs import Job, Jobs
from wtransfer.specs.interface import OffloadingWorker

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from wtransfer.specs.arena.arena import ArenaPart
    from wtransfer.specs.arena.seat import Seat
    from wtransfer.specs.copying.copier import Copier
    from wtransfer.specs.copying.jobs import Kind
    from wtransfer.specs.copying.pages import Numbers
    from wtransfer.specs.interface import GPULoadStoreSpec, LoadStoreSpec, TransferResult

logger = logging.getLogger(__name__)


class CPUOffloadingWorker(OffloadingWorker):
    """Copies between one rank's cache and the arena. Made by `CPUOffloadingSpec.get_worker`.

    Args:
        seat: This rank's place at the arena; the worker's from here on.
        copiers: For each group of the cache.
        num_threads: Copying threads, for each direction.
        deadline_s: Longest time without progress while somebody waits, in seconds.
    """

    def __init__(
        self, seat: Seat, copiers: Sequence[Copier], num_threads: int, deadline_s: float
    ) -> None:
        layout = seat.part.layout
        self._seat = seat
        self._name = seat.name
        self._copiers = tuple(copiers)
        self._num_threads = num_threads
        self._jobs = Jobs(seat.name, layout.num_slots, num_threads, deadline_s)
        region = seat.part.address, layout.region_nbytes
        self._pinned = [
            Pinned(device, *region) for device in {each.pages.device for each in copiers}
        ]
        self._bounds = Bounds(
            layout.num_slots,
            tuple(copier.pages.num_blocks for copier in copiers),
            copiers[0].blocks_per_chunk,
        )
        self._pid = os.getpid()

    @property
    def part(self) -> ArenaPart:
        """This rank's part of the arena; has no slots after `shutdown`."""
        return self._seat.part

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Begin to copy blocks of the cache into slots.

        Returns:
            False after `shutdown`, and while a job of this number runs. A job that makes no sense
            is begun, and fails.

        Raises:
            ForkedError: This is a forked child.
        """
        return self._submit(job_id, "store", src_spec, dst_spec)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: ARG002  # loads have threads of their own in any case
    ) -> bool:
        """Begin to copy blocks from slots into the cache; as `submit_store`."""
        return self._submit(job_id, "load", dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended since the last call, each once.

        Raises:
            ForkedError: This is a forked child.
        """
        self._check_owner()
        return self._jobs.finished()

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended.

        Raises:
            StallError: They made no progress within the deadline.
            ForkedError: This is a forked child.
        """
        self._check_owner()
        self._jobs.wait(job_ids)

    def get_stats(self) -> Mapping[str, float]:
        """Return how many jobs, bytes and failures there were, the latter also by reason."""
        return self._jobs.counts()

    def shutdown(self) -> None:
        """End within a second; jobs that have not ended fail. A second call does nothing.

        Where a copy hangs, this rank keeps its name and its memory until the process ends: nobody
        else may write where that copy still might.
        """
        if os.getpid() != self._pid or not self._copiers:
            return
        if not self._jobs.shutdown():
            logger.warning("%s: a copy hangs; its part of the arena stays its own", self._name)
            self._copiers = ()
            return
        for pinned in self._pinned:
            pinned.close()
        # They have views of the arena, and of the cache.
        self._copiers = ()
        self._seat.close()

    def _submit(self, job_id: int, kind: Kind, cache: GPULoadStoreSpec, arena: object) -> bool:
        self._check_owner()
        if not self._copiers:
            return False
        try:
            found = chunks_of(cache, arena, self._bounds)
            if kind == "store":
                _check_storable(found)
        except (MalformedJobError, AttributeError, TypeError, ValueError) as error:
            logger.warning("%s: %s job %d cannot be done: %s", self._name, kind, job_id, error)
            return self._jobs.fail(job_id, kind, "malformed")
        return self._jobs.submit(self._job(job_id, kind, found))

    def _job(self, job_id: int, kind: Kind, found: list[Chunks]) -> Job:
        steps: list[Callable[[], int]] = []
        for chunks in found:
            copier = self._copiers[chunks.group]
            mark = copier.pages.mark()
            copy = copier.store if kind == "store" else copier.load
            tasks = copier.tasks(chunks, self._num_threads)
            steps += [functools.partial(copy, task, mark) for task in tasks]
        slots = _slots_of(found)
        # A job of no blocks ends like any other.
        return Job(job_id, kind, steps or [lambda: 0], slots)

    def _check_owner(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedError(
                f"{self._name} belongs to the parent process; make a worker after fork()"
            )


def _slots_of(found: list[Chunks]) -> Numbers:
    return np.concatenate([np.empty(0, np.int64), *(chunks.slots for chunks in found)])


def _check_storable(found: list[Chunks]) -> None:
    slots = _slots_of(found)
    if len(np.unique(slots)) != len(slots):
        raise MalformedJobError("two blocks for one slot")
    for chunks in found:
        if (chunks.blocks[:, -1] < 0).any():
            raise MalformedJobError("a chunk without its last block cannot be stored")
