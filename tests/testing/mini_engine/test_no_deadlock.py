"""Whatever the limits are, every request ends, and every block finds its way back.

Only what ends well is drawn at random: sizes, prompts, a tier that is slow, forgets or is damaged,
and requests that are given up. So a service that stands still is a fault of the host.
"""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest

from wtransfer.specs.interface import LookupResult
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, Limits
from wtransfer.testing.mini_engine.model import LocalWeights

MOST_STEPS = 3000
MOST_UNCHANGED = 5
MOST_CHANGES = 12
CASES = [
    0,
    *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)),
    *(pytest.param(n, marks=pytest.mark.nightly) for n in range(3, 12)),
]


class Slow:
    """A spec's worker whose results come late."""

    def __init__(self, inner, drawn):
        self._get_finished, self._drawn, self._kept = inner.get_finished, drawn, []
        inner.get_finished = self.get_finished

    def get_finished(self):
        self._kept += self._get_finished()
        ready = [each for each in self._kept if self._drawn.random() < 0.4]
        self._kept = [each for each in self._kept if each not in ready]
        return ready


class Service:
    """A host of random sizes, and requests that may share beginnings."""

    def __init__(self, kit, serve, drawn, connector, tmp_path):
        self.kit, self.drawn = kit, drawn
        self.block_size = drawn.choice([1, 4, 16])
        self.longest = drawn.choice([20, 60, 90])
        needed = -(-self.longest // self.block_size)
        self.num_blocks = drawn.randrange(needed, 3 * needed + 1)
        limits = Limits(drawn.randrange(1, 5), drawn.choice([1, 3, 8, 20, 64, 2048]))
        self.host = serve(
            EngineConfig(
                cache=CacheShape(self.block_size, self.num_blocks),
                limits=limits,
                seed=3,
                **self.settings(connector, tmp_path),
            )
        )
        if connector in ("cpu", "shelf"):
            Slow(kit.tier_worker_of(self.host), drawn)
            self.forget_at_times()
        self.heads = [self.text(self.longest // 2) for _ in range(2)]
        self.requests = []

    def settings(self, connector, tmp_path):
        drawn = self.drawn
        if connector == "cpu":
            return self.kit.offloading(self.kit.cpu_tier(self.block_size, self.num_blocks))
        if connector == "shelf":
            return self.kit.offloading(self.kit.shelf_tier(2 * self.num_blocks))
        if connector == "folder":
            return {
                "connector": "FolderConnector",
                "module_path": "folder_connector",
                "options": {"folder": str(tmp_path), "lazily": drawn.random() < 0.5},
            }
        return {}

    def forget_at_times(self):
        manager = self.kit.manager_of(self.host)
        lookup, prepare_load = manager.lookup, manager.prepare_load

        def asked(key, context):
            return LookupResult.RETRY if self.drawn.random() < 0.1 else lookup(key, context)

        def prepared(keys, context):
            if self.drawn.random() < 0.1:
                manager.reset_cache()
            return prepare_load(keys, context)

        manager.lookup, manager.prepare_load = asked, prepared

    def text(self, length):
        return [self.drawn.randrange(256) for _ in range(length)]

    def ask(self):
        count = self.drawn.randrange(1, 9)
        head = self.drawn.choice([*self.heads, []])
        rest = self.text(self.drawn.randrange(1, self.longest - count - len(head) + 1))
        self.requests.append(self.host.submit(head + rest, count))

    def step(self):
        self.host.step()
        self.kit.check_pool(self.host.scheduler.pool)

    def run(self, num_requests, *, abort=0.0):
        """Serve so many requests, and give some of them up."""
        for _ in range(MOST_STEPS):
            if len(self.requests) < num_requests and self.drawn.random() < 0.5:
                self.ask()
            if self.requests and self.drawn.random() < abort:
                self.host.scheduler.abort(self.drawn.choice(self.requests))
            self.step()
            if len(self.requests) == num_requests and not self.host.scheduler.is_busy:
                return
        pytest.fail(f"after {MOST_STEPS} steps: {[each.state for each in self.requests]}")

    def check_end(self):
        pool = self.host.scheduler.pool
        assert pool.num_free == self.num_blocks
        assert set(pool._num_pins) == {0}


def judge(kit, requests):
    for request in requests:
        expected = kit.reference(request.prompt_token_ids, 3, request.max_new_tokens)
        if request.state == "finished":
            assert request.output == expected
        else:
            assert request.state == "aborted"
            assert request.output == expected[: len(request.output)]


@pytest.mark.parametrize("connector", [None, "cpu", "shelf", "folder"])
@pytest.mark.parametrize("case", CASES)
def test_every_request_ends(kit, serve, tmp_path, connector, case):
    drawn = random.Random(f"{connector} {case}")
    service = Service(kit, serve, drawn, connector, tmp_path)
    service.run(12, abort=drawn.choice([0.0, 0.03]))
    judge(kit, service.requests)
    service.check_end()
    assert service.host.scheduler.counts["unknown_notices"] == 0


@pytest.mark.parametrize("connector", [None, "cpu", "folder"])
@pytest.mark.parametrize("case", CASES)
def test_every_request_ends_while_weights_change(kit, serve, tmp_path, connector, case):
    """Requests after the last change have the tokens of the last weights."""
    drawn = random.Random(f"changing {connector} {case}")
    service = Service(kit, serve, drawn, connector, tmp_path)
    step, numbers, num_changes = service.step, itertools.count(), itertools.count()

    def change_and_step():
        # Once for certain, when there is something to change; and not for ever: a connector that
        # does not name weights lets every request begin anew, and long ones would never end.
        changes = drawn.random() < 0.1 and next(num_changes) < MOST_CHANGES
        if changes or next(numbers) == MOST_UNCHANGED:
            weights.change(drawn.choice([3, 4, 5]))
        step()

    service.step = change_and_step
    with contextlib.closing(LocalWeights(3, service.host.executor.worker.model)) as weights:
        service.run(10)
        assert {each.state for each in service.requests} == {"finished"}
        service.check_end()
        assert service.host.scheduler.counts["weight_changes"] > 0
        texts = [each.all_token_ids[: service.longest - 2] for each in service.requests]
        for text in texts:
            expected = kit.reference(text, weights.seed, 2)
            assert service.host.generate([text], 2) == [expected]
        service.check_end()
