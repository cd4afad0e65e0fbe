"""Which tokens are computed when, and on which blocks: limits, chunks, preemption, refusals."""

from __future__ import annotations

import contextlib
import itertools

import msgspec
import pytest

from wtransfer.errors import StallError
from wtransfer.specs.interface import LookupResult
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, Limits
from wtransfer.testing.mini_engine.model import LocalWeights
from wtransfer.testing.mini_engine.reference import some_prompts
from wtransfer.weight_version import process_weights

BLOCK_SIZE = 16
ONE, OTHER = ([number, *prompt] for number, prompt in enumerate(some_prompts(2)))
"""Two prompts that have nothing in common."""
LARGE = [2, *some_prompts(1, unit=32)[0][:63]]
"""A prompt of four blocks."""


@pytest.fixture
def make(kit, serve):
    def make(num_blocks, num_kept=0, num_ranks=1, **limits):
        config = EngineConfig(
            cache=CacheShape(BLOCK_SIZE, num_blocks),
            limits=Limits(**limits),
            seed=3,
            num_ranks=num_ranks,
            **(kit.offloading(BLOCK_SIZE, num_kept) if num_kept else {}),
        )
        return serve(config)

    return make


def num_blocks_for(prompt, count):
    return -(-(len(prompt) + count) // BLOCK_SIZE)


def keep(host, *prompts):
    """Have the tier keep prompts that the host's own cache does not have."""
    for prompt in prompts:
        host.generate([prompt], 1)
    host.scheduler.pool.reset()


@pytest.mark.parametrize("budget", [1, 7, 16, 33])
def test_chunked_prefill_gives_the_same_bits(kit, make, budget):
    hosts = [make(16), make(16, max_num_batched_tokens=budget)]
    requests = [host.submit(ONE, kit.NEW_TOKENS) for host in hosts]
    plans = kit.record(hosts[1])
    for host in hosts:
        host.run()
    whole, pieces = requests
    assert whole.output == pieces.output == kit.reference(ONE, 3)
    assert kit.contents(hosts[0], whole) == kit.contents(hosts[1], pieces)
    lengths = [len(span.tokens) for plan in plans for span in plan.spans]
    rest = len(ONE) % budget or budget
    assert lengths == [budget] * ((len(ONE) - 1) // budget) + [rest, 1, 1, 1]


def test_steps_keep_to_token_budget_and_max_num_seqs(kit, make):
    prompts = some_prompts(7)
    host = make(64, 64, max_num_seqs=3, max_num_batched_tokens=40)
    plans = kit.record(host)
    for _ in range(2):
        assert host.generate(prompts, kit.NEW_TOKENS) == kit.references(prompts, 3)
    assert max(sum(len(span.tokens) for span in plan.spans) for plan in plans) == 40
    assert max(len(plan.spans) for plan in plans) == 3
    for plan in plans:
        assert len({span.request_id for span in plan.spans}) == len(plan.spans)


# -- too few blocks


def test_last_request_is_preempted_and_all_finish(kit, make):
    prompts = some_prompts(5)
    num_blocks = max(num_blocks_for(prompt, 24) for prompt in prompts) + 2
    host = make(num_blocks)
    requests = [host.submit(prompt, 24) for prompt in prompts]
    ended = []
    while host.scheduler.is_busy:
        ended += host.step()
        kit.check_pool(host.scheduler.pool)
    assert host.counts["preemptions"] > 0
    assert [each.output for each in requests] == kit.references(prompts, 3, 24)
    assert ended[0] is requests[0], "the first never gives way"
    assert host.scheduler.pool.num_free == num_blocks


def test_loaded_request_is_preempted_before_running_ones(kit, make):
    """One runs, another's blocks have come and are not used yet: no two wait for each other."""
    host = make(num_blocks_for(ONE, 60) + 2, 64, max_num_seqs=1)
    keep(host, OTHER)
    # The second is loaded beside the first, and gets no seat.
    second, first = host.submit(OTHER, 60), host.submit(ONE, 60)
    host.step()
    assert second.state in ("loading", "loaded")
    assert first.state == "running"
    host.run()
    assert [first.output, second.output] == kit.references([ONE, OTHER], 3, 60)
    assert host.counts["preemptions"] == 1


def test_first_request_waits_for_blocks_that_are_being_loaded(kit, make):
    """It keeps its own: a request that took them would have to give them up again."""
    host = make(num_blocks_for(ONE, 60) + 2, 64)
    keep(host, OTHER)
    worker = kit.tier_worker_of(host)
    get_finished, worker.get_finished = worker.get_finished, list
    second, first = host.submit(OTHER, 60), host.submit(ONE, 60)
    for _ in range(100):
        host.step()
    assert (second.state, first.state) == ("loading", "running")
    assert host.scheduler.pool.num_free == 0
    assert host.counts["preemptions"] == 0
    worker.get_finished = get_finished
    host.run()
    assert [first.output, second.output] == kit.references([ONE, OTHER], 3, 60)
    assert host.counts["preemptions"] == 1


def test_two_loaded_requests_do_not_deadlock(kit, make):
    """Both are loaded, they have all blocks among them, and neither can compute its last tokens."""
    host = make(8, 64)
    texts = [LARGE, [1, *LARGE[:63]]]
    keep(host, *texts)
    texts = [[*text, *[7] * 20] for text in texts]
    requests = [host.submit(text, kit.NEW_TOKENS) for text in texts]
    host.run()
    assert [each.output for each in requests] == kit.references(texts, 3)
    assert host.counts["preemptions"] == 1
    kit.check_pool(host.scheduler.pool)


def test_loaded_request_is_not_starved_by_later_ones(kit, make):
    """Small ones would take each block that comes free, and a large one needs two."""
    host = make(8, 64)
    keep(host, [*LARGE, 1])
    numbers = itertools.count()

    def small():
        return host.submit([next(numbers) % 256, 7], 12)

    # One ends in this step, another in that: there is always a block free, and never two.
    live = []
    for _ in range(4):
        live.append(small())
        for _ in range(3):
            host.step()
    request = host.submit([*LARGE, *[9] * 30], 2)
    for _ in range(200):
        live = [each for each in live if each.state != "finished"]
        live += [small() for _ in range(6 - len(live))]
        host.step()
        if request.state == "finished":
            break
    assert request.state == "finished"
    assert request.output == kit.reference(request.prompt_token_ids, 3, 2)
    host.run()


def test_tail_of_a_cached_prompt_is_evicted_first(make):
    """Its head is of use without it."""
    host = make(6)
    for prompt in (LARGE, [8] * (2 * BLOCK_SIZE + 1), LARGE):
        host.generate([prompt], 1)
    # The second prompt took the two blocks that were unused, and one of the four of the first.
    assert host.counts["tokens_cached"] == 3 * BLOCK_SIZE


# -- what is waited for


def test_lookup_that_is_retried_delays_the_request_by_a_step(kit, make):
    host = make(12, 64)
    keep(host, ONE)
    manager, asked = kit.manager_of(host), []
    lookup = manager.lookup

    def slow(key, context):
        asked.append(key)
        return LookupResult.RETRY if asked.count(key) < 4 else lookup(key, context)

    manager.lookup = slow
    request = host.submit(ONE, kit.NEW_TOKENS)
    for times in range(1, 4):
        host.step()
        # All keys at once: a manager that has to ask does so once for a request.
        assert request.state == "waiting"
        assert {asked.count(key) for key in asked} == {times}
    host.run()
    assert request.output == kit.reference(ONE, 3)
    assert host.counts["tokens_loaded"] > 0


def test_run_without_progress_raises_at_its_deadline(kit, make):
    host = make(12, 64)
    kit.manager_of(host).lookup = lambda key, context: LookupResult.RETRY
    host.submit(ONE, 1)
    with pytest.raises(StallError, match="the requests of this engine"):
        host.run(0.1)


# -- steps that are refused


def test_nothing_is_computed_while_weights_change(kit, make):
    host = make(12)
    model = host.executor.worker.model
    with contextlib.closing(process_weights.hold("seed 3", model)) as held:
        host.generate([ONE], kit.NEW_TOKENS)
        request = host.submit(OTHER, kit.NEW_TOKENS)
        with held.changing(lambda: "seed 4"):
            for _ in range(5):
                host.step()
            assert (request.state, request.began) == ("waiting", False)
            model.draw_weights(4)
        host.run()
        assert request.output == kit.reference(OTHER, 4)


def test_preemption_after_a_weight_change_restarts_with_the_new_weights(kit, make):
    """All that it builds on afterwards is of the new weights, so it is kept under them."""
    host = make(12, 64)
    with contextlib.closing(LocalWeights(3, host.executor.worker.model)) as weights:
        _, request = [host.submit(prompt, 40) for prompt in (ONE, OTHER)]
        while not request.began:
            host.step()
        weights.change(4)
        host.run()
        assert host.counts["preemptions"] > 0
        host.scheduler.pool.reset()
        text = request.all_token_ids
        assert host.generate([text], kit.NEW_TOKENS) == [kit.reference(text, 4)]
        assert host.counts["tokens_loaded"] > len(OTHER)


def test_step_that_one_rank_refuses_is_executed_by_none(kit, make):
    """FAULTS 31: a rank that computed alone would wait for the other, or save wrong blocks."""
    host = make(12, 64, num_ranks=2)
    host.step()
    request = host.submit(ONE, kit.NEW_TOKENS)
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
    assert (request.began, host.counts["steps_refused"]) == (False, 1)
    host.run()
    assert request.output == kit.reference(ONE, 3)
    assert None not in versions[2:]
