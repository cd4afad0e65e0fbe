"""Which tokens are computed when, and on which blocks: limits, chunks, preemption."""

from __future__ import annotations

import itertools

import pytest

from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, Limits
from wtransfer.testing.mini_engine.serialize import deserialize
from wtransfer.weight_version import process_weights

BLOCK_SIZE = 16


@pytest.fixture
def make(kit, serve):
    def make(num_blocks, tier=None, **limits):
        return serve(
            EngineConfig(
                cache=CacheShape(BLOCK_SIZE, num_blocks),
                limits=Limits(**limits),
                seed=3,
                **kit.offloading(tier),
            )
        )

    return make


@pytest.fixture
def prompts(kit):
    return kit.prompts(BLOCK_SIZE, 4)


@pytest.fixture
def apart(prompts):
    """Prompts that have nothing in common."""
    return [[number, *prompt] for number, prompt in enumerate(prompts)]


# -- prompts in pieces


@pytest.mark.parametrize("budget", [1, 7, 16, 33])
def test_chunked_prefill_gives_the_same_bits(kit, make, prompts, budget):
    hosts = [make(16), make(16, max_num_batched_tokens=budget)]
    requests = [host.submit(prompts[0], kit.NEW_TOKENS) for host in hosts]
    plans = kit.record(hosts[1])
    for host in hosts:
        host.run()
    whole, pieces = requests
    assert whole.output == pieces.output == kit.reference(prompts[0], 3)
    assert kit.contents(hosts[0], whole) == kit.contents(hosts[1], pieces)
    lengths = [len(span.tokens) for plan in plans for span in plan.spans]
    rest = len(prompts[0]) % budget or budget
    assert lengths == [budget] * ((len(prompts[0]) - 1) // budget) + [rest, 1, 1, 1]


def test_steps_keep_to_token_budget_and_max_num_seqs(kit, make):
    prompts = kit.prompts(BLOCK_SIZE, 7)
    host = make(64, kit.shelf_tier(64), max_num_seqs=3, max_num_batched_tokens=40)
    plans = kit.record(host)
    for _ in range(2):
        assert host.generate(prompts, kit.NEW_TOKENS) == kit.references(prompts, 3)
    assert max(sum(len(span.tokens) for span in plan.spans) for plan in plans) == 40
    assert max(len(plan.spans) for plan in plans) == 3
    for plan in plans:
        assert len({span.request_id for span in plan.spans}) == len(plan.spans)


def test_chunks_are_stored_as_blocks_fill(kit, make, prompts):
    host = make(16, kit.cpu_tier(BLOCK_SIZE, 32), max_num_batched_tokens=24)
    plans = kit.record(host)
    request = host.submit(prompts[0], 1)
    host.run()
    stores = [deserialize(plan.connector_metadata).stores for plan in plans]
    stored = [job.blocks.block_ids for jobs in stores for job in jobs]
    # 24, 48, 72 tokens, and the rest.
    assert [len(each) for each in stored] == [1, 2, 1]
    assert list(itertools.chain(*stored)) == request.block_ids[:4]
    indices = [job.blocks.block_indices for jobs in stores for job in jobs]
    assert indices == [[0], [1], [3]]


# -- too few blocks


def test_last_request_is_preempted_and_all_finish(kit, make):
    prompts = kit.prompts(BLOCK_SIZE, 5)
    largest = max(kit.blocks_for(prompt, BLOCK_SIZE, 24) for prompt in prompts)
    host = make(largest + 2)
    requests = [host.submit(prompt, 24) for prompt in prompts]
    ended = []
    while host.scheduler.is_busy:
        ended += host.step()
        kit.check_pool(host.scheduler.pool)
    assert host.scheduler.counts["preemptions"] > 0
    assert [each.output for each in requests] == kit.references(prompts, 3, 24)
    assert ended[0] is requests[0], "the first never gives way"
    assert host.scheduler.pool.num_free == largest + 2
    assert set(host.scheduler.pool._num_pins) == {0}


def test_preempted_request_is_loaded_from_the_tier(kit, make, apart):
    """Nothing is asked twice, so whatever is loaded is of somebody who has lost it."""
    largest = max(kit.blocks_for(prompt, BLOCK_SIZE, 40) for prompt in apart)
    host = make(largest + 4, kit.cpu_tier(BLOCK_SIZE, 128))
    plans = kit.record(host)
    assert host.generate(apart, 40) == kit.references(apart, 3, 40)
    counts = host.scheduler.counts
    assert counts["preemptions"] > 0
    assert counts["tokens_loaded"] > 0
    said = [deserialize(plan.connector_metadata) for plan in plans]
    lost = {name for each in said for name in each.preempted}
    assert {job.request_id for each in said for job in each.loads} <= lost
    assert kit.tier_stats(host)["load_jobs_failed_total"] == 0
    assert host.scheduler.pool.num_free == largest + 4


def test_preemption_after_a_weight_change_restarts_with_the_new_weights(kit, make, prompts):
    """All that it builds on afterwards is of the new weights, so it is kept under them."""
    host = make(12, kit.cpu_tier(BLOCK_SIZE, 64))
    worker = host.executor.worker
    held = process_weights.hold("seed 3", worker.model)
    try:
        _, request = [host.submit(prompt, 40) for prompt in prompts[:2]]
        while not request.began:
            host.step()
        with held.changing(lambda: "seed 4"):
            worker.model.draw_weights(4)
        host.run()
        assert host.scheduler.counts["preemptions"] > 0
        stored = kit.tier_stats(host)["stores_total"]
        before = host.scheduler.counts.copy()
        text = request.all_token_ids
        assert host.generate([text], kit.NEW_TOKENS) == [kit.reference(text, 4)]
        found = host.scheduler.counts - before
        assert found["tokens_cached"] + found["tokens_loaded"] > len(prompts[1])
        host.scheduler.pool.reset()
        assert host.generate([text], kit.NEW_TOKENS) == [kit.reference(text, 4)]
        assert host.scheduler.counts["tokens_loaded"] > len(prompts[1])
        assert stored > 0
    finally:
        held.close()


def test_loaded_request_is_preempted_before_running_ones(kit, make, apart):
    """One runs, another's blocks have come and are not used yet: no two wait for each other."""
    blocks = kit.blocks_for(apart[0], BLOCK_SIZE, 60)
    host = make(blocks + 2, kit.cpu_tier(BLOCK_SIZE, 64), max_num_seqs=1)
    host.generate(apart[1:2], 1)
    host.scheduler.pool.reset()
    # The second is loaded beside the first, and gets no seat.
    second, first = host.submit(apart[1], 60), host.submit(apart[0], 60)
    host.step()
    assert second.state in ("loading", "loaded")
    assert first.state == "running"
    host.run()
    assert [first.output, second.output] == kit.references(apart[:2], 3, 60)
    assert host.scheduler.counts["preemptions"] == 1
    assert second.state == first.state == "finished"


def test_first_request_waits_for_blocks_that_are_being_loaded(kit, make, apart):
    """It does not give up its own: whoever took them would have to give them up again."""
    host = make(kit.blocks_for(apart[0], BLOCK_SIZE, 60) + 2, kit.cpu_tier(BLOCK_SIZE, 64))
    host.generate(apart[1:2], 1)
    host.scheduler.pool.reset()
    worker = kit.tier_worker_of(host)
    get_finished, worker.get_finished = worker.get_finished, list
    second, first = host.submit(apart[1], 60), host.submit(apart[0], 60)
    for _ in range(100):
        host.step()
    assert (second.state, first.state) == ("loading", "running")
    assert host.scheduler.pool.num_free == 0
    assert host.scheduler.counts["preemptions"] == 0
    worker.get_finished = get_finished
    host.run()
    assert [first.output, second.output] == kit.references(apart[:2], 3, 60)
    assert host.scheduler.counts["preemptions"] == 1


def test_two_loaded_requests_do_not_deadlock(kit, make, prompts):
    """Both are loaded, they have all blocks among them, and neither can compute its last tokens."""
    one, other = [1, *prompts[0][:79]], [2, *prompts[1][:79]]
    host = make(8, kit.cpu_tier(BLOCK_SIZE, 64))
    texts = [one[:64] + [7] * 20, other[:64] + [7] * 20]
    for text in (one, other):
        host.generate([text[:64]], 2)
    host.scheduler.pool.reset()
    requests = [host.submit(text, kit.NEW_TOKENS) for text in texts]
    host.run()
    assert [each.output for each in requests] == kit.references(texts, 3)
    assert host.scheduler.counts["preemptions"] == 1
    kit.check_pool(host.scheduler.pool)


def test_loaded_request_is_not_starved_by_later_ones(kit, make, apart):
    """Small ones would take each block that comes free, and a large one needs two."""
    host = make(8, kit.cpu_tier(BLOCK_SIZE, 64))
    large = [1, *apart[0][:63]]
    host.generate([[*large, 1]], 1)
    host.scheduler.pool.reset()
    numbers = itertools.count()

    def small():
        return host.submit([next(numbers) % 256, 7], 12)

    # One ends in this step, another in that: there is always a block free, and never two.
    live = []
    for _ in range(4):
        live.append(small())
        for _ in range(3):
            host.step()
    request = host.submit([*large, *[9] * 30], 2)
    for _ in range(200):
        live = [each for each in live if each.state != "finished"]
        live += [small() for _ in range(6 - len(live))]
        host.step()
        if request.state == "finished":
            break
    assert request.state == "finished"
    assert request.output == kit.reference(request.prompt_token_ids, 3, 2)
    host.run()


# -- beginnings that are known


def test_cached_prefix_is_not_computed(kit, make, prompts):
    host = make(32)
    host.generate(prompts[:1], kit.NEW_TOKENS)
    text = [*prompts[0][: 2 * BLOCK_SIZE + 5], 9, 9, 9]
    plans = kit.record(host)
    assert host.generate([text], kit.NEW_TOKENS) == [kit.reference(text, 3)]
    assert host.scheduler.counts["tokens_cached"] == 2 * BLOCK_SIZE
    assert plans[0].spans[0].start == 2 * BLOCK_SIZE


def test_cached_prefix_is_continued_from_the_tier(kit, make, prompts):
    host = make(7, kit.cpu_tier(BLOCK_SIZE, 64))
    text = prompts[0][: 5 * BLOCK_SIZE + 3]
    text += [5] * (5 * BLOCK_SIZE + 3 - len(text))
    host.generate([text], 1)
    # Takes the last blocks first; the first ones stay.
    host.generate([[8] * (3 * BLOCK_SIZE)], 1)
    before, plans = host.scheduler.counts.copy(), kit.record(host)
    request = host.submit([*text, 6], kit.NEW_TOKENS)
    host.run()
    assert request.output == kit.reference([*text, 6], 3)
    found = host.scheduler.counts - before
    (job,) = [job for plan in plans for job in deserialize(plan.connector_metadata).loads]
    (first,) = job.blocks.block_indices
    assert 0 < first < 5
    assert (found["tokens_cached"], found["tokens_loaded"]) == (
        first * BLOCK_SIZE,
        (5 - first) * BLOCK_SIZE,
    )
    assert found["tokens_computed"] == 4 + kit.NEW_TOKENS - 1
    # And it is the same as if nothing had been known.
    fresh = make(16)
    same = fresh.submit([*text, 6], kit.NEW_TOKENS)
    fresh.run()
    assert kit.contents(host, request) == kit.contents(fresh, same)


# -- the end before its time


STATES = ["waiting", "loading", "loaded", "prefill", "decode", "preempted", "finished"]


def bring(host, kit, state, prompts):
    """Return a request that is in a state, and others that are not done."""
    if state in ("loading", "loaded"):
        host.generate(prompts[:2], 1)
        host.scheduler.pool.reset()
        others = [host.submit(prompts[1], 30)]
        request = host.submit(prompts[0], 30)
    elif state == "waiting":
        others = [host.submit(prompt, 30) for prompt in prompts[1:]]
        host.step()
        return host.submit(prompts[0], 30), others
    else:
        others = [host.submit(prompts[1], 60)] if state == "preempted" else []
        request = host.submit(prompts[0], 2 if state == "finished" else 60)

    def reached():
        where = {
            "prefill": 0 < request.num_computed_tokens < request.num_prompt_tokens,
            "decode": bool(request.output) and request.state == "running",
            "preempted": request.began and request.state == "waiting",
        }
        return where.get(state, request.state == state)

    while not reached():
        host.step()
    return request, others


@pytest.mark.parametrize("state", STATES)
def test_request_can_be_aborted_in_every_state(kit, make, prompts, state):
    num_blocks = 10 if state == "preempted" else 24
    host = make(
        num_blocks,
        kit.cpu_tier(BLOCK_SIZE, 128),
        max_num_batched_tokens=32,
        max_num_seqs=1 if state == "loaded" else 8,
    )
    request, others = bring(host, kit, state, prompts)
    ended = state == "finished"
    for _ in range(2):
        host.scheduler.abort(request)
        assert request.state == ("finished" if ended else "aborted")
        kit.check_pool(host.scheduler.pool)
    before = list(request.output)
    host.run()
    assert request.output == before, "nothing more is computed for it"
    assert [each.output for each in others] == [
        kit.reference(each.prompt_token_ids, 3, each.max_new_tokens) for each in others
    ]
    assert host.scheduler.pool.num_free == num_blocks
    side = kit.scheduler_side(host)
    assert (side._requests, side._in_flight) == ({}, {})
    assert side._progress._known == side._progress._tracked == {}
    stats = kit.tier_stats(host)
    assert stats["blocks_loading"] == stats["blocks_storing"] == 0
    # And the blocks that it had are as good as any.
    assert host.generate(prompts, kit.NEW_TOKENS) == kit.references(prompts, 3)


def test_blocks_being_loaded_stay_pinned_after_an_abort(kit, make, prompts):
    """FAULTS 26: the request is gone, the copy into its blocks is not."""
    host = make(8, kit.shelf_tier(64))
    host.generate(prompts[:1], 1)
    host.scheduler.pool.reset()
    worker = kit.tier_worker_of(host)
    get_finished, worker.get_finished = worker.get_finished, list
    request = host.submit(prompts[0], 1)
    host.step()
    assert request.state == "loading"
    held = len(request.block_ids)
    host.scheduler.abort(request)
    for _ in range(3):
        host.step()
    assert host.scheduler.pool.num_free == 8 - held
    assert host.scheduler.is_busy
    worker.get_finished = get_finished
    host.run()
    assert host.scheduler.pool.num_free == 8


# -- what could not be loaded


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_failed_load_follows_the_policy_and_spares_other_requests(kit, serve, apart, policy):
    host = serve(
        EngineConfig(
            cache=CacheShape(BLOCK_SIZE, 24),
            seed=3,
            on_load_failure=policy,
            **kit.offloading(kit.cpu_tier(BLOCK_SIZE, 64)),
        )
    )
    host.generate(apart[:1], 1)
    host.scheduler.pool.reset()
    kit.tier_worker_of(host).part.slots[:, 100] ^= 1
    request, other = host.submit(apart[0], 4), host.submit(apart[1], 4)
    host.run()
    assert other.output == kit.reference(apart[1], 3)
    assert host.scheduler.counts["loads_failed"] == 1
    if policy == "recompute":
        assert (request.state, request.output) == ("finished", kit.reference(apart[0], 3))
    else:
        assert (request.state, request.output) == ("failed", [])
        assert request.error == "4 KV blocks could not be loaded"
    assert host.scheduler.pool.num_free == 24
    # Who asks next has no part in it.
    assert host.generate(apart[:1], kit.NEW_TOKENS) == kit.references(apart[:1], 3)
    assert host.scheduler.counts["loads_failed"] == 1
