"""Tests of the connector kit: whatever is loaded, keys, values and tokens are those without it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from wtransfer.testing.connector_kit import ConnectorKit
from wtransfer.testing.mini_engine.config import CacheShape, EngineConfig, Limits, ModelShape
from wtransfer.testing.mini_engine.reference import some_prompts

if TYPE_CHECKING:
    from wtransfer.testing.connector_kit import MakeSite
    from wtransfer.testing.connector_site import Site

BLOCK_SIZE = 16
IN_PARTS = EngineConfig(limits=Limits(max_num_batched_tokens=24))
"""A host that computes a prompt in several steps."""
SIX_HEADS = ModelShape(width=96, num_heads=6, num_kv_heads=6)
"""A model that two and three ranks can share."""


class TokenTests(ConnectorKit):
    """What comes out is right."""

    @pytest.mark.parametrize("block_size", [1, 16, 128])
    def test_tokens_are_those_without_it(self, make_site: MakeSite, block_size: int) -> None:
        """And so are the keys and values, whether they were computed or loaded."""
        site = make_site(EngineConfig(cache=CacheShape(block_size, 4096 // block_size)))
        for prompt in some_prompts(2, unit=max(block_size, 16)):
            site.exchange(prompt)

    def test_something_is_loaded(self, site: Site) -> None:
        """It is worth its while."""
        for prompt in some_prompts(2):
            before = site.finder.counts["tokens_loaded"]
            site.exchange(prompt)
            assert site.finder.counts["tokens_loaded"] > before

    def test_loads_write_into_their_own_blocks_only(self, site: Site) -> None:
        """Everything else in the cache is as it was."""
        prompt = some_prompts(1)[0]
        params = site.leave(prompt)
        site.finder.wipe()
        before = [[layer.clone() for layer in cache.layers] for cache in site.finder.caches]
        request = site.begin_finding(prompt, params)
        site.serve(request)
        site.finder.check(request)
        for cache, layers in zip(site.finder.caches, before, strict=True):
            for layer, expected in zip(cache.layers, layers, strict=True):
                expected[request.block_ids] = layer[request.block_ids]
                assert layer.equal(expected), f"others than {request.block_ids} were written"

    def test_long_prompts_are_computed_in_parts(self, make_site: MakeSite) -> None:
        """What one step has computed may be handed on before the next one."""
        site = make_site(IN_PARTS)
        for prompt in some_prompts(2):
            site.exchange(prompt)

    def test_requests_run_side_by_side(self, site: Site) -> None:
        """Some of them the same, and more than run at once."""
        prompts = [*some_prompts(5), *some_prompts(5)]
        left = [site.begin_leaving(prompt) for prompt in prompts]
        site.serve(*left)
        for request in left:
            site.leaver.check(request)
        site.finder.wipe()
        found = [
            site.begin_finding(prompt, site.params_of(request))
            for prompt, request in zip(prompts, left, strict=True)
        ]
        site.serve(*found)
        for request in found:
            site.finder.check(request)

    def test_requests_give_way_to_each_other(self, make_site: MakeSite) -> None:
        """Blocks are taken away, and given to others, while there is work on them."""
        # They begin with two blocks each, and end with three. The first is the first to need one
        # more, and takes it from the last, in the middle of a block.
        prompts = [
            prompt[: 2 * BLOCK_SIZE - 5 - 2 * number]
            for number, prompt in enumerate(some_prompts(6))
        ]
        settings = EngineConfig(
            cache=CacheShape(BLOCK_SIZE, 2 * len(prompts) + 1),
            limits=Limits(max_num_batched_tokens=40),
        )
        site = make_site(settings)
        left = [site.begin_leaving(prompt) for prompt in prompts]
        site.serve(*left)
        site.finder.wipe()
        found = [
            site.begin_finding(request.prompt_token_ids, site.params_of(request), 24)
            for request in left
        ]
        site.serve(*found)
        assert site.finder.counts["preemptions"] > 1, "hardly anybody had to give way"
        for request in left:
            site.leaver.check_output(request)
        for request in found:
            site.finder.check_output(request)
        # What they left is right, also of what they said.
        for request in found:
            site.exchange(request.all_token_ids)

    @pytest.mark.parametrize("num_cached", [1, 2])
    def test_a_part_of_a_prompt_may_be_there_already(self, site: Site, num_cached: int) -> None:
        """The first blocks of a prompt are in the host's own cache, the others come from here."""
        for prompt in some_prompts(2):
            params = site.leave(prompt)
            site.finder.wipe()
            prefix = site.finder.loop.submit([*prompt[: num_cached * BLOCK_SIZE], 1], 1)
            site.serve(prefix)
            before = site.finder.counts["tokens_cached"]
            request = site.begin_finding(prompt, params)
            site.serve(request)
            site.finder.check(request)
            assert site.finder.counts["tokens_cached"] - before == num_cached * BLOCK_SIZE

    @pytest.mark.parametrize("num_ranks", [2, 3])
    def test_ranks_share_a_request(self, make_site: MakeSite, num_ranks: int) -> None:
        """Each has its own heads of every block."""
        site = make_site(EngineConfig(model=SIX_HEADS, num_ranks=num_ranks))
        for prompt in some_prompts(2):
            site.exchange(prompt)
