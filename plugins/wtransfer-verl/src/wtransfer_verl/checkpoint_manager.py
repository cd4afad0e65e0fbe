"""verl's manager of syncs, whose rollouts generate again after a sync that has failed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import ray
from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.ray_utils import auto_await

logger = logging.getLogger(__name__)


class CheckpointManager(CheckpointEngineManager):
    """For ``actor_rollout_ref.rollout.checkpoint_manager_class``.

    With another checkpoint engine than ``wtransfer`` it does what verl's manager does.
    """

    resume_timeout_s = 60.0
    """Longest wait, after a sync that has failed, for each of: calls to load, the end of the sync
    on all workers, a replica to generate again; in seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Replicas that a sync has made whole (True) or not (False); absent: as they were started.
        self._whole: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
        self._without_cache: WeakSet[Any] = WeakSet()
        # Of the sync under way.
        self._rollout: Any = None
        self._loads: list[Any] = []

    @auto_await  # type: ignore[untyped-decorator]  # callers may await it or not, as verl's own
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Update the rollouts' weights.

        After a failure replicas generate again whose weights are known to be whole: the old ones,
        of which no part was replaced, or the new ones. Others stay paused, which is logged, until
        a sync succeeds.

        Raises:
            Exception: As verl's manager.
        """
        if self.backend != "wtransfer":
            metrics: dict[str, Any] = await super().update_weights(global_steps)
            return metrics
        self._rollout, self._loads = None, []
        try:
            metrics = await super().update_weights(global_steps)
        except BaseException:
            try:
                await self._end_failed_sync()
                await self._resume()
            except Exception:
                # The sync's error is the one to raise.
                logger.exception("replicas stay paused")
            raise
        for replica in self.replicas:
            self._whole[replica] = True
        return metrics

    @auto_await  # type: ignore[untyped-decorator]
    async def release_kv_cache_replicas(self) -> None:
        """Release the KV cache of the replicas that have it."""

        async def release(replica: Any) -> None:
            if replica.config.free_cache_engine:
                # vLLM's servers discard the weights with it.
                self._whole[replica] = False
            await replica.release_kv_cache()
            self._without_cache.add(replica)

        have_it = [each for each in self.replicas if each not in self._without_cache]
        await asyncio.gather(*map(release, have_it))

    @auto_await  # type: ignore[untyped-decorator]
    async def resume_kv_cache_replicas(self) -> None:
        """Restore the KV cache of all replicas."""
        await asyncio.gather(*map(self._resume_kv_cache, self.replicas))

    async def _resume_kv_cache(self, replica: Any) -> None:
        await replica.resume_kv_cache()
        self._without_cache.discard(replica)

    def build_process_group(self, rollout: Any) -> None:
        """Build it, and note the calls by which rollouts load."""
        self._rollout = rollout
        super().build_process_group(rollout)
        update_weights = rollout.update_weights

        def noted(**kwargs: Any) -> list[Any]:
            self._loads = update_weights(**kwargs)
            return self._loads

        rollout.update_weights = noted

    async def _end_failed_sync(self) -> None:
        """Release the sync's memory on all workers, and learn what rollouts have loaded."""
        if self._rollout is None:
            return
        workers = self._rollout.workers
        # verl raises the first error, while other rollouts load. A call that has not ended is left
        # alone: it may read the set.
        loads = await self._outcomes(self._loads) or [None] * len(workers)
        running = {
            worker
            for worker, outcome in zip(workers, loads, strict=True)
            if isinstance(outcome, _NotEndedError)
        }
        idle = [worker for worker in workers if worker not in running]
        # An actor takes its calls in order: this is answered before `finalize` forgets it.
        asked = [each.execute_checkpoint_engine.remote("handed_over") for each in idle]
        ended = [each.execute_checkpoint_engine.remote("finalize") for each in idle]
        trainers = self.actor_wg
        ended += trainers.execute_checkpoint_engine(["finalize"] * trainers.world_size)
        answers = await self._outcomes([*asked, *ended])
        for error in answers[len(asked) :]:
            if error is not None:
                logger.error("the failed sync has not ended on a worker: %r", error)
        handed_over = dict(zip(idle, answers, strict=False))
        # Per worker: True if it has the whole new set, False if nothing of it, None if unknown.
        loaded = {
            worker: True
            if self._loads and outcome is None
            else False
            if handed_over.get(worker) is False
            else None
            for worker, outcome in zip(workers, loads, strict=True)
        }
        for replica in self.replicas:
            found = {loaded.get(worker, False) for worker in replica.workers}
            if found != {False}:
                self._whole[replica] = found == {True}

    async def _resume(self) -> None:
        async def resume(replica: Any) -> None:
            # An engine that has its cache may fail when it is to restore it.
            if replica in self._without_cache:
                await self._resume_kv_cache(replica)
            await replica.resume_generation()

        whole = []
        for replica in self.replicas:
            # verl starts engines with random weights by default.
            if self._whole.get(replica, replica.config.load_format != "dummy"):
                whole.append(replica)
            else:
                logger.error(
                    "replica %s stays paused until a sync succeeds: its weights are not known to "
                    "be whole",
                    replica.replica_rank,
                )
        # Each by itself: the sync may have failed because a replica is dead or stuck.
        outcomes = await asyncio.gather(
            *(asyncio.wait_for(resume(each), self.resume_timeout_s) for each in whole),
            return_exceptions=True,
        )
        for replica, error in zip(whole, outcomes, strict=True):
            if error is not None:
                logger.error("replica %s does not generate again: %r", replica.replica_rank, error)

    async def _outcomes(self, calls: list[Any]) -> list[Any]:
        """Return the result or error of each call."""
        if not calls:
            return []
        done, _ = await asyncio.to_thread(
            ray.wait, calls, num_returns=len(calls), timeout=self.resume_timeout_s
        )
        return [_outcome(each) if each in done else _NotEndedError() for each in calls]


class _NotEndedError(Exception):
    """A call has not ended in time."""


def _outcome(call: Any) -> Any:
    try:
        return ray.get(call)
    except Exception as error:
        return error
