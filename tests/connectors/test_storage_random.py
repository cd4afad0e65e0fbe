"""Two instances over one folder, and everything that can happen to them, in any order."""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest

from wtransfer.specs.file import FORMAT
from wtransfer.testing.mini_engine.contract import OVER
from wtransfer.testing.mini_engine.reference import reference_output

NUM_ACTIONS = 60
numbers = itertools.count()
SEEDS = (0, 1, 2)


def storage(path):
    return {"shared_storage_path": str(path), "max_bytes": 80_000}


def several(path):
    return [
        {
            "kv_connector": "SharedStorageConnector",
            "kv_connector_extra_config": storage(path / each),
        }
        for each in "ab"
    ]


def tiered(path):
    return {**storage(path), "tier": "file", "cpu_bytes_to_use": 50_000}


CONNECTORS = {
    "SharedStorageConnector": storage,
    "OffloadingConnector": tiered,
    "MultiConnector": lambda path: {"connectors": several(path)},
}


class World:
    """Instances, their requests, and what may become of them."""

    def __init__(self, host, drawn, connector, path, seed):
        self.host, self.drawn, self.connector, self.path = host, drawn, connector, path
        self.dice = random.Random(seed)
        self.instances = [self.make(), self.make()]
        self.active = {made: [] for made in self.instances}
        self.spoilt = set()
        self.num_checked = 0

    def make(self):
        return self.host(
            self.connector,
            engine_id=f"instance {next(numbers)}",
            num_ranks=2,
            # Hardly more than one request needs: others have to give way.
            num_blocks=15,
            budget=self.dice.choice([7, 20, 1000]),
            **CONNECTORS[self.connector](self.path),
        )

    @property
    def one(self):
        return self.dice.choice(self.instances)

    def submit(self):
        made = self.one
        prompt = [self.dice.randrange(2)] * 4 + list(range(self.dice.randrange(1, 40)))
        self.active[made].append(made.add(prompt, self.dice.randrange(1, 8)))

    def step(self):
        self.one.step()

    def finish(self):
        self.one.run()

    def forget(self):
        self.one.clear_cache()

    def abort(self):
        made = self.one
        if self.active[made]:
            made.scheduler.abort(self.dice.choice(self.active[made]))

    def commit(self):
        """Change the weights of all, now and then back to what there was."""
        for requests in self.active.values():
            self.spoilt |= {each for each in requests if each.wrote_blocks or each.output}
        self.drawn.change(self.dice.choice(SEEDS))

    def damage(self):
        found = self.blocks()
        if found:
            each = self.dice.choice(found)
            # It may be evicted meanwhile.
            with contextlib.suppress(FileNotFoundError):
                data = bytearray(each.read_bytes())
                data[self.dice.randrange(len(data))] ^= 1 << self.dice.randrange(8)
                each.write_bytes(data)

    def lose(self):
        for each in self.blocks()[:: self.dice.choice([1, 3])]:
            each.unlink(missing_ok=True)

    def exchange(self):
        """Put two blocks in each other's place."""
        found = self.blocks()
        if len(found) > 1:
            one, other = self.dice.sample(found, 2)
            with contextlib.suppress(FileNotFoundError):
                one.rename(self.path / "third")
                other.rename(one)
                (self.path / "third").rename(other)

    def restart(self):
        made = self.instances.pop(0)
        del self.active[made]
        made.close()
        self.instances.append(self.make())
        self.active[self.instances[-1]] = []

    def blocks(self):
        return sorted(self.path.rglob(f"{FORMAT}/blocks/*"))

    def check(self):
        """Compare what has ended with a fresh model, but for what a commit went through."""
        for made, requests in self.active.items():
            for request in [each for each in requests if each.state in OVER]:
                requests.remove(request)
                if request not in self.spoilt and request.output:
                    prompt, number = request.prompt_token_ids, len(request.output)
                    expected = reference_output(prompt, number, self.drawn.seed, made.config.model)
                    assert request.output == expected.output
                    self.num_checked += 1


ACTIONS = {
    World.submit: 8,
    World.step: 14,
    World.finish: 3,
    World.forget: 2,
    World.abort: 1,
    World.commit: 1,
    World.damage: 2,
    World.lose: 1,
    World.exchange: 1,
    World.restart: 0.5,
}


def live(world):
    """Let it all happen, and check every answer; return what came of it."""
    for _ in range(NUM_ACTIONS):
        (act,) = world.dice.choices(list(ACTIONS), list(ACTIONS.values()))
        act(world)
        world.check()
    for made in world.instances:
        made.run()
        assert made.num_used == 0
    world.check()
    names = ("tokens_loaded", "loads_failed", "preemptions")
    counts = {name: sum(each.counts[name] for each in world.instances) for name in names}
    for made in world.instances:
        made.close()
    return {**counts, "checked": world.num_checked}


def live_many(tmp_path, host, drawn, connector, seeds):
    total = {}
    for seed in seeds:
        path = tmp_path / str(seed)
        path.mkdir()
        counts = live(World(host, drawn, connector, path, seed))
        total = {name: total.get(name, 0) + each for name, each in counts.items()}
    # The witness that something was tried.
    assert min(total.values()) > 0, total


@pytest.mark.slow
@pytest.mark.parametrize("connector", CONNECTORS)
def test_every_answer_is_right_under_random_events(tmp_path, host, drawn, connector):
    # Each of these has loads that fail, under every connector and however fast blocks are written.
    live_many(tmp_path, host, drawn, connector, (0, 5))


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("connector", CONNECTORS)
def test_every_answer_is_right_under_random_events_of_many_seeds(tmp_path, host, drawn, connector):
    live_many(tmp_path, host, drawn, connector, range(100, 300))
