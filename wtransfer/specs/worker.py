"""The worker of every spec here: a job's blocks are divided among links, each to one level.

A *link* copies between the cache and one level that keeps blocks: an arena
(`wtransfer.specs.arena_link`) or a tier (`wtransfer.specs.tier_link`). A worker has one or several,
the nearest level first. Each link takes its share of a job and cuts it into steps; `Jobs` runs
them. A job belongs to its host as a whole: it has ended when all its steps have.

A slot holds a chunk, which is one block of the cache or several. Blocks that follow each other in a
sequence fill chunk after chunk; the first one of a group may begin in the middle of a chunk, and
the last one may end there (`GPULoadStoreSpec.block_indices`).
"""

from __future__ import annotations

import functools
import logging
import os
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wtransfer.calls import check_process
from wtransfer.kv.copier import Chunks, Copier, RefusedError
from wtransfer.kv.slots import HeaderForm
from wtransfer.specs.interface import OffloadingWorker
from wtransfer.specs.jobs import Job

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from wtransfer.kv.cache_view import GroupPages
    from wtransfer.kv.header import BlockGeometry
    from wtransfer.kv.slots import Numbers, Slots
    from wtransfer.specs.interface import GPULoadStoreSpec, LoadStoreSpec, TransferResult
    from wtransfer.specs.jobs import Jobs, Kind, Pool, Step

logger = logging.getLogger(__name__)


# -- a job as it is submitted


class MalformedJobError(ValueError):
    """A job whose two sides do not belong together; stays within the worker that was given it."""


@dataclass(frozen=True)
class Plan:
    """A job's places, as the links read them. Arrays have an entry for each key."""

    job_id: int
    """The host's number of the job."""
    kind: Kind
    """Direction of its copies."""
    keys: Sequence[bytes]
    """Keys of its blocks."""
    in_arena: npt.NDArray[np.bool_]
    """True: the block is copied from or to the arena."""
    promoted: npt.NDArray[np.bool_]
    """True: the block is loaded from a tier, and then kept in the arena, too."""
    slots: Numbers
    """Slots of the blocks for which one of both is True; of no meaning for the others."""
    outdated: Collection[int]
    """Slots whose former block is of other weights."""
    rewritten: Collection[bytes]
    """Keys that are put even if a tier has them."""

    @classmethod
    def of(cls, job_id: int, kind: Kind, kept: Any, num_slots: int) -> Plan:
        """Read the kept side of a job.

        Args:
            job_id: The host's number of the job.
            kind: Direction of its copies.
            kept: A `TierLoadStoreSpec`; or an `ArenaLoadStoreSpec` or another maker's, with a slot
                for each of its keys.
            num_slots: Slots that there are.

        Raises:
            MalformedJobError: There are no such blocks or slots, two blocks for one slot, or a slot
                that is both read and written.
            TypeError, AttributeError, ValueError: `kept` is no such side.
        """
        num_keys = len(kept.keys)
        slots = np.zeros(num_keys, np.int64)
        in_arena, promoted = np.zeros((2, num_keys), np.bool_)
        if hasattr(kept, "in_arena"):
            for mask, slot_of in ((in_arena, kept.in_arena), (promoted, kept.promoted)):
                places = _whole(list(slot_of), "places")
                _check_numbers(places, num_keys, "places of blocks with a slot")
                mask[places] = True
                slots[places] = _whole(list(slot_of.values()), "slots")
        else:
            in_arena[:] = True
            slots = _whole(kept.slots, "slots")
            if len(slots) != num_keys:
                raise MalformedJobError(f"{num_keys} keys for {len(slots)} slots")
        rewritten = frozenset(getattr(kept, "rewritten", ()))
        if not all(isinstance(key, bytes) for key in rewritten):
            raise MalformedJobError("keys that are not bytes")
        plan = cls(
            job_id,
            kind,
            kept.keys,
            in_arena,
            promoted,
            slots,
            frozenset(getattr(kept, "outdated", ())),
            rewritten,
        )
        _check_numbers(plan.used_slots, num_slots, "slots")
        if kind == "store" and len(np.unique(plan.used_slots)) != len(plan.used_slots):
            raise MalformedJobError("two blocks for one slot")
        if promoted.any() and np.isin(slots[promoted], slots[in_arena]).any():
            raise MalformedJobError("a slot that is both read and written")
        return plan

    @functools.cached_property
    def used_slots(self) -> Numbers:
        """Slots that the job reads or writes."""
        return self.slots[self.in_arena | self.promoted]

    @property
    def written_slots(self) -> Numbers:
        """Slots that the job writes."""
        return self.used_slots if self.kind == "store" else self.slots[self.promoted]


def chunks_of(
    cache: Any, keys: Sequence[bytes], num_blocks: Sequence[int], blocks_per_chunk: int
) -> list[Chunks]:
    """Match the blocks of a job with its keys.

    Args:
        cache: Blocks of the cache, as a `GPULoadStoreSpec` or vLLM's.
        keys: Keys, one for each chunk.
        num_blocks: Blocks of each group's cache.
        blocks_per_chunk: Blocks in a chunk.

    Returns:
        Chunks of each group that has any; in the place of slots they have the places of their keys.

    Raises:
        MalformedJobError: The sides do not belong together, or there are no such blocks.
    """
    blocks = _whole(cache.block_ids, "blocks")
    sizes = _whole(cache.group_sizes, "sizes of groups").tolist()
    indices = _whole(cache.block_indices, "indices of blocks").tolist()
    if not len(sizes) == len(indices) == len(num_blocks):
        raise MalformedJobError(f"blocks of {len(sizes)} groups; the cache has {len(num_blocks)}")
    found, block, place = [], 0, 0
    for group, (size, index) in enumerate(zip(sizes, indices, strict=True)):
        if not size:
            continue
        own = blocks[block : block + size]
        _check_numbers(own, num_blocks[group], f"blocks of group {group}")
        grid = _grid(own, index, blocks_per_chunk)
        part = slice(place, place + len(grid))
        found.append(Chunks(group, np.arange(part.start, part.stop), keys[part], grid))
        block, place = block + size, part.stop
    if (block, place) != (len(blocks), len(keys)):
        raise MalformedJobError(
            f"{len(blocks)} blocks and {len(keys)} keys; {block} blocks fill {place} chunks"
        )
    return found


def _grid(blocks: Numbers, index: int, blocks_per_chunk: int) -> Numbers:
    """Return blocks in rows of a chunk each."""
    skipped = index % blocks_per_chunk
    num_chunks = -(-(skipped + len(blocks)) // blocks_per_chunk)
    grid = np.full(num_chunks * blocks_per_chunk, -1, np.int64)
    grid[skipped : skipped + len(blocks)] = blocks
    return grid.reshape(num_chunks, blocks_per_chunk)


def _whole(numbers: Any, what: str) -> Numbers:
    """Return whole numbers as an array of our own, none of them rounded."""
    found = np.asarray(numbers)
    # An empty list is an array of floats; numbers beyond 64 bits are objects.
    if found.ndim != 1 or (len(found) and found.dtype.kind not in "iu"):
        raise MalformedJobError(f"{what} that are no list of whole numbers of 64 bits")
    # Those from 2**63 on are negative then, and no number of anything.
    return found.astype(np.int64)


def _check_numbers(numbers: Numbers, limit: int, what: str) -> None:
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= limit):
        raise MalformedJobError(
            f"{what} {numbers.min()} to {numbers.max()}; there are those from 0 to {limit - 1}"
        )


# -- links


class Link(ABC):
    """Copies between one rank's cache and one level. Steps run on threads of `Jobs`.

    The end comes in three calls: `stop`, `join` once no step runs any more, and `close` unless
    something hangs.
    """

    copiers: Sequence[Copier]
    """One for each group of the cache; none after `stop`: they hold views of the cache."""

    def accept(self, plan: Plan) -> None:  # noqa: B027  # by default any job
        """Note what a job says, before any of its steps is made.

        Raises:
            RefusedError: The job fails before it begins.
        """

    @abstractmethod
    def share(self, plan: Plan, chunks: Chunks) -> Chunks:
        """Return those chunks of a job that this link copies, as `steps` takes them.

        Args:
            plan: The job.
            chunks: Chunks of a group, with the places of their keys, as of `chunks_of`.
        """

    @abstractmethod
    def steps(
        self, plan: Plan, chunks: Chunks, mark: object, above: Link | None
    ) -> Iterator[tuple[Pool, Step]]:
        """Yield the steps of a share, each with the threads for it.

        Args:
            plan: The job.
            chunks: Chunks of a group, as of `share`.
            mark: Model work that the copies wait for (`GroupPages.mark`).
            above: Link of the next level above, by whose `promote` promoted blocks are kept.
        """

    def promote(self, plan: Plan, slots: Numbers, rows: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Keep verified blocks of the level below; called where a plan has slots for them.

        Args:
            plan: The job.
            slots: Slots for the blocks.
            rows: Header and pages of each block.
        """
        raise NotImplementedError

    def get_stats(self) -> Mapping[str, float]:
        """Return statistics."""
        return {}

    def stop(self) -> None:
        """Release the cache, and let steps that wait for something of this link fail."""
        self.copiers = ()

    def join(self) -> bool:
        """End what the link runs beside steps; return False if something hangs."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Release the level; nothing uses it any more."""


def copiers_of(
    part: Slots,
    groups: Iterable[tuple[GroupPages, BlockGeometry]],
    rank: int,
    blocks_per_chunk: int,
    *,
    verified: bool = True,
) -> tuple[Copier, ...]:
    """Return a copier between each group of the cache and the slots of a level.

    Args:
        part: The slots.
        groups: For each group its pages, and how a chunk of it is laid out.
        rank: Rank of the blocks' parts.
        blocks_per_chunk: Blocks in a slot.
        verified: True if payloads are digested.
    """
    return tuple(
        Copier(part, pages, HeaderForm(geometry.digest, rank), blocks_per_chunk, verified)
        for pages, geometry in groups
    )


# -- the worker


class JobWorker(OffloadingWorker):
    """Copies between one rank's cache and the levels of its links. Made by a spec's `get_worker`.

    Args:
        name: The rank's name, for errors.
        links: A link to each level, the nearest first; the worker's from here on.
        jobs: Runs the jobs.
        release_s: As of `Jobs.wait`.
    """

    def __init__(
        self, name: str, links: Sequence[Link], jobs: Jobs, release_s: float | None = None
    ) -> None:
        self.links = tuple(links)
        """As given."""
        self._name, self._jobs, self._release_s = name, jobs, release_s
        self._pid, self._closed = os.getpid(), False

    def submit_store(
        self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec
    ) -> bool:
        """Begin to copy blocks of the cache to where they are kept.

        Returns:
            False after `shutdown`, and while a job of this number runs. A malformed job is begun,
            and fails.

        Raises:
            ForkedError: The process is a forked child.
        """
        return self._submit(job_id, "store", src_spec, dst_spec)

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,  # noqa: ARG002  # loads have threads of their own in any case
    ) -> bool:
        """Begin to copy blocks into the cache; as `submit_store`."""
        return self._submit(job_id, "load", dst_spec, src_spec)

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended since the last call, each once.

        Raises:
            ForkedError: The process is a forked child.
        """
        check_process(self._pid, type(self).__name__)
        return self._jobs.finished()

    def get_released(self) -> set[int]:
        """Return stores whose blocks were copied, and are still on their way."""
        return self._jobs.released()

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended, or are released where `release_s` is set.

        Raises:
            StallError: The jobs made no progress within the deadline.
            ForkedError: The process is a forked child.
        """
        check_process(self._pid, type(self).__name__)
        self._jobs.wait(job_ids, self._release_s)

    def get_stats(self) -> Mapping[str, float]:
        """Return how many jobs, bytes and failures there were, the latter also by reason."""
        stats: dict[str, float] = {}
        for link in self.links:
            stats.update(link.get_stats())
        return {**stats, **self._jobs.counts()}

    def shutdown(self) -> None:
        """End within a second, or four with a tier: jobs fail, puts that are under way may end.

        Nothing happens at a second call, nor in a forked child. Where a copy or a call hangs, the
        levels are not released: this rank keeps its name and its memory until the process ends, as
        no other process may write where that copy still might, and its tier is not closed.
        """
        if os.getpid() != self._pid or self._closed:
            return
        self._closed = True
        for link in self.links:
            link.stop()
        ended = self._jobs.shutdown()
        # After the jobs: their last steps may have put blocks on their way.
        for link in self.links:
            ended &= link.join()
        if not ended:
            logger.warning("%s: a copy hangs; its memory and its tier stay its own", self._name)
            return
        for link in self.links:
            link.close()

    def _submit(self, job_id: int, kind: Kind, cache: GPULoadStoreSpec, kept: Any) -> bool:
        check_process(self._pid, type(self).__name__)
        if self._closed:
            return False
        try:
            plan = Plan.of(job_id, kind, kept, self._jobs.num_slots)
            shares = self._shares(plan, cache)
        except (MalformedJobError, AttributeError, TypeError, ValueError) as error:
            logger.warning("%s: %s job %d cannot be done: %s", self._name, kind, job_id, error)
            return self._jobs.fail(job_id, kind, "malformed")
        try:
            for link in self.links:
                link.accept(plan)
        except RefusedError as refused:
            return self._jobs.fail(job_id, kind, refused.reason)
        steps: list[tuple[Pool, Step]] = []
        for of_links in shares:
            # The copy comes after all work that the model was given until now.
            mark = self.links[0].copiers[of_links[0].group].pages.mark()
            above: Link | None = None
            for link, chunks in zip(self.links, of_links, strict=True):
                steps += link.steps(plan, chunks, mark, above)
                above = link
        # The end of a prefix first: a store that evicts what was used longest ago keeps its head.
        return self._jobs.submit(
            Job(job_id, kind, steps[::-1], plan.used_slots, plan.written_slots)
        )

    def _shares(self, plan: Plan, cache: GPULoadStoreSpec) -> list[list[Chunks]]:
        """Return the chunks of a job: for each group, the shares of all links."""
        copiers = self.links[0].copiers
        num_blocks = [copier.pages.num_blocks for copier in copiers]
        shares = []
        for chunks in chunks_of(cache, plan.keys, num_blocks, copiers[0].blocks_per_chunk):
            if plan.kind == "store" and (chunks.blocks[:, -1] < 0).any():
                raise MalformedJobError("a chunk without its last block cannot be stored")
            of_links = [link.share(plan, chunks) for link in self.links]
            if sum(map(len, of_links)) != len(chunks):
                raise MalformedJobError("blocks without a slot, and no tier")
            shares.append(of_links)
        return shares
