"""Whatever the limits are, every request ends with the right tokens, and every block is free then.

Sizes, prompts, aborts and changes of weights are drawn at random; so is a tier that is slow,
forgets or is damaged. A request all of whose steps were under one set of weights has the tokens of
a fresh model with these weights.
"""

from __future__ import annotations

import collections
import contextlib
import random
import threading

import pytest

from wtransfer.specs.interface import LookupResult
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, Limits
from wtransfer.testing.mini_engine.model import LocalWeights

MOST_STEPS = 3000
MOST_CHANGES = 12
NUM_REQUESTS = 16
CASES = [
    0,
    *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)),
    *(pytest.param(n, marks=pytest.mark.nightly) for n in range(3, 12)),
]


def make_unreliable(kit, host, drawn):
    """Let the tier answer late, ask again, forget all blocks and damage some, until it is mended.

    Returns:
        What mends it.
    """
    mended = threading.Event()

    def happens(chance):
        return drawn.random() < chance and not mended.is_set()

    worker, manager = kit.tier_worker_of(host), kit.manager_of(host)
    get_finished, lookup, prepare_load = worker.get_finished, manager.lookup, manager.prepare_load
    results = []

    def finished_later():
        results.extend(get_finished())
        ready = [each for each in results if not happens(0.6)]
        for each in ready:
            results.remove(each)
        slots = worker.links[0].part.slots
        if happens(0.05):
            slots[drawn.randrange(len(slots))] ^= drawn.randrange(1, 256)
        return ready

    def lookup_again(key, context):
        return LookupResult.RETRY if happens(0.1) else lookup(key, context)

    def forget_and_prepare(keys, context):
        if happens(0.1):
            manager.reset_cache()
        return prepare_load(keys, context)

    worker.get_finished, manager.lookup = finished_later, lookup_again
    manager.prepare_load = forget_and_prepare
    return mended.set


@pytest.mark.parametrize("changes", [0.0, 0.1], ids=["same weights", "changing weights"])
@pytest.mark.parametrize("connector", [None, "cpu", "memory"])
@pytest.mark.parametrize("case", CASES)
def test_every_request_ends_with_the_right_tokens(  # noqa: PLR0917
    kit, serve, tmp_path, connector, changes, case
):
    drawn = random.Random(f"{connector} {changes} {case}")
    block_size, longest = drawn.choice([1, 4, 16]), drawn.choice([20, 60, 90])
    least = -(-longest // block_size)
    num_blocks = drawn.randrange(least, 3 * least + 1)
    tiers = {
        None: {},
        "cpu": kit.offloading(block_size, num_blocks),
        "memory": {
            "connector": "MemoryConnector",
            "module_path": "wtransfer.testing.fakes",
            "options": {"shelf": str(tmp_path), "outlasts": drawn.random() < 0.5},
        },
    }
    limits = Limits(drawn.randrange(1, 5), drawn.choice([1, 3, 8, 20, 64, 2048]))
    cache = CacheShape(block_size, num_blocks)
    host = serve(EngineConfig(cache=cache, limits=limits, seed=3, **tiers[connector]))
    mend = make_unreliable(kit, host, drawn) if connector == "cpu" else bool
    aborts = drawn.choice([0.0, 0.03])
    texts = [drawn.choices(range(256), k=longest // 2) for _ in range(2)]
    requests, seeds = [], collections.defaultdict(set)

    def submit():
        count, head = drawn.randrange(1, 9), drawn.choice([*texts, []])
        rest = drawn.choices(range(256), k=drawn.randrange(1, longest - count - len(head) + 1))
        requests.append(host.submit(head + rest, count))

    def step():
        before = [(each.num_computed_tokens, each.num_tokens) for each in requests]
        host.step()
        for request, progress in zip(requests, before, strict=True):
            if (request.num_computed_tokens, request.num_tokens) != progress:
                seeds[request].add(weights.seed)
        kit.check_pool(host.scheduler.pool)

    with contextlib.closing(LocalWeights(3, host.executor.worker.model)) as weights:
        num_changes = 0
        for number in range(MOST_STEPS):
            if len(requests) < NUM_REQUESTS and drawn.random() < 0.5:
                submit()
            if requests and drawn.random() < aborts:
                host.scheduler.abort(drawn.choice(requests))
            # Not for ever: prompts that are computed in many steps would begin anew each time.
            if changes and (number == 5 or drawn.random() < changes) and num_changes < MOST_CHANGES:
                weights.change(*drawn.choices([3, 4, 5], k=drawn.choice([1, 1, 2])))
                num_changes += 1
            if drawn.random() < 0.1:
                # As if others had needed the blocks.
                host.scheduler.pool.reset()
            step()
            if len(requests) == NUM_REQUESTS and not host.scheduler.is_busy:
                break
        text = (texts[0] + texts[1])[1:]
        mend()
        for _ in range(10):
            host.scheduler.pool.reset()
            assert host.generate([text], 1) == [kit.reference(text, weights.seed, 1)]
    assert {each.state for each in requests} <= {"finished", "aborted" if aborts else "finished"}
    judged = [request for request in requests if len(seeds[request]) == 1]
    assert judged
    for request in judged:
        (seed,) = seeds[request]
        expected = kit.reference(request.prompt_token_ids, seed, request.max_new_tokens)
        assert request.output == expected[: request.num_output_tokens]
    assert host.scheduler.pool.num_free == num_blocks
    assert host.counts["unknown_notices"] == 0
    assert bool(host.counts["weight_changes"]) == bool(changes)
    assert bool(host.counts["tokens_loaded"]) == bool(connector)
