"""A tier that outlives a run: the next one finds the blocks of its own weights, and no others."""

from __future__ import annotations

import gc

import pytest

from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig
from wtransfer.testing.mini_engine.engine import make_engine

BLOCK_SIZE = 16
LABEL = "step-7"


@pytest.fixture
def run(kit, train, tmp_path):
    """One run: a trainer and a host, of which nothing is left but a folder.

    Returns the answers, and how many tokens were loaded for them.
    """
    folder = tmp_path / "kept"
    folder.mkdir()

    def answers(prompts, label, seed):
        # As long as the model of another run is there, this process has several.
        gc.collect()
        trainer = train()
        settings = EngineConfig(
            cache=CacheShape(BLOCK_SIZE, 32),
            **kit.offloading(kit.shelf_tier(256, folder=str(folder))),
            **kit.publisher_of(trainer),
        )
        with make_engine(settings) as host:
            # What is asked before there are weights with a name is of this run alone.
            host.generate(prompts, kit.NEW_TOKENS)
            assert host.scheduler.counts["tokens_loaded"] == 0
            trainer.begin(label, seed)
            while host.scheduler.counts["weight_changes"] == 0:
                host.step()
            assert trainer.result()[0]
            got = host.generate(prompts, kit.NEW_TOKENS)
            loaded = host.scheduler.counts["tokens_loaded"]
        return got, loaded

    return answers


def test_runs_share_blocks_by_weights_and_not_by_label(kit, run):
    prompts = kit.prompts(BLOCK_SIZE, 2)
    assert run(prompts, LABEL, seed=1) == (kit.references(prompts, 1), 0)
    assert run(prompts, LABEL, seed=2) == (kit.references(prompts, 2), 0), (
        "same label, other weights"
    )
    assert kit.references(prompts, 1) != kit.references(prompts, 2)
    answers, loaded = run(prompts, "another label", seed=1)
    assert answers == kit.references(prompts, 1)
    assert loaded >= 2 * 2 * BLOCK_SIZE
