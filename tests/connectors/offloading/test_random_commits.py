"""Requests one after the other, and commits between any two calls; what is loaded is judged."""

from __future__ import annotations

import collections
import random

import pytest

from wtransfer.kv.fence import WorkerFence
from wtransfer.weight_version import ProcessWeights

BLOCK_SIZE = 4
MAX_BLOCKS = 3


class Service:
    """A host over both sides, each rank with weights of its own.

    Every block has the number of what it was really computed from: the weights of all ranks, the
    tokens, and the block before.
    """

    def __init__(self, rig, drawn, ask_for, a_step):
        self.rig, self.drawn, self.ask_for, self.a_step = rig, drawn, ask_for, a_step
        self.contents, self.counts = [()], collections.Counter()
        self.models, self.names = [], []
        for rank, worker in enumerate(rig.workers):
            weights = ProcessWeights()
            worker.side._fence = WorkerFence(rank, weights)
            self.models.append(weights.hold("A"))
            self.names.append("A")
        rig.step()

    def commit(self, rank, name):
        self.models[rank].settle(name)
        self.names[rank] = name

    def maybe_commit(self):
        """Commit on one rank, on all, or there and back; the scheduler learns it by a step."""
        ranks = range(len(self.models))
        kind = self.drawn.choices(["none", "one", "all", "back"], [88, 4, 5, 3])[0]
        if kind == "one":
            self.commit(self.drawn.choice(ranks), self.drawn.choice("AB"))
        elif kind == "all":
            name = self.drawn.choice("AB")
            for rank in ranks:
                self.commit(rank, name)
        elif kind == "back":
            for rank in ranks:
                name = self.names[rank]
                self.commit(rank, "there")
                self.commit(rank, name)

    def number(self, names, token, before):
        content = (tuple(names), token, before)
        if content not in self.contents:
            self.contents.append(content)
        return self.contents.index(content)

    def write(self, block, number):
        for rank, cache in enumerate(self.rig.caches):
            for layer in cache.values():
                layer[block] = number + 1000 * rank

    def read(self, block):
        return [self.rig.values([block], rank)[0] for rank in range(len(self.models))]

    def take(self, metadata):
        """Take a step, of which loads may end later; return blocks that could not be loaded."""
        tier, holds = self.rig.tier, self.drawn.random() < 0.5
        get_finished = tier.get_finished
        if holds:
            tier.get_finished = list
        said = self.rig.work(metadata)
        self.maybe_commit()
        tier.get_finished = get_finished
        self.rig.hear(said)
        return {block for each in said for block in each.bad}

    def finish(self):
        """Take steps until no job runs; return blocks that could not be loaded."""
        said = self.rig.settle()
        return {block for each in said for block in each.bad}

    def serve(self, name):
        tokens = [self.drawn.randrange(2) for _ in range(self.drawn.randint(1, MAX_BLOCKS))]
        request = self.ask_for(name, BLOCK_SIZE * len(tokens) + 1)
        request.all_token_ids[:] = [each for each in tokens for _ in range(BLOCK_SIZE)] + [0]
        request.prompt_token_ids[:] = request.all_token_ids
        blocks = self.drawn.sample(range(16), len(tokens) + 1)
        self.rig.wipe()
        self.maybe_commit()
        began = tuple(self.names)
        num_found = self.rig.ask(request)[0]
        self.maybe_commit()
        self.rig.allocate(request, blocks, num_found)
        num_there = num_found // BLOCK_SIZE
        if num_found:
            self.maybe_commit()
            metadata = self.rig.tell()
            self.maybe_commit()
            failed = self.take(metadata) | self.finish()
            self.counts["failed" if failed else "loaded"] += 1
            before = 0
            for token, block in zip(tokens[:num_there], blocks, strict=False):
                before = self.number(began, token, before)
                expected = [before + 1000.0 * rank for rank in range(len(self.models))]
                assert failed or self.read(block) == expected
            num_there = 0 if failed else num_there
        number = self.number(began, tokens[0], 0) if num_there else 0
        for place in range(1, num_there):
            number = self.number(began, tokens[place], number)
        for place in range(num_there, len(tokens)):
            kind = "new" if place == num_there else "cached"
            metadata = self.rig.tell(self.a_step(**{kind: [(request, place * 4, 4)]}))
            self.maybe_commit()
            number = self.number(self.names, tokens[place], number)
            self.write(blocks[place], number)
            self.maybe_commit()
            self.take(metadata)
        self.finish()
        self.rig.scheduler.request_finished(request, blocks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_is_loaded_was_computed_with_the_weights_at_its_requests_start(
    bench, ask_for, a_step, num_ranks
):
    counts = collections.Counter()
    for seed in range(12):
        rig = bench(num_ranks)
        service = Service(rig, random.Random(seed), ask_for, a_step)
        for number in range(15):
            service.serve(f"r{number}")
        counts += service.counts
        for worker in rig.workers:
            counts.update(worker.get_stats())
        assert rig.scheduler.get_stats()["fence_open"] == 1
        rig.close()
    # The witness: there was something to find, and something to refuse in each of the ways.
    names = [
        f"fence_{each}_total" for each in ("loads_refused", "loads_outdated", "stores_refused")
    ]
    assert min(counts[each] for each in ("loaded", "failed", *names)) > 0, counts
