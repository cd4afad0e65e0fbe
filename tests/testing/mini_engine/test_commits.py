"""New weights while requests run: nothing of the old ones is served under the new ones."""

from __future__ import annotations

import itertools

import pytest

from wtransfer.deadline import Deadline
from wtransfer.errors import CommitError
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.reference import some_prompts
from wtransfer.weight_sync.worker.target import ModuleTarget

BLOCK_SIZE = 16
LONG = 16
KEPT = 256  # All that is ever stored: how much that is depends on when commits come.


@pytest.fixture
def host(kit, serve, trainer):
    """A host that the trainer updates; its cache holds hardly more than what runs at once."""
    cache, tier = CacheShape(BLOCK_SIZE, 24), kit.offloading(BLOCK_SIZE, KEPT)
    return serve(EngineConfig(cache=cache, seed=7, engine_id="host", **tier, **trainer.settings))


def commit(kit, host, before_step=lambda: None):
    """Take steps until published weights are committed."""
    before, deadline = host.counts["weight_changes"], Deadline(kit.PATIENCE_S)
    while host.counts["weight_changes"] == before:
        deadline.check("a commit")
        before_step()
        host.step()


def test_requests_after_a_commit_match_the_reference_of_the_new_weights(kit, host, trainer):
    *prompts, quiet = some_prompts(3)
    for prompt in prompts:
        # The witness: weights that are mixed up are seen.
        assert len({tuple(kit.reference(prompt, seed)) for seed in (7, 1, 2)}) == 3
    old_seed = 7
    for seed in [1, 2, 2]:
        texts = itertools.cycle(prompts)
        requests = [host.submit(next(texts), LONG) for _ in range(2)]
        while not all(request.began for request in requests):
            host.step()

        def keep_busy(requests=requests, texts=texts):
            if sum(request.state != "finished" for request in requests) < 3:
                requests.append(host.submit(next(texts), LONG))

        # Under one label: what tells weights apart is their digest.
        published = trainer.publish("1", seed)
        commit(kit, host, keep_busy)
        done = [each for each in requests if each.state == "finished"]
        mixed = [each for each in requests if each.began and each.state != "finished"]
        fresh = [each for each in requests if not each.began]
        assert mixed, "no request was running at the commit"
        host.run()
        assert published.result().ok
        for some, weights in ((done, old_seed), (fresh, seed)):
            for request in some:
                assert request.output == kit.reference(request.prompt_token_ids, weights, LONG)
        # What lived through the commit has left nothing: neither in the cache nor in the tier.
        # The last one is asked only when no commit is near, so it is stored under each weights.
        for text in [*prompts, *prompts, *(each.all_token_ids for each in mixed), quiet]:
            assert host.generate([text], kit.NEW_TOKENS) == [kit.reference(text, seed)]
        old_seed = seed
    stats = kit.tier_stats(host)
    assert stats["fence_changes_total"] >= 2
    assert stats["fence_stores_refused_total"] > 0, "mixed requests tried to store"
    # The way back leads to the old blocks; the cache has none, as it was emptied.
    loaded = host.counts["tokens_loaded"]
    published = trainer.publish("1", 1)
    commit(kit, host)
    assert published.result().ok
    assert host.generate([quiet], kit.NEW_TOKENS) == [kit.reference(quiet, 1)]
    assert host.counts["tokens_loaded"] > loaded


@pytest.mark.parametrize("way", ["torn", "lost"])
def test_nothing_is_computed_while_the_session_is_empty(kit, host, trainer, monkeypatch, way):
    """A commit that breaks and cannot be taken back, or weights that were lost another way."""
    (prompt,) = some_prompts(1)
    assert host.generate([prompt], kit.NEW_TOKENS) == [kit.reference(prompt, 7)]
    worker = host.executor.worker

    def tear(_target, _tensors):
        next(iter(worker.model.parameters())).data.fill_(0.5)
        raise OSError("no such memory")

    with monkeypatch.context() as patch:
        if way == "torn":
            patch.setattr(ModuleTarget, "apply", tear)
            published, deadline = trainer.publish("torn", 1), Deadline(kit.PATIENCE_S)
            while worker.session.state != "empty":
                deadline.check("a commit")
                host.step()
            with pytest.raises(CommitError, match="no worker holds 'torn'"):
                published.result()
        else:
            worker.session.weights_lost("asleep")
        before = host.counts["tokens_computed"]
        waiting = host.submit([*prompt, 1], kit.NEW_TOKENS)
        for _ in range(20):
            host.step()
        assert host.counts["tokens_computed"] == before
        assert (waiting.state, worker.session.state) == ("waiting", "empty")
        assert kit.tier_stats(host)["fence_open"] == 0
    published = trainer.publish("whole", 2)
    host.run()
    assert published.result().ok
    assert waiting.output == kit.reference([*prompt, 1], 2)
