"""The engine around the model: what waits, what is refused, and a rank that is gone."""

from __future__ import annotations

import os
import signal

import pytest

from wtransfer.errors import PeerLostError, StallError
from wtransfer.specs.interface import LookupResult, OffloadPolicy, RequestOffloadingContext
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.engine import RANK_MAIN, ProcessExecutor, make_engine

BLOCK_SIZE = 16


@pytest.fixture
def prompt(kit):
    return kit.prompts(BLOCK_SIZE, 1)[0]


@pytest.fixture
def host(kit, serve):
    tier = kit.offloading(kit.shelf_tier(64))
    return serve(EngineConfig(cache=CacheShape(BLOCK_SIZE, 12), seed=3, **tier))


def test_lookup_that_is_retried_delays_the_request_by_a_step(kit, host, prompt):
    host.generate([prompt], kit.NEW_TOKENS)
    host.generate(kit.prompts(BLOCK_SIZE, 4, seed=5), kit.NEW_TOKENS)
    manager, asked = kit.manager_of(host), []
    lookup = manager.lookup

    def slow(key, context):
        asked.append(key)
        return LookupResult.RETRY if asked.count(key) < 4 else lookup(key, context)

    manager.lookup = slow
    request = host.submit(prompt, kit.NEW_TOKENS)
    for times in range(1, 4):
        host.step()
        # All keys at once: a manager that has to ask does so once for a request.
        assert request.state == "waiting"
        assert {asked.count(key) for key in asked} == {times}
    before = host.scheduler.counts["tokens_loaded"]
    host.run()
    assert request.output == kit.reference(prompt, 3)
    assert host.scheduler.counts["tokens_loaded"] > before


def test_pending_block_is_computed(kit, host, prompt):
    manager = kit.manager_of(host)
    manager.lookup = lambda key, context: LookupResult.HIT_PENDING
    assert host.generate([prompt], kit.NEW_TOKENS) == [kit.reference(prompt, 3)]
    assert host.scheduler.counts["tokens_loaded"] == 0


def test_blocks_stay_pinned_while_they_are_stored_after_the_request_ended(kit, host, prompt):
    worker = kit.tier_worker_of(host)
    get_finished, pool = worker.get_finished, host.scheduler.pool
    worker.get_finished = list
    request = host.submit(prompt, 1)
    while request.state != "finished":
        host.step()
    assert pool.num_free == 12 - kit.blocks_for(prompt, BLOCK_SIZE, 0)
    worker.get_finished = get_finished
    host.run()
    assert pool.num_free == 12


def test_requests_beyond_the_cache_take_turns(kit, host):
    prompts = kit.prompts(BLOCK_SIZE, 8)
    assert host.generate(prompts, kit.NEW_TOKENS) == kit.references(prompts, 3)
    assert host.scheduler.pool.num_free == 12
    assert {0} == set(host.scheduler.pool._num_pins)


def test_run_without_progress_raises_at_its_deadline(kit, host, prompt):
    kit.manager_of(host).lookup = lambda key, context: LookupResult.RETRY
    host.submit(prompt, 1)
    with pytest.raises(StallError, match="the requests of this engine"):
        host.run(0.1)
    del kit.manager_of(host).lookup
    host.run()


def test_spec_is_told_once_of_begin_and_end_of_each_request(kit, host):
    manager, heard = kit.manager_of(host), []
    manager.on_new_request = lambda context: (
        heard.append(("new", context.req_id)) or RequestOffloadingContext(OffloadPolicy.CHUNK_LEVEL)
    )
    manager.on_request_finished = lambda context: heard.append(("end", context.req_id))
    host.generate(kit.prompts(BLOCK_SIZE, 6), kit.NEW_TOKENS)
    names = {f"request-{number}" for number in range(6)}
    assert sorted(heard) == sorted((what, name) for what in ("new", "end") for name in names)
    for name in names:
        assert heard.index(("new", name)) < heard.index(("end", name))


@pytest.mark.parametrize("policy", OffloadPolicy)
def test_cached_blocks_are_offered_by_the_offload_policy(kit, host, prompt, policy):
    manager, offered = kit.manager_of(host), []
    manager.on_new_request = lambda context: RequestOffloadingContext(policy)
    host.generate([prompt], kit.NEW_TOKENS)
    prepare_store = manager.prepare_store
    manager.prepare_store = lambda keys, context: (
        offered.append(len(keys)) or prepare_store(keys, context)
    )
    assert host.generate([prompt], kit.NEW_TOKENS) == [kit.reference(prompt, 3)]
    assert host.scheduler.counts["tokens_cached"] > 0
    in_all = len(prompt) // BLOCK_SIZE
    assert sum(offered) == {OffloadPolicy.REQUEST_LEVEL: in_all}.get(policy, 0)


def test_close_shuts_down_both_sides_of_the_spec(kit, host):
    manager, worker = kit.manager_of(host), kit.tier_worker_of(host)
    host.close()
    host.close()
    assert manager.shut_down
    assert worker._thread._shutdown


def test_killed_rank_is_named(kit, serve, zygote, prompt, tmp_path):

    children, log = [], tmp_path / "rank.log"

    def spawn(address):
        children.append(zygote.spawn(RANK_MAIN, address, stdout=log, stderr=log))

    settings = EngineConfig(cache=CacheShape(BLOCK_SIZE, 12), num_ranks=2)
    host = make_engine(settings, ProcessExecutor(settings, spawn))
    with host:
        assert host.generate([prompt], 2) == [kit.reference(prompt, 0, 2)]
        os.kill(children[1].pid, signal.SIGKILL)
        host.submit(prompt, 2)
        with pytest.raises(PeerLostError, match=r"rank [01]"):
            host.run()
    assert children[1].wait(10.0) == -signal.SIGKILL
    assert children[0].wait(10.0) in (0, 1), "the other one ends by itself"
