"""Faults in the tier and around it: a miss, computed afresh, and the same tokens (FAULTS K, O)."""

from __future__ import annotations

import collections
import itertools
import random
from types import SimpleNamespace

import msgspec
import pytest
import xxhash

from wtransfer.kv.keys import FENCE_NBYTES, hash_blocks
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.contract import Request
from wtransfer.testing.mini_engine.serialize import deserialize
from wtransfer.weight_version import process_weights

BLOCK_SIZE = 16


@pytest.fixture
def prompts(kit):
    return kit.prompts(BLOCK_SIZE, 4)


@pytest.fixture
def settings(kit, prompts):
    largest = max(kit.blocks_for(prompt, BLOCK_SIZE) for prompt in prompts)
    return EngineConfig(
        cache=CacheShape(BLOCK_SIZE, largest + 1),
        seed=3,
        **kit.offloading(kit.cpu_tier(BLOCK_SIZE, 64)),
    )


def ask(kit, host, prompts, seed=3):
    """Ask one after the other, and check the answers; return what was counted meanwhile."""
    before = host.scheduler.counts.copy()
    for prompt in prompts:
        assert [kit.reference(prompt, seed)] == host.generate([prompt], kit.NEW_TOKENS)
    counts = host.scheduler.counts
    return collections.Counter({name: counts[name] - before[name] for name in counts})


@pytest.mark.parametrize("damage", ["payload", "header"])
def test_corrupted_blocks_are_recomputed_and_replaced(kit, serve, prompts, settings, damage):
    host = serve(settings)
    ask(kit, host, prompts)
    assert ask(kit, host, prompts)["tokens_loaded"] > 0
    part = kit.tier_worker_of(host).part
    if damage == "payload":
        part.slots[:, 100] ^= 1
    else:
        part._headers[:, 40] ^= 1
    hurt = ask(kit, host, prompts)
    assert hurt["loads_failed"] > 0
    assert hurt["tokens_loaded"] == 0
    # Once they are known to be damaged, whole ones take their place.
    ask(kit, host, prompts)
    healed = ask(kit, host, prompts)
    assert healed["loads_failed"] == 0
    assert healed["tokens_loaded"] > 0


def test_corruption_without_checksums_changes_the_tokens(kit, serve, prompts, settings):
    tier = {**settings.options, "verify_checksums": False}
    host = serve(EngineConfig(cache=settings.cache, seed=3, **kit.offloading(tier)))
    ask(kit, host, prompts)
    kit.tier_worker_of(host).part.slots[:, 3::4] ^= 0x80  # the sign of every number
    got = [host.generate([prompt], kit.NEW_TOKENS)[0] for prompt in prompts]
    assert got != kit.references(prompts, 3)


def test_block_reused_during_its_load_is_recomputed(kit, serve, prompts, settings):
    """FAULTS 26: the slot has another block by the time the worker looks."""
    host = serve(settings)
    ask(kit, host, prompts)
    manager = kit.manager_of(host)
    prepare_load, slots_of = manager.prepare_load, itertools.count()

    def prepare_and_lose(keys, context):
        place = prepare_load(keys, context)
        next(slots_of)
        place.block_ids = [(slot + 1) % 64 for slot in place.block_ids]
        return place

    manager.prepare_load = prepare_and_lose
    hurt = ask(kit, host, prompts)
    assert 0 < next(slots_of) == hurt["loads_failed"]
    assert hurt["tokens_loaded"] == 0


def test_block_evicted_between_lookup_and_load_is_recomputed(kit, serve, prompts, settings):
    """FAULTS 26: evicted before it could be pinned."""
    host = serve(settings)
    ask(kit, host, prompts)
    manager = kit.manager_of(host)
    prepare_load = manager.prepare_load

    def lose_and_prepare(keys, context):
        manager.reset_cache()
        return prepare_load(keys, context)

    manager.prepare_load = lose_and_prepare
    hurt = ask(kit, host, prompts)
    assert hurt["tokens_loaded"] == 0
    assert hurt["loads_failed"] > 0
    # Nothing was begun for them, and what they have computed takes their place.
    stats = kit.tier_stats(host)
    assert (stats["loads_total"], stats["load_jobs_failed_total"]) == (0, 0)
    assert stats["stores_total"] > 20


def test_failed_load_does_not_fail_the_stores_of_its_step(kit, serve, prompts, settings):
    """The step's own tokens do not depend on the load, so the step counts, for every connector."""
    tier = {"kv_connector": "OffloadingConnector", "kv_connector_extra_config": settings.options}
    host = serve(
        EngineConfig(
            cache=CacheShape(BLOCK_SIZE, 32),
            seed=3,
            connector="MultiConnector",
            options={"connectors": [tier]},
        )
    )
    ask(kit, host, prompts[:1])
    host.scheduler.pool.reset()
    (child,) = kit.scheduler_side(host).sub_connectors
    manager = child.side._manager
    prepare_load = manager.prepare_load

    def lose_and_prepare(keys, context):
        manager.reset_cache()
        return prepare_load(keys, context)

    manager.prepare_load = lose_and_prepare
    plans = kit.record(host)
    requests = [host.submit(each, kit.NEW_TOKENS) for each in (prompts[1], prompts[0])]
    host.run()
    jobs = [deserialize(plan.connector_metadata).metadata[0] for plan in plans]
    assert any(each.gone and each.stores for each in jobs)
    assert [each.output for each in requests] == kit.references([prompts[1], prompts[0]], 3)
    assert kit.tier_stats(host)["0_OffloadingConnector_store_jobs_failed_total"] == 0


def weak_hash(data):
    """Return a hash of 16 bits, of the tokens of one block: the same for host and tier."""
    return xxhash.xxh3_64_digest(data[-4 * BLOCK_SIZE :])[:2]


def two_blocks_of_one_hash():
    drawn, seen = random.Random(0), {}
    while True:
        block = [drawn.randrange(256) for _ in range(BLOCK_SIZE)]
        key = next(hash_blocks(block, BLOCK_SIZE, b"", weak_hash))
        if key in seen:
            return seen[key], block
        seen[key] = block


def test_hash_collision_is_a_miss(kit, serve, settings):
    """FAULTS 30: neither the cache nor the tier takes a block for another of the same hash."""
    one, other = two_blocks_of_one_hash()
    assert one != other
    host = serve(settings, hash_function=weak_hash)
    kit.name_by(host, weak_hash)
    for naming in (host.scheduler._naming, kit.scheduler_side(host)._naming):
        names = [naming.of(Request("any", each, 1)) for each in (one, other)]
        keys, others = (each.under("A") for each in names)
        hashes = [[key[FENCE_NBYTES:] for key in each] for each in (keys, others)]
        assert hashes[0] == hashes[1] != [], "blocks are named by this hash"
        assert keys != others
    found = ask(kit, host, [[*one, 1, 2, 3], [*other, 1, 2, 3]])
    assert (found["tokens_cached"], found["tokens_loaded"]) == (0, 0)
    # Both are kept, each as itself: first in the cache, then, where that has others, in the tier.
    assert ask(kit, host, [[*one, 4], [*other, 4]])["tokens_cached"] == 2 * BLOCK_SIZE
    ask(kit, host, kit.prompts(BLOCK_SIZE, 3, seed=9))
    found = ask(kit, host, [[*one, 5], [*other, 5]])
    assert found["tokens_loaded"] == 2 * BLOCK_SIZE


def test_two_blocks_of_one_hash_in_one_request_are_kept_apart(kit, serve, settings):
    """FAULTS 30, within one prompt: check hashes tell which of the two is meant."""
    host = serve(settings, hash_function=lambda data: b"\0\0")
    kit.name_by(host, lambda data: b"\0\0")
    prompt = kit.prompts(BLOCK_SIZE, 1)[0]
    ask(kit, host, [prompt])
    # Where the cache has others, they are in the tier.
    ask(kit, host, kit.prompts(BLOCK_SIZE, 3, seed=9))
    num_blocks = (len(prompt) - 1) // BLOCK_SIZE
    assert num_blocks > 1
    assert ask(kit, host, [prompt])["tokens_loaded"] == num_blocks * BLOCK_SIZE


@pytest.fixture
def changing_host(serve, settings):
    """A host, and what changes its weights between two steps, telling nobody but the process."""
    host = serve(settings)
    held = process_weights.hold("A", host.executor.worker.model)

    def change(seed):
        with held.changing(lambda: f"seed {seed}"):
            host.executor.worker.model.draw_weights(seed)

    change(3)
    yield SimpleNamespace(host=host, held=held, change=change)
    held.close()


JOBS = {"load": (1, 0), "store": (0, 1), "prefix": (0, 0)}


@pytest.mark.parametrize("moment", JOBS)
def test_plan_of_earlier_weights_is_refused(kit, prompts, changing_host, moment):
    """FAULTS 31 and 47: the scheduler hears of a change only after its plan has come too late."""
    host, change = changing_host.host, changing_host.change
    prompt = prompts[0]
    if moment != "store":
        # Others, until the cache has forgotten the first.
        ask(kit, host, prompts if moment == "load" else prompts[:1])
    # The first of all learns what the rank computes with.
    host.step()
    request = host.submit([*prompt, 1], kit.NEW_TOKENS)
    plan = host.scheduler.plan()
    jobs = deserialize(plan.connector_metadata)
    assert (len(jobs.loads), len(jobs.stores)) == JOBS[moment]
    if moment == "prefix":
        assert plan.spans[0].start > 0
    change(4)
    (result,) = host.executor.step(plan)
    assert result.tokens is None
    outcomes = deserialize(result.connector.worker_metadata).outcomes[0]
    assert [each.success for each in outcomes] == [False] * sum(JOBS[moment])
    host.scheduler.update(plan, [result])
    assert (request.state, request.began, host.scheduler.counts["restarts"]) == (
        "waiting",
        False,
        1,
    )
    host.run()
    assert request.output == kit.reference(request.prompt_token_ids, 4)
    stats = host.executor.worker.connector.get_stats()
    assert stats["fence_loads_refused_total"] == (moment == "load")
    # It has left nothing, under neither weights: they are computed, or of whom began with them.
    ask(kit, host, [request.all_token_ids, *prompts], seed=4)
    change(3)
    ask(kit, host, [request.all_token_ids, *prompts], seed=3)


def test_plan_that_one_rank_refuses_is_executed_by_none(kit, serve, prompts, settings, tmp_path):
    """FAULTS 31: a rank that computed alone would wait for the other, or keep what is wrong."""
    (tmp_path / "kept").mkdir()
    tier = kit.offloading(kit.shelf_tier(64, folder=str(tmp_path / "kept")))
    host = serve(msgspec.structs.replace(settings, num_ranks=2, **tier), processes=True)
    host.step()
    request = host.submit(prompts[0], kit.NEW_TOKENS)
    plan = host.scheduler.plan()
    assert deserialize(plan.connector_metadata).stores
    changed = plan.versions[1]._replace(epoch=plan.versions[1].epoch + 1)
    refused = msgspec.structs.replace(plan, versions=[plan.versions[0], changed])
    results = host.executor.step(refused)
    assert [result.tokens for result in results] == [None, None]
    host.scheduler.update(plan, results)
    assert not request.began
    host.scheduler.abort(request)
    host.run()
    assert list((tmp_path / "kept").iterdir()) == []
    ask(kit, host, prompts)


def test_no_rank_has_a_weight_version_in_a_refused_step(kit, serve, prompts, settings, tmp_path):
    """Also on a rank that has the weights of the plan: what is saved then was not computed."""
    folder = {"connector": "FolderConnector", "module_path": "folder_connector"}
    options = {"folder": str(tmp_path)}
    host = serve(msgspec.structs.replace(settings, num_ranks=2, options=options, **folder))
    host.step()
    request = host.submit(prompts[0], kit.NEW_TOKENS)
    plan = host.scheduler.plan()
    assert plan.spans
    changed = plan.versions[1]._replace(epoch=plan.versions[1].epoch + 1)
    refused = msgspec.structs.replace(plan, versions=[plan.versions[0], changed])
    versions = []
    for worker in host.executor.workers:
        load = worker.connector.start_load_kv
        worker.connector.start_load_kv = lambda context, load=load: (
            versions.append(process_weights.version()) or load(context)
        )
    assert host.execute(refused) == []
    assert versions == [None, None]
    assert (request.began, host.scheduler.counts["steps_refused"]) == (False, 1)
    host.run()
    assert request.output == kit.reference(prompts[0], 3)
    assert None not in versions[2:]


def test_blocks_computed_after_a_weight_change_are_not_kept(kit, prompts, changing_host):
    """FAULTS 47: neither under the weights it began with, nor under those that it ends with."""
    host, change = changing_host.host, changing_host.change
    prompt = prompts[0]
    request = host.submit(prompt, BLOCK_SIZE)
    while not request.began:
        host.step()
    change(4)
    host.run()
    in_prompt = len(prompt) // BLOCK_SIZE
    assert (request.num_tokens - 1) // BLOCK_SIZE > in_prompt
    stats = kit.tier_stats(host)
    assert (stats["stores_total"], stats["blocks_idle"]) == (in_prompt, in_prompt)
    assert stats["fence_stores_refused_total"] == 1
    found = ask(kit, host, [request.all_token_ids], seed=4)
    assert (found["tokens_loaded"], found["tokens_cached"]) == (0, 0)
    change(3)
    found = ask(kit, host, [request.all_token_ids], seed=3)
    assert found["tokens_loaded"] == in_prompt * BLOCK_SIZE


def test_request_restarted_in_its_load_loads_blocks_of_the_new_weights(kit, prompts, changing_host):
    host, change = changing_host.host, changing_host.change
    change(4)
    ask(kit, host, prompts, seed=4)
    change(3)
    ask(kit, host, prompts, seed=3)
    worker = kit.tier_worker_of(host)
    get_finished, worker.get_finished = worker.get_finished, list
    request = host.submit(prompts[0], kit.NEW_TOKENS)
    for _ in range(3):
        host.step()
    assert request.state == "loading"
    change(4)
    worker.get_finished = get_finished
    before = host.scheduler.counts.copy()
    host.run()
    assert request.output == kit.reference(prompts[0], 4)
    counts = host.scheduler.counts - before
    assert counts["restarts"] == 1
    assert counts["tokens_loaded"] > 0, "what is kept of the new weights"
    assert host.executor.worker.connector.get_stats()["fence_loads_outdated_total"] == 1


def test_nothing_is_computed_while_weights_change(kit, prompts, changing_host):
    host = changing_host.host
    ask(kit, host, prompts[:1])
    request = host.submit(prompts[1], kit.NEW_TOKENS)
    with changing_host.held.changing(lambda: "seed 4"):
        for _ in range(5):
            host.step()
        assert (request.state, request.began) == ("waiting", False)
        host.executor.worker.model.draw_weights(4)
    host.run()
    assert request.output == kit.reference(prompts[1], 4)


@pytest.mark.parametrize("kind", ["load", "store"])
def test_job_that_the_spec_refuses_has_failed(kit, serve, prompts, settings, kind):
    """No result follows, and nobody waits for one."""
    host = serve(settings)
    if kind == "load":
        ask(kit, host, prompts)
    worker = kit.tier_worker_of(host)
    submit, refused = getattr(worker, f"submit_{kind}"), []

    def refuse_once(job_id, *places):
        if not refused:
            refused.append(job_id)
            return False
        return submit(job_id, *places)

    setattr(worker, f"submit_{kind}", refuse_once)
    counts = ask(kit, host, prompts)
    assert (len(refused), kit.tier_stats(host)[f"{kind}_jobs_failed_total"]) == (1, 1)
    assert counts["loads_failed"] == (kind == "load")
    assert host.scheduler.pool.num_free == settings.cache.num_blocks
    ask(kit, host, prompts)
    assert ask(kit, host, prompts)["tokens_loaded"] > 0
