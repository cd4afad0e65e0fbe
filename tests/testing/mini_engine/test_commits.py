"""New weights while conversations run: nothing of the old ones is served under the new ones."""

from __future__ import annotations

import itertools
import time

import pytest

from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig

BLOCK_SIZE = 16
LONG = 16
KEPT = 256  # All that is ever stored: how much that is depends on when commits come.


@pytest.fixture(params=["cpu", "shelf"])
def tier(request, kit, tmp_path):
    if request.param == "cpu":
        return lambda num_ranks: kit.cpu_tier(BLOCK_SIZE, KEPT, num_ranks, deadline_s=20.0)
    (tmp_path / "kept").mkdir()
    return lambda num_ranks: kit.shelf_tier(KEPT, folder=str(tmp_path / "kept"))


class Service:
    """A host that a trainer updates, while it is never without a running request.

    ``prompts`` are asked at any time; ``quiet`` is one that is for the test.
    """

    def __init__(self, kit, serve, trainer, tier, num_ranks):
        self.kit, self.trainer = kit, trainer
        *self.prompts, self.quiet = kit.prompts(BLOCK_SIZE, 3)
        settings = EngineConfig(
            # Hardly more than what runs at once.
            cache=CacheShape(BLOCK_SIZE, 24),
            seed=7,
            **kit.offloading(tier(num_ranks)),
            engine_id=f"engine-{id(self)}",
            num_ranks=num_ranks,
            **kit.publisher_of(trainer),
        )
        self.host = serve(settings, processes=num_ranks > 1)
        self.seed = 7
        self.mixed = []

    @property
    def counts(self):
        return self.host.scheduler.counts

    def check(self):
        """Ask everything twice: once it is computed, or loaded if it is known, once it is known."""
        for _ in range(2):
            for prompt in self.prompts:
                wanted = self.kit.reference(prompt, self.seed)
                assert [wanted] == self.host.generate([prompt], self.kit.NEW_TOKENS)

    def update(self, label, seed):
        """Publish weights while requests come, run and end; judge each by when it began."""
        before = self.counts["weight_changes"]
        prompts = itertools.cycle(self.prompts)
        started = [self.host.submit(next(prompts), LONG) for _ in range(2)]
        while not all(request.began for request in started):
            self.host.step()
        self.trainer.begin(label, seed)
        deadline = time.monotonic() + self.kit.PATIENCE_S
        while self.counts["weight_changes"] == before:
            assert time.monotonic() < deadline, "no commit came"
            if sum(request.state != "finished" for request in started) < 3:
                started.append(self.host.submit(next(prompts), LONG))
            self.host.step()
        running = [r for r in started if r.began and r.state != "finished"]
        assert running, "no request was running at the commit"
        fresh = [r for r in started if not r.began]
        fresh += [self.host.submit(prompt, LONG) for prompt in self.prompts]
        done = [r for r in started if r.state == "finished"]
        self.host.run()
        assert self.trainer.result()[:1] == [True]
        for requests, weights in ((done, self.seed), (fresh, seed)):
            for request in requests:
                prompt = request.prompt_token_ids
                assert request.output == self.kit.reference(prompt, weights, LONG)
        self.seed = seed
        self.mixed = [request.all_token_ids for request in running]

    def go_back(self, label, seed):
        """Publish weights while nothing runs."""
        before = self.counts["weight_changes"]
        self.trainer.begin(label, seed)
        deadline = time.monotonic() + self.kit.PATIENCE_S
        while self.counts["weight_changes"] == before:
            assert time.monotonic() < deadline, "no commit came"
            self.host.step()
        assert self.trainer.result()[:1] == [True]


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow)])
def service(request, kit, serve, trainer, tier):
    """A host of one rank in this process, or of two as processes."""
    return Service(kit, serve, trainer, tier, request.param)


def test_requests_after_a_commit_match_the_reference_of_the_new_weights(kit, service):
    prompts = service.prompts
    # The witness: whoever mixes weights up is seen to.
    for prompt in prompts:
        assert len({tuple(kit.reference(prompt, seed)) for seed in (7, 1, 2)}) == 3
    service.check()
    for number, seed in enumerate([1, 2, 2]):
        service.update(f"v{number}", seed)
        service.check()
        # What lived through the commit has left nothing: neither in the cache nor in the tier.
        for tokens in service.mixed:
            wanted = kit.reference(tokens, seed)
            assert [wanted] == service.host.generate([tokens], kit.NEW_TOKENS)
        # Asked only when no commit is near, so it is stored under each weights.
        wanted = kit.reference(service.quiet, seed)
        assert [wanted] == service.host.generate([service.quiet], kit.NEW_TOKENS)
    counts = service.counts
    assert counts["weight_changes"] >= 3
    stats = kit.tier_stats(service.host)
    assert stats["fence_changes_total"] >= 2
    assert stats["fence_stores_refused_total"] > 0, "mixed requests tried to store"
    # The way back leads to the old blocks; the cache has none, as it was emptied.
    loaded = counts["tokens_loaded"]
    service.go_back("v0 again", 1)
    wanted = kit.reference(service.quiet, 1)
    assert [wanted] == service.host.generate([service.quiet], kit.NEW_TOKENS)
    assert counts["tokens_loaded"] > loaded


@pytest.mark.parametrize("way", ["torn", "lost"])
def test_nothing_is_computed_while_the_session_is_empty(kit, serve, trainer, monkeypatch, way):
    """A commit that breaks and cannot be taken back, or weights that were lost another way."""
    host = serve(
        EngineConfig(
            cache=CacheShape(BLOCK_SIZE, 24),
            seed=7,
            **kit.offloading(kit.cpu_tier(BLOCK_SIZE, 96)),
            engine_id="empty",
            **kit.publisher_of(trainer),
        )
    )
    prompt = kit.prompts(BLOCK_SIZE, 1)[0]
    assert [kit.reference(prompt, 7)] == host.generate([prompt], kit.NEW_TOKENS)
    worker = host.executor.worker

    def tear(tensors):
        next(iter(worker.model.parameters())).data.fill_(0.5)
        raise OSError("no such memory")

    with monkeypatch.context() as patch:
        if way == "torn":
            patch.setattr(worker.session._target, "apply", tear)
            trainer.begin("torn", 1)
            deadline = time.monotonic() + kit.PATIENCE_S
            while worker.session.state != "empty":
                assert time.monotonic() < deadline, "no commit was tried"
                host.step()
            assert trainer.result()[:1] == [False]
        else:
            worker.session.weights_lost("asleep")
        before = host.scheduler.counts["tokens_computed"]
        waiting = host.submit([*prompt, 1], kit.NEW_TOKENS)
        for _ in range(20):
            host.step()
        assert host.scheduler.counts["tokens_computed"] == before
        assert (waiting.state, worker.session.state) == ("waiting", "empty")
        assert kit.tier_stats(host)["fence_open"] == 0
    trainer.begin("whole", 2)
    host.run()
    assert trainer.result()[:1] == [True]
    assert waiting.output == kit.reference([*prompt, 1], 2)
