"""The worker's link to a tier: blocks on their way through buffers, by threads that may hang.

1.  A store copies a block to a buffer, which releases it, and it is put from there. A tier that
    hangs holds buffers, and blocks of the cache for `STALL_S`: then stores fail until a buffer
    comes free again. A copy is put only if its job had not ended when it was made.
2.  Blocks of an arena over the tier are put likewise, from their slots or as they are evicted.
3.  A load gets a block into a buffer, and copies it to one that the tier has never seen, unless the
    tier says that nothing writes to the first after its call (`Tier.writes_after_get`). From there
    `Copier.load` verifies it and writes it to the cache, only while its job has not ended; then it
    is promoted, if the plan has a slot for it. A job that takes longer than ``deadline_s`` fails;
    bytes that arrive later are dropped.
4.  A block that is not what it should be is removed from the tier, and one that cannot be read is
    replaced by the next store.

The value under a key with the rank's number (`rank_key`) is a `BlockHeader` and the block's pages,
one after the other.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import time
from collections import OrderedDict, deque
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wtransfer.deadline import Deadline
from wtransfer.errors import OffloadingOptionError
from wtransfer.kv.copier import RefusedError
from wtransfer.kv.fence import InvalidatedKeys
from wtransfer.kv.header import HEADER_NBYTES
from wtransfer.kv.slots import Look
from wtransfer.specs.interface import Tier
from wtransfer.specs.jobs import NICENESS, SHUTDOWN_S, CopyThreads
from wtransfer.specs.tier import Counts, Health, close_tier, rank_key
from wtransfer.specs.worker import Link, copiers_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    import numpy.typing as npt

    from wtransfer.kv.cache_view import GroupPages
    from wtransfer.kv.copier import Chunks, Copier, Reason
    from wtransfer.kv.header import BlockGeometry
    from wtransfer.kv.slots import Headers, Numbers
    from wtransfer.specs.jobs import Jobs, Pool, Step
    from wtransfer.specs.tier import TierOptions
    from wtransfer.specs.worker import Plan

    CopyTo = Callable[[npt.NDArray[np.uint8]], bool]
    """Copies a block, header and pages, to a row; returns False if its slot has another by now."""

STALL_S = 1.0
"""Longest wait of a store for a buffer while none comes free, in seconds."""
END_S = 0.2
"""Time that running puts may take after waiting ones were dropped, in seconds."""
BATCH_CHUNKS = 64
"""Most blocks in one call of a tier that has batches."""
BATCH_NBYTES = 16 << 20
"""Most bytes in one such call, unless a block has more."""

_NO_BUFFER = -1


class _Buffers:
    """Memory for blocks on their way, a row each for header and pages: the slots of copiers."""

    def __init__(self, number: int, nbytes: int) -> None:
        # The system takes memory for a row when it is first written to.
        self.rows = np.empty((number, HEADER_NBYTES + nbytes), np.uint8)
        self.headers, self.slots = self.rows[:, :HEADER_NBYTES], self.rows[:, HEADER_NBYTES:]
        self._openings = np.zeros(number, np.int64)

    def look(self, slots: Numbers) -> Look:
        """Return copies of headers; a row has one user at a time, so it is never opened."""
        return Look(self.headers[slots], self._openings[slots])

    def quarantine(self, slot: int, seen: Headers) -> None:
        """Do nothing: a damaged block is removed from the tier."""


class Put(NamedTuple):
    """A block that is to be put."""

    own: bytes
    """Key of this rank's part."""
    nbytes: int
    """Bytes with header."""
    buffer: int = _NO_BUFFER
    """Buffer that holds it, or that it is copied to from its slot."""
    job_id: int | None = None
    """Job of which this is a part."""
    from_slot: CopyTo | None = None
    """Copies it from its slot of the arena; None: it is in the buffer."""


class TierLink(Link):
    """Copies between one rank's cache and the tier.

    Args:
        tier: The tier; the link's own.
        groups: For each group of the cache its pages, and how a chunk of it is laid out.
        rank: This rank.
        blocks_per_chunk: Blocks in a chunk.
        jobs: Jobs of the worker.
        options: Buffers, threads and deadline.

    Raises:
        OffloadingOptionError: There is not enough memory for ``buffer_bytes``.
    """

    def __init__(
        self,
        tier: Tier,
        groups: Sequence[tuple[GroupPages, BlockGeometry]],
        rank: int,
        blocks_per_chunk: int,
        *,
        jobs: Jobs,
        options: TierOptions,
    ) -> None:
        self._tier, self._rank, self._jobs = tier, rank, jobs
        self._num_threads, self._deadline_s = options.num_io_threads, options.deadline_s
        num_threads = options.num_io_threads
        nbytes = max(geometry.nbytes for _, geometry in groups)
        batch = max(1, min(BATCH_CHUNKS, BATCH_NBYTES // nbytes))
        # A call for one chunk and a call for several fail alike only where a tier has the latter.
        self._put_batch = 1 if type(tier).put_many is Tier.put_many else batch
        self._get_batch = 1 if type(tier).get_many is Tier.get_many else batch
        num_puts = max(1, options.buffer_bytes // (HEADER_NBYTES + nbytes))
        num_gets, num_copies = num_threads * self._get_batch, num_threads * self._put_batch
        try:
            self._buffers = _Buffers(num_puts + 2 * num_gets + num_copies, nbytes)
        except MemoryError:
            raise OffloadingOptionError(
                f"buffer_bytes={options.buffer_bytes:,}: there is not that much memory"
            ) from None
        # The last rows are never the tier's: blocks that are verified and copied on lie there.
        self._own = num_gets + num_copies
        tier.register_memory(self._buffers.rows[: num_puts + self._own].reshape(-1).data)
        self._puts = CopyThreads("wtransfer-tier-put", num_threads, NICENESS)
        self._to_put: deque[Put] = deque()
        # Numbers of buffers, the one used last first. A load never waits for buffers of stores: a
        # batch of them, which begins at this number, is its own. Nor does a thread that puts wait:
        # as many are its own as it puts at once.
        self._free, self._free_for_loads, self._free_for_copies = (
            queue.LifoQueue[int](),
            queue.LifoQueue[int](),
            queue.LifoQueue[int](),
        )
        # Filled as lists, while no thread has them: small blocks may have a million buffers.
        self._free.queue.extend(range(num_puts))
        self._free_for_loads.queue.extend(range(num_puts, num_puts + num_gets, self._get_batch))
        first_copy = num_puts + num_gets
        self._free_for_copies.queue.extend(range(first_copy, first_copy + num_copies))
        self.copiers = copiers_of(self._buffers, groups, rank, blocks_per_chunk)
        self._lock = threading.Lock()
        # Keys of blocks that are there and of no use: they are put again all the same.
        self._unreadable: OrderedDict[bytes, None] = OrderedDict()
        # By first buffer, the time since which it is in use.
        self._gets: dict[int, float] = {}
        self._is_stalled = self._is_ending = False
        # A store that is full or read-only can still be read.
        self._put_health, self._get_health = Health(), Health()
        self._counts = Counts()

    # -- as a link

    def accept(self, plan: Plan) -> None:
        """Refuse a load while all threads hang in the tier; note what is put anew."""
        if plan.kind == "load" and not plan.in_arena.all() and self._hangs():
            raise RefusedError("slow")
        for key in plan.rewritten:
            self._mark_unreadable(rank_key(key, self._rank))

    def share(self, plan: Plan, chunks: Chunks) -> Chunks:
        """Return the chunks that no arena has; they keep the places of their keys."""
        return chunks.where(~plan.in_arena[chunks.slots])

    def steps(
        self, plan: Plan, chunks: Chunks, mark: object, above: Link | None
    ) -> Iterator[tuple[Pool, Step]]:
        """Yield steps of one call each; few chunks are divided evenly among the threads."""
        copier = self.copiers[chunks.group]
        even = -(-len(chunks) // self._num_threads)
        for task in chunks.split(max(1, min(self._get_batch, even))):
            if plan.kind == "store":
                yield "store", functools.partial(self._store, plan.job_id, copier, task, mark)
            else:
                yield "fetch", functools.partial(self._load, plan, copier, task, mark, above)

    def get_stats(self) -> Mapping[str, float]:
        """Return the tier's own numbers, and those of puts, failures and buffers."""
        free = (self._free, self._free_for_loads, self._free_for_copies)
        now = {
            "buffers_free": sum(each.qsize() for each in free),
            "puts_waiting": len(self._to_put),
        }
        return {**self._tier.get_stats(), **self._counts.numbers(), **now}

    def stop(self) -> None:
        """Release the cache, and let stores that wait for buffers fail."""
        super().stop()
        for _ in range(self._num_threads):
            self._free.put(_NO_BUFFER)

    def join(self) -> bool:
        """Put what is on its way, for a moment; return False if a put hangs."""
        self._puts.stop()
        if self._puts.join(Deadline(SHUTDOWN_S)):
            return True
        self._is_ending = True
        return self._puts.join(Deadline(END_S))

    def close(self) -> None:
        """Close the tier."""
        close_tier(self._tier)

    # -- for the arena above

    def put_from_slot(self, key: bytes, nbytes: int, copy: CopyTo) -> None:
        """Put a block of the arena later, unless its slot has another one by then.

        Args:
            key: Its key.
            nbytes: Bytes of its pages.
            copy: Copies it to a row; called on a thread that puts.
        """
        # Puts from buffers are as many as there are buffers; of slots there may be no more.
        if len(self._to_put) > self._jobs.num_slots + len(self._buffers.rows):
            self._counts.add("puts_dropped")
            return
        own = rank_key(key, self._rank)
        self._put_later(Put(own, HEADER_NBYTES + nbytes, from_slot=copy))

    def put_evicted(
        self, key: bytes, header: Headers, payload: npt.NDArray[np.uint8] | None, wait_s: float
    ) -> None:
        """Copy a block that loses its slot, and put the copy; without a free buffer it is dropped.

        Args:
            key: Its key.
            header: Its header.
            payload: Its pages; None: they are not of this cache's layout, and it is dropped.
            wait_s: Longest wait for a buffer, in seconds.
        """
        try:
            if payload is None:
                raise RefusedError("geometry")
            buffer = self._take_buffer(wait_s)
        except RefusedError:
            self._counts.add("puts_dropped")
            return
        self._buffers.headers[buffer] = header
        self._buffers.slots[buffer, : len(payload)] = payload
        self._put_later(Put(rank_key(key, self._rank), HEADER_NBYTES + len(payload), buffer))

    # -- stores

    def _store(self, job_id: int, copier: Copier, chunks: Chunks, mark: object) -> int:
        """Copy chunks to buffers, and have them put from there."""
        if (chunks.blocks < 0).any():
            raise RefusedError("malformed")
        # The end of a prefix first, as between steps: a store that evicts what was used longest ago
        # keeps its head.
        for chunk in reversed(list(chunks.split(1))):
            buffer = self._take_buffer(min(STALL_S, self._jobs.seconds_left(job_id)))
            try:
                (header,) = copier.gather(_in_buffers(chunk, buffer), mark)
                # Refused if the job was given up meanwhile: the block may be another one by now.
                self._jobs.add_part(job_id)
            except BaseException:
                self._free.put(buffer)
                raise
            self._buffers.headers[buffer] = header
            own = rank_key(chunk.keys[0], self._rank)
            self._put_later(Put(own, HEADER_NBYTES + copier.chunk_nbytes, buffer, job_id))
        return len(chunks) * copier.chunk_nbytes

    def _take_buffer(self, wait_s: float) -> int:
        try:
            buffer = self._free.get(timeout=0.0 if self._is_stalled else wait_s)
        except queue.Empty:
            self._is_stalled = True
            raise RefusedError("slow") from None
        if buffer == _NO_BUFFER:
            raise RefusedError("shutdown")
        return buffer

    def _put_later(self, put: Put) -> None:
        self._to_put.append(put)
        self._puts.submit(self._put)

    def _put(self) -> None:
        """Put waiting blocks, on a thread: as many as fit into one call."""
        batch: list[Put] = []
        with contextlib.suppress(IndexError):
            while len(batch) < self._put_batch:
                batch.append(self._to_put.popleft())
        copies = self._copies_of([each for each in batch if each.from_slot is not None])
        batch = [each for each in batch if each.from_slot is None] + copies
        reason: Reason | None = None
        if batch and self._is_ending:
            self._counts.add("puts_dropped", len(batch))
            reason = "shutdown"
        elif batch and self._put_health.is_paused:
            self._counts.add("puts_paused", len(batch))
            reason = "error"
        elif batch:
            try:
                self._put_new(batch)
                self._put_health.ended(success=True)
            except BaseException as error:
                self._counts.fail("put_failures", type(error).__name__, error, len(batch))
                self._put_health.ended(success=False)
                reason = "error"
        for each in batch:
            if each.from_slot is not None:
                self._free_for_copies.put(each.buffer)
                continue
            self._free.put(each.buffer)
            self._is_stalled = False
            if each.job_id is not None:
                self._jobs.end_part(each.job_id, reason)

    def _copies_of(self, puts: Sequence[Put]) -> list[Put]:
        """Return blocks of the arena as copies in buffers, without those gone from their slots."""
        copies = []
        for each in puts:
            assert each.from_slot is not None
            buffer = self._free_for_copies.get()
            row = self._buffers.rows[buffer, : each.nbytes]
            if not self._is_ending and each.from_slot(row):
                copies.append(each._replace(buffer=buffer))
            else:
                self._free_for_copies.put(buffer)
                self._counts.add("puts_dropped")
        return copies

    def _put_new(self, batch: Sequence[Put]) -> None:
        """Put the blocks that the tier does not have, or has in an unreadable form."""
        doubtful = [each.own for each in batch if each.own not in self._unreadable]
        answers = self._tier.contains(doubtful) if doubtful else []
        kept = {own for own, is_kept in zip(doubtful, answers, strict=True) if is_kept}
        new = [each for each in batch if each.own not in kept]
        rows = self._buffers.rows
        if new:
            self._tier.put_many([(each.own, rows[each.buffer, : each.nbytes].data) for each in new])
        with self._lock:
            for each in new:
                self._unreadable.pop(each.own, None)
        self._counts.add("puts", len(new))
        self._counts.add("puts_skipped", len(batch) - len(new))

    # -- loads

    def _load(
        self, plan: Plan, copier: Copier, chunks: Chunks, mark: object, above: Link | None
    ) -> int:
        """Get chunks, and load the right ones that are still wanted into the cache."""
        # There are as many batches as threads that load.
        first = self._free_for_loads.get()
        self._gets[first] = time.monotonic()
        try:
            own = self._get(chunks, copier.chunk_nbytes, first)
            # The reason only: the error would hold this frame, and with it the cache.
            reason: Reason | None = None
            row = len(chunks)
            with self._jobs.committing(plan.job_id):
                try:
                    copier.load(_in_buffers(chunks, own), mark)
                except RefusedError as error:
                    reason, row = error.reason, error.row
                # Of those that are verified, what the plan has slots for.
                places = chunks.slots[:row]
                promoted = np.flatnonzero(plan.promoted[places])
                if above is not None and len(promoted):
                    nbytes = HEADER_NBYTES + copier.chunk_nbytes
                    rows = [self._buffers.rows[own + each, :nbytes] for each in promoted]
                    above.promote(plan, plan.slots[places[promoted]], rows)
            if reason is not None:
                self._remove(rank_key(chunks.keys[row], self._rank), reason)
                raise RefusedError(reason)
        finally:
            del self._gets[first]
            self._free_for_loads.put(first)
        return chunks.num_blocks * copier.pages.block_nbytes

    def _get(self, chunks: Chunks, nbytes: int, first: int) -> int:
        """Fill buffers, and copy them where the tier may still write there; return the first.

        A buffer without a header is refused as an absent block.
        """
        if self._get_health.is_paused:
            self._counts.add("gets_paused", len(chunks))
            raise RefusedError("error")
        own = [rank_key(key, self._rank) for key in chunks.keys]
        rows = self._buffers.rows[first : first + len(own), : HEADER_NBYTES + nbytes]
        try:
            items = [(each, row.data) for each, row in zip(own, rows, strict=True)]
            for row, is_filled in zip(rows, self._tier.get_many(items), strict=True):
                if not is_filled:
                    row[:HEADER_NBYTES] = 0
            self._get_health.ended(success=True)
        except BaseException as error:
            self._counts.fail("get_failures", type(error).__name__, error, len(own))
            self._get_health.ended(success=False)
            for each in own:
                self._mark_unreadable(each)
            raise RefusedError("error") from error
        if not self._tier.writes_after_get:
            return first
        copies = first + self._own
        self._buffers.rows[copies : copies + len(own), : HEADER_NBYTES + nbytes] = rows
        return copies

    def _remove(self, own: bytes, reason: Reason) -> None:
        """Remove a block that is not what it should be."""
        self._counts.fail("blocks_refused", reason, f"{own.hex()} is removed")
        try:
            self._tier.remove([own])
        except BaseException as error:
            self._counts.fail("remove_failures", type(error).__name__, error)
            self._mark_unreadable(own)

    def _mark_unreadable(self, own: bytes) -> None:
        with self._lock:
            self._unreadable[own] = None
            if len(self._unreadable) > InvalidatedKeys.MAX_KEYS:
                self._unreadable.popitem(last=False)

    def _hangs(self) -> bool:
        """Return whether every thread that loads has been in one call for too long."""
        since = time.monotonic() - self._deadline_s
        calls = list(self._gets.values())
        return len(calls) == self._num_threads and max(calls) < since


def _in_buffers(chunks: Chunks, first: int) -> Chunks:
    return chunks.at(np.arange(first, first + len(chunks)))
