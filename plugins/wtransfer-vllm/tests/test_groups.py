"""Prefixes of models with several KV cache groups: found as vLLM's own prefix cache finds them."""

import itertools
import random
import types
import warnings

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM is not installed: tests/make_env.py ENV")

from wtransfer.config import KVCacheGroup
from wtransfer.kv.groups import first_needed, longest_prefix

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # those of what vLLM imports
    from vllm.v1.core.kv_cache_coordinator import get_kv_cache_coordinator
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        KVCacheConfig,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

BLOCK_SIZE = 4
PAGE = {"block_size": BLOCK_SIZE, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}
NULL = types.SimpleNamespace(block_id=0)


class Pool:
    """What vLLM's managers read of its block pool: blocks by hash and group."""

    hash_block_size = BLOCK_SIZE
    null_block = NULL

    def __init__(self, kept):
        self.kept = kept

    def get_cached_block(self, block_hash, group_ids):
        number = int.from_bytes(block_hash, "big")
        there = all(number in self.kept[group] for group in group_ids)
        return [(group, number) for group in group_ids] if there else None


def hashes(count):
    return [number.to_bytes(32, "big") for number in range(count)]


def subsets(count):
    for mask in range(1 << count):
        yield {number for number in range(count) if mask >> number & 1}


@pytest.mark.parametrize("window", [2, 4, 5, 6, 8, 9, 13, 64])
def test_a_window_finds_what_vllm_finds_whatever_is_kept(window):
    spec = SlidingWindowSpec(sliding_window=window, **PAGE)
    count = 7
    for kept in subsets(count):
        (blocks,), hit = SlidingWindowManager.find_longest_cache_hit(
            *(hashes(count), count * BLOCK_SIZE, [0], Pool([kept]), spec),
            drop_eagle_block=False,
            alignment_tokens=BLOCK_SIZE,
        )
        found = longest_prefix([window], BLOCK_SIZE, 0, count, lambda _, n, kept=kept: n in kept)
        assert found == (hit // BLOCK_SIZE, False)
        # vLLM has no block below what the tokens to come attend to, and each from there on.
        needed = first_needed(window, hit, BLOCK_SIZE)
        assert [block is NULL for block in blocks][needed:] == [False] * (len(blocks) - needed)


@pytest.mark.parametrize("window", [1, 2, 5, 8, 30])
def test_vllm_releases_the_blocks_that_are_not_needed_and_no_other(window):
    spec = SlidingWindowSpec(sliding_window=window, **PAGE)
    skipped = types.SimpleNamespace(sliding_window=spec.sliding_window, extra_retained_tokens=0)
    for num_tokens in range(64):
        released = SlidingWindowManager.get_num_skipped_tokens(skipped, num_tokens) // BLOCK_SIZE
        assert released == first_needed(window, num_tokens, BLOCK_SIZE)


FULL = KVCacheGroup()
KINDS = {
    "full, window": [FULL, KVCacheGroup(window=6)],
    "window, full": [KVCacheGroup(window=9), FULL],
    "two windows": [KVCacheGroup(window=5), KVCacheGroup(window=13)],
    "two full, two windows": [FULL, KVCacheGroup(window=6), FULL, KVCacheGroup(window=13)],
    "states, full": [KVCacheGroup(has_states=True), FULL],
    "full, window, states": [FULL, KVCacheGroup(window=6), KVCacheGroup(has_states=True)],
}


def spec_of(group):
    """Return a group in vLLM's words."""
    if group.has_states:
        shapes = {"shapes": ((2, 2),), "dtypes": (torch.float32,)}
        return MambaSpec(block_size=BLOCK_SIZE, mamba_cache_mode="align", **shapes)
    if group.window is None:
        return FullAttentionSpec(**PAGE)
    return SlidingWindowSpec(sliding_window=group.window, **PAGE)


@pytest.mark.parametrize("kind", KINDS)
def test_several_groups_find_what_vllm_finds(kind):
    windows = [group.reach for group in KINDS[kind]]
    specs = [KVCacheGroupSpec([f"layer {n}"], spec_of(each)) for n, each in enumerate(KINDS[kind])]
    coordinator = get_kv_cache_coordinator(
        KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=specs),
        max_model_len=64,
        max_in_flight_tokens=64,
        use_eagle=False,
        enable_caching=True,
        enable_kv_cache_events=False,
        dcp_world_size=1,
        pcp_world_size=1,
        scheduler_block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )
    drawn, count = random.Random(1), 8
    lengths = set()
    for density in itertools.chain(*[[0.5, 0.8, 0.9, 0.95]] * 500):
        kept = [{n for n in range(count) if drawn.random() < density} for _ in windows]
        for manager in coordinator.single_type_managers:
            manager.block_pool = Pool(kept)
        _, hit, _ = coordinator.find_longest_cache_hit(hashes(count), count * BLOCK_SIZE)
        found = longest_prefix(windows, BLOCK_SIZE, 0, count, lambda g, n, kept=kept: n in kept[g])
        assert found == (hit // BLOCK_SIZE, False)
        lengths.add(found[0])
    assert lengths == set(range(count + 1))
