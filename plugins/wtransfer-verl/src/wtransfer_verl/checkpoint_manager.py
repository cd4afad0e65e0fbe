"""verl's manager of syncs, whose rollouts generate again after a sync that has failed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from verl.checkpoint_engine import CheckpointEngineManager
from verl.utils.ray_utils import auto_await

logger = logging.getLogger(__name__)


class CheckpointManager(CheckpointEngineManager):
    """For ``actor_rollout_ref.rollout.checkpoint_manager_class``, with any checkpoint engine."""

    resume_timeout_s = 60.0
    """Longest wait, after a sync that has failed, for a replica to generate again, in seconds."""

    @auto_await  # type: ignore[untyped-decorator]  # callers may await it or not, as verl's own
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """Update the rollouts' weights; after a failure they generate with those that they have.

        Raises:
            Exception: As verl's manager.
        """
        try:
            metrics: dict[str, Any] = await super().update_weights(global_steps)
        except BaseException:
            # verl itself resumes them at the end of a sync that succeeds.
            await self._resume()
            raise
        return metrics

    async def _resume(self) -> None:
        async def resume(replica: Any) -> None:
            # Neither does anything on a replica that was not paused.
            await replica.resume_kv_cache()
            await replica.resume_generation()

        # Each by itself: the sync may have failed because a replica is dead or stuck.
        outcomes = await asyncio.gather(
            *(asyncio.wait_for(resume(each), self.resume_timeout_s) for each in self.replicas),
            return_exceptions=True,
        )
        for replica, error in zip(self.replicas, outcomes, strict=True):
            if error is not None:
                logger.error("replica %s does not generate again: %r", replica.replica_rank, error)
