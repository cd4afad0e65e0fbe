"""A long service in which anything may happen between two steps; the tokens are judged one by one.

Whatever else it went through, a request all of whose tokens were computed with one set of weights
has the tokens of a fresh model with these weights.
"""

from __future__ import annotations

import collections
import random

import pytest

from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.model import LocalWeights

SEEDS = (1, 2, 3)


class Service:
    """A host with sessions of several turns, whose weights change and whose tier is damaged."""

    def __init__(self, kit, host, weights, drawn):
        self.kit, self.host, self.weights, self.drawn = kit, host, weights, drawn
        self.texts = kit.prompts(16, 3)
        self.running = {}
        self.seeds = collections.defaultdict(set)
        self.judged = collections.Counter()

    def ask(self):
        """Begin a turn: a text that is known, or its beginning, and a little more."""
        text = self.drawn.choice(self.texts)
        text = text if len(text) < 160 else text[: self.drawn.randrange(60, 120)]
        request = self.host.submit([*text, self.drawn.randrange(256)], self.drawn.randrange(1, 6))
        self.running[request.request_id] = request

    def damage(self):
        slots = self.kit.tier_worker_of(self.host).part.slots
        slots[self.drawn.randrange(len(slots))] ^= self.drawn.randrange(1, 256)

    def step(self):
        before = {each: len(request.all_token_ids) for each, request in self.running.items()}
        ended = self.host.step()
        for each, request in self.running.items():
            if len(request.all_token_ids) > before[each]:
                self.seeds[each].add(self.weights.seed)
        for request in ended:
            self.judge(request)

    def judge(self, request):
        del self.running[request.request_id]
        seeds = self.seeds.pop(request.request_id)
        self.judged[len(seeds)] += 1
        if len(seeds) == 1:
            prompt = request.prompt_token_ids
            count = request.max_new_tokens
            assert request.output == self.kit.reference(prompt, seeds.pop(), count)
        self.texts[self.drawn.randrange(len(self.texts))] = request.all_token_ids


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("policy", "block_size"),
    [
        *(("lru", 16), ("arc", 1)),
        *(pytest.param(*each, marks=pytest.mark.nightly) for each in (("lru", 1), ("arc", 16))),
    ],
)
def test_random_service_matches_the_reference(kit, serve, policy, block_size):
    drawn = random.Random(f"{policy} {block_size}")
    tier = kit.cpu_tier(block_size, 640 // block_size, eviction_policy=policy)
    cache = CacheShape(block_size, 560 // block_size)
    host = serve(EngineConfig(cache=cache, seed=SEEDS[0], **kit.offloading(tier)))
    weights = LocalWeights(SEEDS[0], host.executor.worker.model)
    service = Service(kit, host, weights, drawn)
    for _ in range(500):
        if len(service.running) < 3 and drawn.random() < 0.5:
            service.ask()
        if drawn.random() < 0.05:
            weights.change(*drawn.choices(SEEDS, k=drawn.choice([1, 1, 2])))
        if drawn.random() < 0.05:
            service.damage()
        service.step()
    while service.running:
        service.step()
    counts = host.scheduler.counts
    assert service.judged[1] > 40
    assert service.judged[2] > 0, "some lived through a change"
    assert min(counts["tokens_loaded"], counts["loads_failed"], counts["restarts"]) > 0, counts
    assert kit.tier_stats(host)["evictions_total"] > 0
    host.run()
    assert host.scheduler.pool.num_free == cache.num_blocks
    kit.check_pool(host.scheduler.pool)
    weights.close()
