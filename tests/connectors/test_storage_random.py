"""Two instances over one folder, and everything that can happen to them, in any order."""

from __future__ import annotations

import functools
import os
import random

import pytest
from driver import Instance, answer, transfer_config

from wtransfer.specs.file import FORMAT

NUM_ACTIONS = 60
EXPECTED = functools.lru_cache(maxsize=None)(
    lambda prompt, most, weights: answer(list(prompt), most, num_ranks=2, weights=weights)
)


class World:
    """Instances, their requests, and what may become of them."""

    def __init__(self, path, weights, seed, transfer):
        self.dice = random.Random(seed)
        self.path = path
        self.held = weights
        self.weights = "fingerprint-1"
        self.transfer = transfer
        self.instances = [self.make(), self.make()]
        self.spoilt, self.ended = set(), {}
        self.number = 0
        self.counts = {"loaded": 0, "failed": 0, "checked": 0}

    def make(self):
        return Instance(
            self.transfer,
            num_ranks=2,
            num_blocks=40,
            weights=self.weights,
            budget=self.dice.choice([7, 20, 1000]),
            keeps_saving=self.dice.random() < 0.5,
        )

    def submit(self):
        made = self.dice.choice(self.instances)
        prompt = [self.dice.randrange(2)] * 4 + list(range(self.dice.randrange(1, 40)))
        made.submit(f"r{self.number}", prompt, self.dice.randrange(1, 8))
        self.number += 1

    def step(self):
        self.dice.choice(self.instances).step()

    def finish(self):
        self.dice.choice(self.instances).run()

    def preempt(self):
        made = self.dice.choice(self.instances)
        if made.running:
            made.preempt(self.dice.choice(sorted(made.running)))

    def abort(self):
        made = self.dice.choice(self.instances)
        if made.running:
            made.abort(self.dice.choice(sorted(made.running)))

    def commit(self):
        """Change the weights of all, now and then back to what there was."""
        for made in self.instances:
            begun = [each for each in made.waiting if each.output_token_ids]
            self.spoilt |= {*made.running, *(each.request_id for each in begun)}
        self.weights = f"fingerprint-{self.dice.randrange(1, 4)}"
        self.held.settle(self.weights)
        for made in self.instances:
            made.weights = self.weights

    def damage(self):
        found = self.blocks()
        if found:
            each = self.dice.choice(found)
            data = bytearray(each.read_bytes())
            data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
            each.write_bytes(data)

    def lose(self):
        for each in self.blocks()[:: self.dice.choice([1, 3])]:
            each.unlink()

    def exchange(self):
        """Put two blocks in each other's place."""
        found = self.blocks()
        if len(found) > 1:
            one, other = self.dice.sample(found, 2)
            one.rename(self.path / "third")
            other.rename(one)
            os.rename(self.path / "third", other)  # noqa: PTH104  # across folders

    def reset(self):
        self.dice.choice(self.instances).scheduler.reset_cache()

    def restart(self):
        made = self.instances.pop(0)
        self.check(made)
        made.shutdown()
        self.instances.append(self.make())

    def blocks(self):
        return sorted(self.path.rglob(f"{FORMAT}/blocks/*"))

    def check(self, made):
        """Compare what an instance has said with the truth, but for what a commit went through."""
        for request_id, request in made.done.items():
            self.counts["loaded"] += request.num_loaded
            self.counts["failed"] += request.num_failures
            if request_id not in self.spoilt:
                said, prompt = request.output_token_ids, tuple(request.prompt_token_ids)
                right = EXPECTED(prompt, request.max_tokens, self.ended[request_id])
                assert said == right[: len(said)]
                self.counts["checked"] += 1

    def note(self):
        """Note with which weights requests ended."""
        for made in self.instances:
            for request_id in made.done:
                self.ended.setdefault(request_id, self.weights)


ACTIONS = {
    World.submit: 8,
    World.step: 14,
    World.finish: 3,
    World.preempt: 2,
    World.abort: 1,
    World.commit: 1,
    World.damage: 2,
    World.lose: 1,
    World.exchange: 1,
    World.reset: 0.3,
    World.restart: 0.5,
}


def storage(path):
    return {"shared_storage_path": str(path), "max_bytes": 40_000}


def several(path):
    return [
        {
            "kv_connector": "SharedStorageConnector",
            "kv_connector_extra_config": storage(path / each),
        }
        for each in "ab"
    ]


def live(path, weights, seed, transfer):
    """Let it all happen, and check every answer; return what came of it."""
    world = World(path, weights, seed, transfer)
    try:
        for _ in range(NUM_ACTIONS):
            act = world.dice.choices(list(ACTIONS), list(ACTIONS.values()))[0]
            act(world)
            world.note()
        for made in world.instances:
            made.run()
            world.note()
            world.check(made)
            assert len(made.free) == 39
    finally:
        for made in world.instances:
            made.shutdown()
    return world.counts


def live_many(tmp_path, weights, seeds, transfer_of):
    total = {"loaded": 0, "failed": 0, "checked": 0}
    for seed in seeds:
        path = tmp_path / str(seed)
        path.mkdir()
        weights.settle("fingerprint-1")
        counts = live(path, weights, seed, transfer_of(path))
        total = {name: total[name] + counts[name] for name in total}
    # The witness that something was tried.
    assert min(total.values()) > 0, total


TRANSFERS = {
    "alone": lambda path: transfer_config("SharedStorageConnector", **storage(path)),
    "under one": lambda path: transfer_config("MultiConnector", connectors=several(path)),
}


@pytest.mark.parametrize("kind", TRANSFERS)
def test_whatever_happens_every_answer_is_right(tmp_path, weights, kind):
    live_many(tmp_path, weights, range(5), TRANSFERS[kind])


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", TRANSFERS)
def test_whatever_happens_for_long_every_answer_is_right(tmp_path, weights, kind):
    live_many(tmp_path, weights, range(100, 400), TRANSFERS[kind])
