"""The same tokens, whether keys and values were computed afresh or loaded from a tier."""

from __future__ import annotations

import random

import pytest

from wtransfer.kv.keys import hash_blocks
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig


def settings_for(kit, prompts, block_size, tier, num_ranks=1):
    """Return a host whose cache holds two of the prompts."""
    largest = max(kit.blocks_for(prompt, block_size) for prompt in prompts)
    cache = CacheShape(block_size, 2 * largest)
    return EngineConfig(cache=cache, num_ranks=num_ranks, **kit.offloading(tier))


def too_few(prompts, block_size):
    """Return a number of blocks that is two thirds of those that the prompts consist of."""
    return len({name for prompt in prompts for name in hash_blocks(prompt, block_size)}) * 2 // 3


def ask(kit, host, prompts, times=8):
    """Ask in any order, several times; the answers must be those of a fresh model."""
    drawn = random.Random(1)
    asked = 0
    for number in range(times):
        if number % 2:
            # Else chance would say how much of it is still in the host's own cache.
            host.scheduler.pool.reset()
        wave = drawn.sample(prompts, 2)
        assert kit.references(wave) == host.generate(wave, kit.NEW_TOKENS)
        asked += sum(len(prompt) + kit.NEW_TOKENS - 1 for prompt in wave)
    counts = host.scheduler.counts
    # The witness: blocks came from the tier, and their tokens were not computed.
    assert counts["tokens_loaded"] > 0
    stats = kit.tier_stats(host)
    assert counts["loads_failed"] == counts["preemptions"] == counts["unknown_notices"] == 0
    assert stats["load_jobs_failed_total"] == stats["store_jobs_failed_total"] == 0
    kit.check_pool(host.scheduler.pool)
    saved = counts["tokens_loaded"] + counts["tokens_cached"]
    assert asked == counts["tokens_computed"] + saved
    return counts, stats


@pytest.mark.parametrize(
    ("spec", "block_size"),
    [
        pytest.param("cpu", 1, marks=pytest.mark.slow),
        ("cpu", 16),
        pytest.param("cpu", 128, marks=pytest.mark.slow),
        ("shelf", 16),
        pytest.param("shelf", 1, marks=pytest.mark.slow),
        pytest.param("shelf", 128, marks=pytest.mark.slow),
    ],
)
def test_loaded_blocks_give_the_reference_output_under_eviction(kit, serve, spec, block_size):
    prompts = kit.prompts(block_size, 4)
    num_kept = too_few(prompts, block_size)
    tier = kit.cpu_tier(block_size, num_kept) if spec == "cpu" else kit.shelf_tier(num_kept)
    host = serve(settings_for(kit, prompts, block_size, tier))
    ask(kit, host, prompts)
    assert kit.tier_stats(host)["loaded_bytes_total"] > 0
    evicted = kit.manager_of(host).evicted if spec == "shelf" else None
    evicted = evicted or kit.tier_stats(host).get("evictions_total", 0)
    assert evicted > 0, "the tier was to be too small"


@pytest.mark.parametrize("spec", ["cpu", "seed"])
@pytest.mark.parametrize("per_chunk", [2, 3])
def test_chunks_of_several_blocks_give_the_reference_output(kit, serve, spec, per_chunk):
    """By specs of either shape; a chunk whose beginning the cache has is loaded from its middle."""
    prompts, size = kit.prompts(16, 4), 16 * per_chunk
    num_kept = too_few(prompts, size)
    tier = (
        kit.seed_tier(16, num_kept, per_chunk)
        if spec == "seed"
        else {**kit.cpu_tier(size, num_kept), "block_size": size}
    )
    host = serve(settings_for(kit, prompts, 16, tier))
    counts, _ = ask(kit, host, prompts)
    assert counts["tokens_loaded"] % 16 == 0


@pytest.mark.parametrize(
    "block_size",
    [16, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 128))],
)
def test_two_rank_processes_give_the_reference_output(kit, serve, block_size):
    prompts = kit.prompts(block_size, 4)
    num_kept = too_few(prompts, block_size)
    tier = kit.cpu_tier(block_size, num_kept, num_ranks=2, deadline_s=20.0)
    host = serve(settings_for(kit, prompts, block_size, tier, num_ranks=2), processes=True)
    counts, stats = ask(kit, host, prompts, 6)
    per_token = 2 * kit.nbytes_per_block(block_size, 2) // block_size
    expected = counts["tokens_loaded"] * per_token
    assert expected == stats["loaded_bytes_total"], "each rank loads its part"
    assert stats["evictions_total"] > 0


def test_two_rank_processes_with_a_third_party_spec(kit, serve, tmp_path):
    prompts = kit.prompts(16, 3)
    tier = kit.shelf_tier(64, folder=str(tmp_path / "kept"))
    (tmp_path / "kept").mkdir()
    host = serve(settings_for(kit, prompts, 16, tier, num_ranks=2), processes=True)
    ask(kit, host, prompts, 4)
    names = {path.name.partition(".")[2] for path in (tmp_path / "kept").iterdir()}
    assert names == {"0", "1"}


def test_engine_without_connector_gives_the_reference_output(kit, serve):
    prompts = kit.prompts(16, 3)
    host = serve(settings_for(kit, prompts, 16, None))
    for _ in range(2):
        assert kit.references(prompts) == host.generate(prompts, kit.NEW_TOKENS)
    assert host.scheduler.counts["tokens_cached"] > 0


def test_request_larger_than_the_cache_is_refused(kit, serve):
    host = serve(EngineConfig(cache=CacheShape(16, 4)))
    with pytest.raises(ValueError, match="needs 5 blocks; the cache has 4"):
        host.submit([1] * 64, 2)
    # What follows the last token is not kept.
    assert host.generate([[1] * 64], 1) == kit.references([[1] * 64], count=1)
    with pytest.raises(ValueError, match="no prompt"):
        host.submit([], 1)


def test_corruption_behind_a_spec_without_checks_changes_the_tokens(kit, serve, shelves):
    """What the tests above rest on: a spec that checks nothing, and damage that nobody sees."""
    prompts = kit.prompts(16, 3)
    tier = kit.shelf_tier(64)
    host = serve(settings_for(kit, prompts, 16, tier))
    assert kit.references(prompts) == host.generate(prompts, kit.NEW_TOKENS)
    shelf = shelves[tier["shelf"]]
    for name, block in shelf.items():
        shelf[name] = block[256:] + block[:256]
    assert kit.references(prompts) != host.generate(prompts, kit.NEW_TOKENS)
    assert host.scheduler.counts["tokens_loaded"] > 0
