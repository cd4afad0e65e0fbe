"""verl's manager, as the package replaces it: replicas after a sync that has failed."""

import asyncio

import pytest
from stand_ins import Replica
from verl.workers.config import CheckpointEngineConfig

import wtransfer_verl


class StuckReplica(Replica):
    async def resume_generation(self):
        await asyncio.Event().wait()


class DeadReplica(Replica):
    async def resume_generation(self):
        raise RuntimeError("this replica is dead")


class UnpausedReplica(Replica):
    async def abort_all_requests(self, reject_request=False):
        raise RuntimeError("this replica does not pause")


class UnreleasedReplica(Replica):
    async def release_kv_cache(self):
        raise RuntimeError("this replica keeps its cache")


class ImpatientManager(wtransfer_verl.CheckpointManager):
    resume_timeout_s = 0.1


def failed_sync(replicas, error=RuntimeError, backend="wtransfer"):
    """Return a manager after a sync that has failed when the replicas were paused."""
    config = CheckpointEngineConfig(backend=backend, custom_backend_module="wtransfer_verl")
    manager = ImpatientManager(config, None, [*replicas, UnreleasedReplica(9, [object()])])
    with pytest.raises(error):
        manager.update_weights(1)
    return manager


@pytest.mark.parametrize("lost", [StuckReplica, DeadReplica])
def test_replicas_generate_after_a_failed_sync_also_beside_one_that_does_not(lost, caplog):
    replicas = [each(rank, []) for rank, each in enumerate((lost, Replica, Replica))]
    failed_sync(replicas)
    assert [each.generates and each.has_cache for each in replicas] == [False, True, True]
    assert "replica 0 does not generate again" in caplog.text


def test_replica_that_has_discarded_its_weights_stays_paused(caplog):
    replicas = [Replica(0, [], free_cache_engine=True), Replica(1, [])]
    manager = failed_sync(replicas)
    assert [each.generates for each in replicas] == [False, True]
    assert "replica 0 stays paused until a sync succeeds" in caplog.text
    # Its cache is not released a second time, and it is still paused.
    with pytest.raises(RuntimeError):
        manager.update_weights(2)
    assert [each.generates for each in replicas] == [False, True]


def test_replica_that_was_started_with_random_weights_stays_paused_before_its_first_set():
    replicas = [Replica(0, [], load_format="dummy"), Replica(1, [])]
    failed_sync(replicas)
    assert [each.generates for each in replicas] == [False, True]


def test_replica_whose_cache_was_not_released_is_not_to_restore_it(caplog):
    replicas = [UnpausedReplica(0, []), Replica(1, [], free_cache_engine=True)]
    failed_sync(replicas)
    assert [each.generates and each.has_cache for each in replicas] == [True, True]
    assert caplog.text == ""


def test_replicas_of_another_engine_are_left_to_verl():
    replica = Replica(0, [])
    replica.generates = replica.has_cache = False
    failed_sync([replica], AttributeError, backend="naive")
    assert not replica.generates
    assert not replica.has_cache


def test_manager_may_be_awaited_as_verls():
    config = CheckpointEngineConfig(backend="wtransfer", custom_backend_module="wtransfer_verl")
    manager = ImpatientManager(config, None, [Replica(0, []), UnreleasedReplica(1, [object()])])

    async def run():
        with pytest.raises(RuntimeError):
            await manager.update_weights(1)

    asyncio.run(run())
    assert manager.replicas[0].generates
