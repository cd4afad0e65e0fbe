"""Tests of the connector kit: what goes wrong is a miss, and leaves nothing behind."""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import xxhash

from wtransfer.connectors.interface import KVConnectorOutput
from wtransfer.testing.connector_calls import check_errors_in_time, loads_of, received
from wtransfer.testing.connector_kit import ConnectorKit
from wtransfer.testing.connector_tokens import IN_PARTS
from wtransfer.testing.mini_engine.config import EngineConfig
from wtransfer.testing.mini_engine.reference import some_prompts
from wtransfer.testing.mini_engine.serialize import deserialize, serialize

if TYPE_CHECKING:
    from wtransfer.testing.connector_host import KitHost
    from wtransfer.testing.connector_kit import MakeSite
    from wtransfer.testing.connector_site import Site
    from wtransfer.testing.mini_engine.contract import Request

NUM_STAGES = 8
"""Steps after each of which a request is aborted once."""


class FaultTests(ConnectorKit):
    """Whatever happens, the next request is served, and rightly."""

    # -- notices

    def test_notices_that_come_again_change_nothing(self, site: Site) -> None:
        """Twice, late, and in any order (FAULTS 28)."""
        for host in site.hosts:
            host.scheduler.instead["update_connector_output"] = repeating()
        prompts = [*some_prompts(3), *some_prompts(3)]
        for prompt in prompts:
            site.exchange(prompt)
        assert site.finder.counts["tokens_loaded"] > 0
        site.weights.change(1)
        for prompt in prompts:
            site.exchange(prompt)
        site.settle(self.deadline_s)

    def test_notices_about_nobody_change_nothing(self, site: Site) -> None:
        """Neither about requests that never were, nor about blocks that nobody has."""
        nobody = {"nobody", "request-0-of-another-time"}

        def tell_more(own: Any, output: KVConnectorOutput) -> None:
            own(KVConnectorOutput(set(nobody), set(nobody), None, {0, 10**6}, set(nobody)))
            own(output)

        def ask_more(own: Any, finished: set[str]) -> Any:
            return own(finished | nobody)

        prompts = some_prompts(3)
        for host in site.hosts:
            host.scheduler.instead["update_connector_output"] = tell_more
            for tap in host.workers:
                tap.instead["get_finished"] = ask_more
        for prompt in [*prompts, *prompts]:
            site.exchange(prompt)
        assert not {each for host in site.hosts for each in nobody & named(host)}
        for host in site.hosts:
            del host.scheduler.instead["update_connector_output"]
        site.exchange(prompts[0])
        assert site.finder.counts["tokens_loaded"] > 0
        site.settle(self.deadline_s)

    # -- the end of a request

    @pytest.mark.parametrize("where", ["leaver", "finder"])
    def test_requests_may_be_aborted_at_any_time(self, make_site: MakeSite, where: str) -> None:
        """After any step, twice; no block is lost, and who comes next is served rightly."""
        site = make_site(IN_PARTS)
        prompts = some_prompts(NUM_STAGES)
        host = getattr(site, where)
        for num_steps, prompt in enumerate(prompts):
            if where == "finder":
                params = site.leave(prompt)
                site.finder.wipe()
                request = site.begin_finding(prompt, params)
            else:
                request = site.begin_leaving(prompt)
            for _ in range(num_steps):
                site.step()
            for _ in range(2):
                host.loop.scheduler.abort(request)
            # Whatever is free now is overwritten, also under the hands of who still reads it.
            host.wipe()
            site.serve(request)
        for prompt in prompts:
            site.exchange(prompt)
        site.settle(self.deadline_s)

    def test_blocks_that_are_kept_come_back(self, make_site: MakeSite) -> None:
        """Though nobody comes for them."""
        site = make_site(IN_PARTS)
        for prompt in some_prompts(4):
            site.leave(prompt)
        site.settle(self.deadline_s)

    # -- steps that do not count

    def test_a_refused_step_leaves_nothing(self, site: Site) -> None:
        """What it would have computed is not there; nobody may find it."""
        prompt = some_prompts(1)[0]
        request, plan = self._planned(site, prompt)
        site.weights.change(1, 0)
        self._not_counted(site, request, plan)

    def test_a_step_whose_loads_fail_late_leaves_nothing(self, site: Site) -> None:
        """All layers were computed, on blocks that turned out to be wrong."""
        prompt = some_prompts(1)[0]
        request, plan = self._planned(site, prompt)
        # Other tokens stand for the wrong blocks: what the layers compute is wrong.
        spans = [
            msgspec.structs.replace(span, tokens=[token ^ 1 for token in span.tokens])
            for span in plan.spans
        ]
        plan = msgspec.structs.replace(plan, loads_first=True, spans=spans)
        worker = site.leaver.ranks.workers[0]
        has_errors, answers = (
            worker.has_load_errors,
            itertools.chain([False], itertools.repeat(True)),
        )
        worker.has_load_errors = lambda: has_errors() or next(answers)
        self._not_counted(site, request, plan)
        worker.has_load_errors = has_errors

    def _planned(self, site: Site, prompt: list[int]) -> tuple[Request, Any]:
        """Return a request that leaves something, and the step that computes it."""
        # Before its first step, a host knows of no weights.
        site.step()
        request = site.begin_leaving(prompt)
        plan = site.leaver.loop.scheduler.plan()
        assert plan.spans
        return request, plan

    def _not_counted(self, site: Site, request: Request, plan: Any) -> None:
        """Take a step that does not count, abort its request, and find nothing of it."""
        host, prompt = site.leaver, request.prompt_token_ids
        host.spoil(request.block_ids)
        results = host.ranks.step(plan)
        assert all(result.tokens is None for result in results)
        host.spoil(request.block_ids)
        host.loop.scheduler.update(plan, results)
        host.loop.scheduler.abort(request)
        site.serve(request)
        before = site.finder.counts["tokens_loaded"]
        site.find(prompt, site.params_of(request))
        assert site.finder.counts["tokens_loaded"] == before
        site.exchange(prompt)

    # -- damage

    def test_what_is_damaged_is_a_miss(self, site: Site) -> None:
        """It is computed afresh (FAULTS 32), and a store then keeps whole ones. Needs `damage`."""
        prompts = some_prompts(3)
        left = [site.leave(prompt) for prompt in prompts]
        if not self.damage(site):
            pytest.skip("damage() is not overridden: what is kept cannot be damaged")
        before = site.finder.counts["tokens_loaded"]
        for prompt, params in zip(prompts, left, strict=True):
            site.find(prompt, params)
        after = site.finder.counts["tokens_loaded"]
        whole = sum(len(prompt) // 16 * 16 for prompt in prompts)
        assert after - before < whole, "nothing was damaged that was then asked for"
        assert received(site.finder) == [loads_of(site.finder)]
        for prompt in prompts if self.kind == "store" else ():
            site.exchange(prompt)
            before = site.finder.counts["tokens_loaded"]
            site.exchange(prompt)
            assert site.finder.counts["tokens_loaded"] > before, "the damaged ones are still kept"
        site.settle(self.deadline_s)

    @pytest.mark.parametrize("policy", ["recompute", "fail"])
    def test_a_failed_load_is_dealt_with_as_the_user_wants(
        self, make_site: MakeSite, policy: str
    ) -> None:
        """The request is computed, or fails; never is it served from wrong blocks."""
        site = make_site(EngineConfig(on_load_failure=policy))
        prompt = some_prompts(1)[0]
        params = site.leave(prompt)
        if not self.damage(site):
            pytest.skip("damage() is not overridden: what is kept cannot be damaged")
        site.finder.wipe()
        request = site.begin_finding(prompt, params)
        site.serve(request)
        num_failed = site.finder.counts["loads_failed"]
        if policy == "fail" and num_failed:
            assert request.state == "failed"
        else:
            site.finder.check(request)
        check_errors_in_time(site.finder)
        site.settle(self.deadline_s)

    def test_blocks_of_one_hash_are_told_apart(
        self, make_site: MakeSite, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A hash is no proof (FAULTS 30). Needs `weaken` where names are its own affair."""
        seen: dict[bytes, bytes] = {}

        def weak(data: bytes) -> bytes:
            return seen.setdefault(data, xxhash.xxh3_64_digest(data)[:1] + b"\0")

        self.weaken(monkeypatch, weak)
        site = make_site(hash_function=xxhash.xxh3_128_digest)
        prompts = [prompt for seed in range(12) for prompt in some_prompts(1, seed=seed)]
        for _ in range(2):
            for prompt in prompts:
                site.exchange(prompt)
        if not seen:
            pytest.skip("weaken() is not overridden: names are not made by this hash function")
        assert len(set(seen.values())) < len(seen), "there was no collision"


def repeating() -> Any:
    """Return what tells a scheduler's side everything twice, and old things again and again."""
    told: list[Any] = []
    drawn = random.Random(3)  # noqa: S311  # no secret

    def call(own: Any, output: KVConnectorOutput) -> None:
        told.append(serialize(vars(output)))
        for _ in range(2):
            own(KVConnectorOutput(**deserialize(told[-1])))
        for old in drawn.sample(told, min(3, len(told))):
            own(KVConnectorOutput(**deserialize(old)))
        # The host passes the same word on as before; the last that is heard is what holds.
        own(output)

    return call


def named(host: KitHost) -> set[str]:
    """Return all requests that any rank has named, as sent or as received."""
    return {
        each
        for tap in host.workers
        for pair in tap.results("get_finished")
        for names in pair
        for each in names or ()
    }
