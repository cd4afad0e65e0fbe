"""verl's manager, as the package replaces it: replicas after a sync that has failed."""

import asyncio

import pytest
from stand_ins import Replica
from verl.workers.config import CheckpointEngineConfig

import wtransfer_verl


class StuckReplica(Replica):
    async def resume_kv_cache(self):
        await asyncio.Event().wait()


class DeadReplica(Replica):
    async def resume_kv_cache(self):
        raise RuntimeError("this replica is dead")


class ImpatientManager(wtransfer_verl.CheckpointManager):
    resume_timeout_s = 0.1


@pytest.mark.parametrize("lost", [StuckReplica, DeadReplica])
def test_replicas_generate_after_a_failed_sync_also_beside_one_that_does_not(lost, caplog):
    config = CheckpointEngineConfig(backend="wtransfer", custom_backend_module="wtransfer_verl")
    replicas = [lost(0, []), Replica(1, []), Replica(2, [])]
    # Without workers verl makes no group of rollouts: an error after it has paused them.
    manager = ImpatientManager(config, None, replicas)
    with pytest.raises(TypeError):
        manager.update_weights(1)
    assert [each.generates and each.has_cache for each in replicas] == [False, True, True]
    assert "replica 0 does not generate again" in caplog.text


def test_manager_may_be_awaited_as_verls():
    config = CheckpointEngineConfig(backend="wtransfer", custom_backend_module="wtransfer_verl")
    manager = ImpatientManager(config, None, [Replica(0, [])])

    async def run():
        with pytest.raises(TypeError):
            await manager.update_weights(1)

    asyncio.run(run())
    assert manager.replicas[0].generates
