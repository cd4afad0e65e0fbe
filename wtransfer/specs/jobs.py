"""The jobs of a worker: cut into steps, which threads run, in order where they share slots.

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
from collections import Counter
from typing import TYPE_CHECKING, Literal

import numpy as np

from wtransfer.deadline import Deadline
from wtransfer.errors import StallError
from wtransfer.kv.copier import RefusedError
from wtransfer.specs.interface import TransferResult

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from wtransfer.kv.copier import Reason
    from wtransfer.kv.slots import Numbers

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
        steps: Its steps, each with the threads for it.
        slots: Slots that it uses.
        written: Those of them that it writes to.
    """

    def __init__(
        self,
        job_id: int,
        kind: Kind,
        steps: Sequence[tuple[Pool, Step]],
        slots: Numbers,
        written: Numbers,
    ) -> None:
        self.job_id, self.kind, self.steps = job_id, kind, steps
        self.slots, self.written = slots, written
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
        pools: Threads that steps have, besides those of stores.
    """

    def __init__(
        self,
        name: str,
        num_slots: int,
        num_threads: int,
        deadline_s: float,
        *,
        give_up_s: float | None = None,
        pools: Sequence[Pool] = ("load",),
    ) -> None:
        self.num_slots = num_slots
        """As given."""
        self._name = name
        self._deadline_s = deadline_s
        self._give_up_s = give_up_s
        # Loads have threads of their own: a request waits for them, nothing waits for a store.
        self._threads: dict[Pool, CopyThreads] = {
            "store": CopyThreads("wtransfer-store", num_threads, NICENESS),
            **{pool: CopyThreads(f"wtransfer-{pool}", num_threads) for pool in pools},
        }
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
            if not job.steps:
                self._conclude(job)
                return True
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
        no_slots = np.empty(0, np.int64)
        failed = Job(job_id, kind, (), no_slots, no_slots)
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
        slots, written = job.slots, job.written
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
        for pool, step in job.steps:
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
        # Steps hold the cache, and an error that was logged may hold the job.
        job.steps = ()
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
