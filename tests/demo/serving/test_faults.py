"""Faults in the tier and around it: a miss, computed afresh, and the same tokens (FAULTS K, O)."""

from __future__ import annotations

import collections
import itertools
import random
from types import SimpleNamespace

import pytest

from wtransfer.blocks import hash_blocks, make_offload_key
from wtransfer.demo.serving.build import HostSettings
from wtransfer.demo.serving.shape import CacheShape
from wtransfer.weights import process_weights

BLOCK_SIZE = 16


@pytest.fixture
def prompts(kit):
    return kit.prompts(BLOCK_SIZE, 4)


@pytest.fixture
def settings(kit, prompts):
    largest = max(kit.blocks_for(prompt, BLOCK_SIZE) for prompt in prompts)
    return HostSettings(
        cache=CacheShape(BLOCK_SIZE, largest + 1), tier=kit.cpu_tier(BLOCK_SIZE, 64), seed=3
    )


def ask(kit, host, prompts, seed=3):
    """Ask one after the other, and check the answers; return what was counted meanwhile."""
    before = host.scheduler.counts.copy()
    for prompt in prompts:
        assert [kit.truth(prompt, seed)] == host.generate([prompt], kit.NEW_TOKENS)
    counts = host.scheduler.counts
    return collections.Counter({name: counts[name] - before[name] for name in counts})


def part_of(host):
    """Return the memory of the arena."""
    return host.workers.worker.offload._inner.part


@pytest.mark.parametrize("damage", ["payload", "header"])
def test_flipped_bytes_in_the_arena_are_computed_afresh_and_replaced(
    kit, serve, prompts, settings, damage
):
    host = serve(settings)
    ask(kit, host, prompts)
    assert ask(kit, host, prompts)["tokens_loaded"] > 0
    part = part_of(host)
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


def test_flipped_bytes_would_be_seen_in_the_tokens_if_nobody_checked(kit, serve, prompts, settings):
    tier = {**settings.tier, "verify_checksums": False}
    host = serve(HostSettings(cache=settings.cache, tier=tier, seed=3))
    ask(kit, host, prompts)
    part_of(host).slots[:, 3::4] ^= 0x80  # the sign of every number
    got = [host.generate([prompt], kit.NEW_TOKENS)[0] for prompt in prompts]
    assert got != kit.truths(prompts, 3)


def test_a_block_that_is_reused_while_it_is_loaded_is_computed_afresh(
    kit, serve, prompts, settings
):
    """FAULTS 26: the slot has another block by the time the worker looks."""
    host = serve(settings)
    ask(kit, host, prompts)
    manager = host.scheduler._offload._manager._inner
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


def test_a_block_that_has_gone_between_look_up_and_load_is_computed_afresh(
    kit, serve, prompts, settings
):
    """FAULTS 26: evicted before it could be pinned."""
    host = serve(settings)
    ask(kit, host, prompts)
    manager = host.scheduler._offload._manager._inner
    prepare_load = manager.prepare_load

    def lose_and_prepare(keys, context):
        manager.reset_cache()
        return prepare_load(keys, context)

    manager.prepare_load = lose_and_prepare
    hurt = ask(kit, host, prompts)
    assert (hurt["tokens_loaded"], hurt["loads_failed"]) == (0, 0)
    assert host.scheduler._offload.get_stats()["stores_total"] > 20


def weak_hash(data):
    """Return a hash of 16 bits."""
    import xxhash

    return xxhash.xxh3_64_digest(data)[:2]


def two_blocks_of_one_hash():
    drawn, seen = random.Random(0), {}
    while True:
        block = [drawn.randrange(256) for _ in range(BLOCK_SIZE)]
        key = next(hash_blocks(block, BLOCK_SIZE, ROOT, weak_hash))
        if key in seen:
            return seen[key], block
        seen[key] = block


ROOT = HostSettings().model_name.encode()


def test_a_forced_collision_of_hashes_is_a_miss(kit, serve, settings):
    """FAULTS 30: neither the cache nor the tier takes a block for another of the same hash."""
    one, other = two_blocks_of_one_hash()
    assert one != other
    host = serve(settings, hash_function=weak_hash)
    keys = {
        make_offload_key(next(hash_blocks(block, BLOCK_SIZE, ROOT, weak_hash)))
        for block in (one, other)
    }
    assert keys == {host.scheduler._names.of(one)[0][0]}, "the host names blocks by this hash"
    found = ask(kit, host, [[*one, 1, 2, 3], [*other, 1, 2, 3]])
    assert (found["tokens_cached"], found["tokens_loaded"]) == (0, 0)
    # Both are kept, each as itself: first in the cache, then, where that has others, in the tier.
    assert ask(kit, host, [[*one, 4], [*other, 4]])["tokens_cached"] == 2 * BLOCK_SIZE
    ask(kit, host, kit.prompts(BLOCK_SIZE, 3, seed=9))
    found = ask(kit, host, [[*one, 5], [*other, 5]])
    assert found["tokens_loaded"] == 2 * BLOCK_SIZE


def test_two_blocks_of_one_hash_in_one_request_are_computed(kit, serve, settings):
    """FAULTS 30, within one prompt: nobody can say which of the two is meant."""
    host = serve(settings, hash_function=lambda data: b"\0\0")
    prompt = kit.prompts(BLOCK_SIZE, 1)[0]
    for _ in range(2):
        assert ask(kit, host, [prompt])["tokens_loaded"] == 0
    assert host.scheduler._offload.get_stats()["stores_total"] == 0


@pytest.fixture
def changing_host(serve, settings):
    """A host, and what changes its weights between two steps, telling nobody but the process."""
    host = serve(settings)
    held = process_weights.hold("A", host.workers.worker.model)

    def change(seed):
        with held.changing(lambda: f"seed {seed}"):
            host.workers.worker.model.draw_weights(seed)

    change(3)
    yield SimpleNamespace(host=host, held=held, change=change)
    held.close()


@pytest.mark.parametrize("moment", ["load", "store", "prefix"])
def test_a_plan_for_weights_that_have_gone_is_refused_whole(kit, prompts, changing_host, moment):
    """FAULTS 31 and 47: the scheduler hears of a change only after its plan has come too late."""
    host, change = changing_host.host, changing_host.change
    prompt = prompts[0]
    if moment != "store":
        ask(kit, host, prompts[:2] if moment == "load" else prompts[:1])
    request = host.submit([*prompt, 1], kit.NEW_TOKENS)
    while moment == "store" and not host.scheduler._jobs:
        host.step()
    plan = host.scheduler.plan()
    kinds = {"load": ["load"], "store": ["store"], "prefix": []}[moment]
    assert [job.kind for job in plan.jobs] == kinds
    if moment == "prefix":
        assert plan.spans[0].start > 0
    change(4)
    (result,) = host.workers.step(plan)
    assert (result.executed, result.tokens) == (False, {})
    assert [each.success for each in result.finished] == [False] * len(kinds)
    host.scheduler.update(plan, [result])
    host.run()
    if moment != "store":
        assert request.output == kit.truth(request.tokens[: request.num_prompt], 4)
    stats = host.workers.worker.get_stats()
    if moment != "prefix":
        assert stats[f"fence_{moment}s_refused_total"] == 1
    # It has left nothing, under neither weights: they are computed, or of whom began with them.
    ask(kit, host, [request.tokens, *prompts], seed=4)
    change(3)
    ask(kit, host, [request.tokens, *prompts], seed=3)


def test_a_commit_during_a_load_makes_the_request_begin_anew(kit, prompts, changing_host):
    host, change = changing_host.host, changing_host.change
    ask(kit, host, prompts)
    worker = host.workers.worker
    get_finished, late = worker.offload._inner.get_finished, []
    worker.offload._inner.get_finished = lambda: late
    request = host.submit(prompts[0], kit.NEW_TOKENS)
    for _ in range(3):
        host.step()
    assert request.state == "loading"
    change(4)
    worker.offload._inner.get_finished = get_finished
    host.run()
    assert worker.get_stats()["fence_loads_outdated_total"] == 1
    assert request.output == kit.truth(prompts[0], 4)
    assert host.scheduler.counts["restarts"] == 1


def test_nothing_is_computed_while_the_weights_have_no_name(kit, prompts, changing_host):
    host = changing_host.host
    ask(kit, host, prompts[:1])
    request = host.submit(prompts[1], kit.NEW_TOKENS)
    with changing_host.held.changing(lambda: "seed 4"):
        for _ in range(5):
            host.step()
        assert (request.state, request.began) == ("waiting", False)
        host.workers.worker.model.draw_weights(4)
    host.run()
    assert request.output == kit.truth(prompts[1], 4)


@pytest.mark.parametrize("kind", ["load", "store"])
def test_a_job_that_a_spec_does_not_begin_has_failed(kit, serve, prompts, settings, kind):
    """No result follows, and nobody waits for one."""
    host = serve(settings)
    if kind == "load":
        ask(kit, host, prompts)
    worker = host.workers.worker.offload._inner
    submit, refused = getattr(worker, f"submit_{kind}"), []

    def refuse_once(job_id, *places):
        if not refused:
            refused.append(job_id)
            return False
        return submit(job_id, *places)

    setattr(worker, f"submit_{kind}", refuse_once)
    counts = ask(kit, host, prompts)
    assert (len(refused), counts[f"{kind}s_failed"]) == (1, 1)
    assert host.scheduler._pool.num_free == settings.cache.num_blocks
    ask(kit, host, prompts)
    assert ask(kit, host, prompts)["tokens_loaded"] > 0
