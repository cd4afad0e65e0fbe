"""The jobs of a worker: read from what a host submits, cut into steps, and run by threads.

A slot holds a chunk, which is one block of the cache or several. Blocks that follow each other in a
sequence fill chunk after chunk; the first one of a group may begin in the middle of a chunk, and
the last one may end there (`GPULoadStoreSpec.block_indices`).

Jobs run in order wherever one of them writes to a slot that they share: a job begins when the last
one that wrote to its slots has ended, and a job that writes, when the last one that read them has,
too. So a manager that reuses a slot too early finds one of both blocks in it, never a mix.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import queue
import sys
import threading
import time
from abc import abstractmethod
from collections import Counter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from wtransfer.calls import check_process
from wtransfer.deadline import Deadline
from wtransfer.errors import StallError
from wtransfer.kv.copier import Chunks, RefusedError
from wtransfer.specs.interface import OffloadingWorker, TransferResult

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from wtransfer.kv.copier import Copier, Reason
    from wtransfer.kv.slots import Numbers
    from wtransfer.specs.interface import GPULoadStoreSpec, LoadStoreSpec

    Step = Callable[[], int]
    """Copies some blocks and returns how many bytes; raises RefusedError, or anything."""

logger = logging.getLogger(__name__)

Kind = Literal["store", "load"]
"""Direction of a job's copies."""
Pool = Literal["store", "load", "fetch"]
"""Threads for a step: those of its kind, or those of loads that wait for a tier."""

NICENESS = 10
"""Priority of threads whose work nothing waits for: on busy processors they get about a tenth."""
_COMMIT_S = 0.001
SHUTDOWN_S = 0.8
"""Time that running steps may still take when the worker is shut down, in seconds."""


# -- what a job copies


class MalformedJobError(ValueError):
    """A job whose two sides do not belong together; stays within the worker that was given it."""


def chunks_of(
    cache: Any, kept: Any, num_slots: int, num_blocks: Sequence[int], blocks_per_chunk: int
) -> list[Chunks]:
    """Match both sides of a job.

    Args:
        cache: Blocks of the cache, as a `GPULoadStoreSpec` or vLLM's.
        kept: Slots and keys, as an `ArenaLoadStoreSpec`.
        num_slots: Slots that there are.
        num_blocks: Blocks of each group's cache.
        blocks_per_chunk: Blocks in a slot.

    Raises:
        MalformedJobError: The sides do not belong together, or there are no such blocks or slots.
    """
    blocks = np.asarray(cache.block_ids, np.int64)
    slots = np.asarray(kept.slots, np.int64)
    _check_numbers(slots, num_slots, "slots")
    if len(kept.keys) != len(slots):
        raise MalformedJobError(f"{len(kept.keys)} keys for {len(slots)} slots")
    if not len(cache.group_sizes) == len(cache.block_indices) == len(num_blocks):
        raise MalformedJobError(
            f"blocks of {len(cache.group_sizes)} groups; the cache has {len(num_blocks)}"
        )
    found, block, slot = [], 0, 0
    for group, (size, index) in enumerate(zip(cache.group_sizes, cache.block_indices, strict=True)):
        if not size:
            continue
        own = blocks[block : block + size]
        _check_numbers(own, num_blocks[group], f"blocks of group {group}")
        grid = _grid(own, int(index), blocks_per_chunk)
        part = slice(slot, slot + len(grid))
        found.append(Chunks(group, slots[part], kept.keys[part], grid))
        block, slot = block + size, slot + len(grid)
    if (block, slot) != (len(blocks), len(slots)):
        raise MalformedJobError(
            f"{len(blocks)} blocks and {len(slots)} slots; {block} blocks fill {slot} slots"
        )
    return found


def _grid(blocks: Numbers, index: int, blocks_per_chunk: int) -> Numbers:
    """Return blocks in rows of a chunk each."""
    skipped = index % blocks_per_chunk
    num_chunks = -(-(skipped + len(blocks)) // blocks_per_chunk)
    grid = np.full(num_chunks * blocks_per_chunk, -1, np.int64)
    grid[skipped : skipped + len(blocks)] = blocks
    return grid.reshape(num_chunks, blocks_per_chunk)


def _check_numbers(numbers: Numbers, limit: int, what: str) -> None:
    if len(numbers) and (numbers.min() < 0 or numbers.max() >= limit):
        raise MalformedJobError(
            f"{what} {numbers.min()} to {numbers.max()}; there are those from 0 to {limit - 1}"
        )


# -- threads


class CopyThreads:
    """Daemon threads that run submitted calls, in the order of submission.

    Args:
        name: Their name.
        number: Number of threads.
        niceness: How far they step back behind the rest of the process.
    """

    def __init__(self, name: str, number: int, niceness: int = 0) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._niceness = niceness
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(number)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], None]) -> None:
        """Run a call that does not raise."""
        self._tasks.put(call)

    def stop(self) -> None:
        """Let the threads end after what was submitted."""
        for _ in self._threads:
            self._tasks.put(None)

    def join(self, deadline: Deadline) -> bool:
        """Wait for the threads to end.

        Returns:
            True if all have ended. A thread that hangs is left behind, and dies with the process.
        """
        for thread in self._threads:
            thread.join(deadline.remaining())
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        step_back(self._niceness)
        while (call := self._tasks.get()) is not None:
            call()
            # A closure may hold a cache: release it before the next wait.
            del call


# -- jobs


class Job:
    """One transfer.

    Args:
        job_id: The host's number for it.
        kind: Direction of its copies.
        steps: Its steps; at least one.
        slots: Slots that it uses.
        pools: Threads for each step; None: those of its kind.
        written: Slots that it writes to; None: all of a store, none of a load.
    """

    def __init__(
        self,
        job_id: int,
        kind: Kind,
        steps: Sequence[Step],
        slots: Numbers,
        *,
        pools: Sequence[Pool] | None = None,
        written: Numbers | None = None,
    ) -> None:
        if written is None:
            written = slots if kind == "store" else slots[:0]
        self.written = written
        """Slots that it writes to."""
        self.job_id, self.kind, self.steps, self.slots = job_id, kind, steps, slots
        self.pools: Sequence[Pool] = pools or [kind] * len(steps)
        """Threads for each step."""
        self.num_left = len(steps)
        """Steps and further parts that have not ended."""
        self.num_steps_left = len(steps)
        """Steps that have not ended: while there are any, the cache is in use."""
        self.serial = -1
        """Its place in the order of submission."""
        self.num_before = 0
        """Jobs that must end before it may begin."""
        self.behind: list[Job] = []
        """Jobs that wait for its end."""
        self.nbytes = 0
        """Bytes that were copied so far."""
        self.reason: Reason | None = None
        """Reason of its failure."""
        self.began: float | None = None
        """Time at which its first step began."""
        self.deadline: Deadline | None = None
        """Time at which it is given up, unless a step is using the cache."""
        self.num_committing = 0
        """Steps that are using the cache."""

    def result(self) -> TransferResult:
        """Return the outcome."""
        seconds = time.monotonic() - self.began if self.began is not None else 0.0
        return TransferResult(self.job_id, self.reason is None, self.nbytes, seconds)


class Jobs:
    """Runs jobs in the background. Its methods may be called from any thread.

    Args:
        name: The worker's name, for errors.
        num_slots: Slots of the arena. Jobs that use one of them run one after the other.
        num_threads: Threads for each direction.
        deadline_s: Longest time without progress while a caller waits, in seconds.
        give_up_s: Time after which a job fails, in seconds, whatever its steps still do: they use
            the cache within `committing` only. None: a job takes as long as it takes.
        has_fetches: True if some steps have the pool ``fetch``.
    """

    def __init__(
        self,
        name: str,
        num_slots: int,
        num_threads: int,
        deadline_s: float,
        give_up_s: float | None = None,
        *,
        has_fetches: bool = False,
    ) -> None:
        self.num_slots = num_slots
        """As given."""
        self._name = name
        self._deadline_s = deadline_s
        self._give_up_s = give_up_s
        # Loads have threads of their own: a request waits for them, nothing waits for a store.
        self._threads: dict[Pool, CopyThreads] = {
            "store": CopyThreads("wtransfer-store", num_threads, NICENESS),
            "load": CopyThreads("wtransfer-load", num_threads),
        }
        if has_fetches:
            self._threads["fetch"] = CopyThreads("wtransfer-fetch", num_threads)
        # Guards everything below. A condition, so that `wait` is notified of every step.
        self._moved = threading.Condition()
        self._open: dict[int, Job] = {}
        self._last_writer = np.full(num_slots, -1, np.int64)
        self._last_reader = np.full(num_slots, -1, np.int64)
        self._users: dict[int, Job] = {}
        self._num_jobs = 0
        self._num_steps = 0
        self._finished: list[TransferResult] = []
        self._counts: Counter[str] = Counter()
        self._closed = False

    def submit(self, job: Job) -> bool:
        """Begin a job, or line it up behind those that use its slots.

        Returns:
            True if the job was accepted: not after `shutdown`, nor while a job of this number runs.
        """
        with self._moved:
            if self._closed or job.job_id in self._open:
                return False
            if self._give_up_s is not None:
                job.deadline = Deadline(self._give_up_s)
            self._open[job.job_id] = job
            before = self._line_up(job)
        if not before:
            self._begin(job)
        return True

    def fail(self, job_id: int, kind: Kind, reason: Reason) -> bool:
        """Note a job that failed before it could begin.

        Returns:
            True if it was noted, as for `submit`: a running job has one result, its own.
        """
        failed = Job(job_id, kind, (), np.empty(0, np.int64))
        failed.reason = reason
        with self._moved:
            if self._closed or job_id in self._open:
                return False
            self._conclude(failed)
        return True

    @contextlib.contextmanager
    def committing(self, job_id: int) -> Iterator[None]:
        """Let a step use the cache: its job is not given up meanwhile.

        Raises:
            RefusedError: The job was given up before.
        """
        with self._moved:
            job = self._wanted(job_id)
            job.num_committing += 1
        try:
            yield
        finally:
            with self._moved:
                job.num_committing -= 1

    def add_part(self, job_id: int) -> None:
        """Add a part that outlasts the calling step, until `end_part`.

        Raises:
            RefusedError: The job was given up before.
        """
        with self._moved:
            self._wanted(job_id).num_left += 1

    def end_part(self, job_id: int, reason: Reason | None) -> None:
        """End a part that `add_part` has added; a reason fails the job."""
        with self._moved:
            job = self._open.get(job_id)
            freed = [] if job is None else self._end_of(job, 0, reason)
        for each in freed:
            self._begin(each)

    def released(self) -> set[int]:
        """Return jobs that have not ended, and no longer use the cache."""
        with self._moved:
            return {each.job_id for each in self._open.values() if not each.num_steps_left}

    def seconds_left(self, job_id: int) -> float:
        """Return how long until a job is given up; 0 for one that has ended."""
        with self._moved:
            job = self._open.get(job_id)
            return 0.0 if job is None or job.deadline is None else job.deadline.remaining()

    def finished(self) -> list[TransferResult]:
        """Return the jobs that have ended since the last call, and those that are given up now."""
        with self._moved:
            self._give_up()
            finished, self._finished = self._finished, []
            return finished

    def _give_up(self, job_ids: Collection[int] = ()) -> None:
        """Fail jobs whose time is over, and `job_ids`, unless they are using the cache."""
        for job in list(self._open.values()):
            is_over = job.deadline is not None and job.deadline.expired
            if (is_over or job.job_id in job_ids) and not job.num_committing:
                job.reason = job.reason or "slow"
                for each in self._end(job):
                    self._begin(each)
                self._moved.notify_all()

    def wait(self, job_ids: Iterable[int], release_s: float | None = None) -> None:
        """Wait until jobs have ended.

        Args:
            job_ids: The jobs; unknown ones have ended.
            release_s: Wait until they no longer use the cache; jobs that have not begun to after
                this time, in seconds, fail.

        Raises:
            StallError: No progress within the time allowed.
        """
        wanted = set(job_ids)
        deadline = Deadline(self._deadline_s)
        release = Deadline(math.inf if release_s is None else release_s)
        with self._moved:
            while left := {
                each
                for each in wanted & self._open.keys()
                if release_s is None or self._open[each].num_steps_left
            }:
                seen = self._progress(left)
                next_s = min(self._next_s(left), max(_COMMIT_S, release.remaining()))
                self._moved.wait(min(deadline.remaining(), next_s))
                self._give_up(left if release.expired else ())
                if self._progress(left) != seen:
                    deadline.restart()
                elif deadline.expired:
                    raise StallError(
                        f"{self._name}: jobs {sorted(left)} made no progress within "
                        f"{self._deadline_s:g} s",
                        seconds=self._deadline_s,
                    )

    def counts(self) -> dict[str, float]:
        """Return counters."""
        with self._moved:
            return {**self._counts, "jobs_running": len(self._open)}

    def shutdown(self) -> bool:
        """End within a second: steps that run are waited for, the others fail.

        Returns:
            True if nothing runs any more. False: a step hangs.
        """
        with self._moved:
            self._closed = True
        for threads in self._threads.values():
            threads.stop()
        give_up = Deadline(SHUTDOWN_S)
        ended = [threads.join(give_up) for threads in self._threads.values()]
        with self._moved:
            # Jobs that waited for others, and jobs whose step hangs.
            for job in list(self._open.values()):
                job.reason = job.reason or "shutdown"
                self._end(job)
            self._moved.notify_all()
        return all(ended)

    # -- one job

    def _wanted(self, job_id: int) -> Job:
        job = self._open.get(job_id)
        if job is None or job.reason is not None:
            raise RefusedError("slow")
        return job

    def _next_s(self, job_ids: Iterable[int]) -> float:
        """Return how long until the first of these jobs is to be given up, in seconds."""
        deadlines = (self._open[each].deadline for each in job_ids)
        left = (each.remaining() for each in deadlines if each is not None)
        return max(_COMMIT_S, min(left, default=math.inf))

    def _progress(self, job_ids: Iterable[int]) -> tuple[int, int]:
        """Return numbers that change when jobs come nearer to their end.

        A step of any job brings jobs nearer that have not begun, for they wait in line. A job that
        has begun must move itself: others may go on for ever beside a step that hangs.
        """
        jobs = [self._open[each] for each in job_ids if each in self._open]
        in_line = any(job.began is None for job in jobs)
        return sum(job.num_left for job in jobs), self._num_steps if in_line else 0

    def _line_up(self, job: Job) -> int:
        """Enter a job as the last user of its slots; return how many it must wait for."""
        serial, self._num_jobs = self._num_jobs, self._num_jobs + 1
        job.serial = serial
        slots = job.slots[job.slots < self.num_slots]
        written = job.written[job.written < self.num_slots]
        earlier = np.union1d(self._last_writer[slots], self._last_reader[written]).tolist()
        before = [self._users[each] for each in earlier if each in self._users]
        for each in before:
            each.behind.append(job)
        job.num_before = len(before)
        self._last_reader[slots] = serial
        self._last_writer[written] = serial
        self._users[serial] = job
        return job.num_before

    def _begin(self, job: Job) -> None:
        for pool, step in zip(job.pools, job.steps, strict=True):
            self._threads[pool].submit(functools.partial(self._run, job, step))

    def _run(self, job: Job, step: Step) -> None:
        """Run one step, on one of the threads."""
        nbytes, reason = 0, job.reason
        if job.began is None:
            job.began = time.monotonic()
        if reason is None:
            nbytes, reason = self._outcome(job, step)
        with self._moved:
            if job.serial not in self._users:
                return  # it hung, and was given up
            job.num_steps_left -= 1
            freed = self._end_of(job, nbytes, reason)
        for each in freed:
            self._begin(each)

    def _end_of(self, job: Job, nbytes: int, reason: Reason | None) -> list[Job]:
        """Record the end of a step or part; return the jobs that may begin now."""
        job.nbytes += nbytes
        job.reason = job.reason or reason
        job.num_left -= 1
        self._num_steps += 1
        freed = self._end(job) if not job.num_left else []
        self._moved.notify_all()
        return freed

    def _outcome(self, job: Job, step: Step) -> tuple[int, Reason | None]:
        try:
            return (0, "shutdown") if self._closed else (step(), None)
        except RefusedError as refused:
            return 0, refused.reason
        except Exception:
            # The host serves on: a block that is not kept is computed. After the end, the memory is
            # gone from under a step that hung.
            if not self._closed:
                logger.exception("%s: %s job %d failed", self._name, job.kind, job.job_id)
            return 0, "error"

    def _end(self, job: Job) -> list[Job]:
        """Note that a job has ended; return those that may begin now."""
        del self._open[job.job_id], self._users[job.serial]
        self._conclude(job)
        for each in job.behind:
            each.num_before -= 1
        return [each for each in job.behind if not each.num_before]

    def _conclude(self, job: Job) -> None:
        self._finished.append(job.result())
        self._counts[f"{job.kind}s_total"] += 1
        self._counts[f"{job.kind}_bytes_total"] += job.nbytes
        if job.reason is not None:
            self._counts[f"{job.kind}s_failed_total"] += 1
            self._counts[f"{job.kind}s_failed_{job.reason}_total"] += 1


# -- the worker


class JobWorker(OffloadingWorker):
    """A worker that copies by copiers, in jobs. A subclass stores and loads the chunks.

    Args:
        name: The rank's name, for errors.
        copiers: For each group of the cache; none after `shutdown`.
        jobs: Runs the jobs.
    """

    release_s: float | None = None
    """Argument of `Jobs.wait`."""

    def __init__(self, name: str, copiers: Sequence[Copier], jobs: Jobs) -> None:
        self._name, self._copiers, self._jobs = name, tuple(copiers), jobs
        self._pid = os.getpid()

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

    def wait(self, job_ids: set[int]) -> None:
        """Wait until these jobs have ended, or are released where `release_s` is set.

        Raises:
            StallError: The jobs made no progress within the deadline.
            ForkedError: The process is a forked child.
        """
        check_process(self._pid, type(self).__name__)
        self._jobs.wait(job_ids, self.release_s)

    def get_stats(self) -> Mapping[str, float]:
        """Return how many jobs, bytes and failures there were, the latter also by reason."""
        return self._jobs.counts()

    def _num_places(self, kept: Any) -> int:  # noqa: ARG002
        """Return the number below which a job's slots must be."""
        return self._jobs.num_slots

    def _refusal(self, kind: Kind, kept: Any, slots: Numbers) -> Reason | None:  # noqa: ARG002
        """Return why a job fails before it begins; None: it begins."""
        return None

    def _pool(self, kind: Kind, chunks: Chunks) -> Pool:  # noqa: ARG002
        """Return the pool of threads for a step."""
        return kind

    @abstractmethod
    def _tasks(self, copier: Copier, chunks: Chunks) -> Iterable[Chunks]:
        """Divide the chunks of a job into steps."""

    @abstractmethod
    def _store(self, job_id: int, copier: Copier, chunks: Chunks, mark: object) -> int:
        """Store the chunks of one step; return how many bytes."""

    @abstractmethod
    def _load(self, job_id: int, copier: Copier, chunks: Chunks, mark: object) -> int:
        """Load the chunks of one step; return how many bytes."""

    def _submit(self, job_id: int, kind: Kind, cache: GPULoadStoreSpec, kept: Any) -> bool:
        check_process(self._pid, type(self).__name__)
        if not self._copiers:
            return False
        try:
            num_blocks = [copier.pages.num_blocks for copier in self._copiers]
            blocks_per_chunk = self._copiers[0].blocks_per_chunk
            job_chunks = chunks_of(
                cache, kept, self._num_places(kept), num_blocks, blocks_per_chunk
            )
            slots = np.concatenate([np.empty(0, np.int64), *(each.slots for each in job_chunks)])
            if kind == "store":
                if len(np.unique(slots)) != len(slots):
                    raise MalformedJobError("two blocks for one slot")
                if any((each.blocks[:, -1] < 0).any() for each in job_chunks):
                    raise MalformedJobError("a chunk without its last block cannot be stored")
        except (MalformedJobError, AttributeError, TypeError, ValueError) as error:
            logger.warning("%s: %s job %d cannot be done: %s", self._name, kind, job_id, error)
            return self._jobs.fail(job_id, kind, "malformed")
        if (reason := self._refusal(kind, kept, slots)) is not None:
            return self._jobs.fail(job_id, kind, reason)
        steps: list[Step] = []
        pools: list[Pool] = []
        for chunks in job_chunks:
            copier = self._copiers[chunks.group]
            # The copy comes after all work that the model was given until now.
            mark = copier.pages.mark()
            copy = self._store if kind == "store" else self._load
            for task in self._tasks(copier, chunks):
                steps.append(functools.partial(copy, job_id, copier, task, mark))
                pools.append(self._pool(kind, task))
        # The end of a prefix first: a store that evicts what was used longest ago keeps its head.
        # A job of no blocks ends like any other.
        written = slots if kind == "store" else np.asarray(getattr(kept, "fetched", ()), np.int64)
        job = Job(
            job_id,
            kind,
            steps[::-1] or [lambda: 0],
            slots,
            pools=pools[::-1] or None,
            written=written,
        )
        return self._jobs.submit(job)


def step_back(niceness: int = NICENESS) -> None:
    """Lower this thread's priority, to the processor time that other threads leave.

    Serving, and a trainer on the same host that continues to train, come first.

    Args:
        niceness: How far to step back; 0: not at all.
    """
    # Only on Linux do threads have priorities of their own, under the numbers of processes.
    if sys.platform == "linux" and niceness:
        thread = threading.get_native_id()
        present = os.getpriority(os.PRIO_PROCESS, thread)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, max(present, niceness))
