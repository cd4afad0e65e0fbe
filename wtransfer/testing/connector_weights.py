"""Tests of the connector kit: what one set of weights has computed is served under no other."""

from __future__ import annotations

import functools
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from wtransfer.testing.connector_calls import invalid_blocks
from wtransfer.testing.connector_kit import ConnectorKit
from wtransfer.testing.connector_tokens import BLOCK_SIZE, IN_PARTS
from wtransfer.testing.mini_engine.reference import some_prompts

if TYPE_CHECKING:
    from collections.abc import Callable

    from wtransfer.testing.connector_host import Tap, Weights
    from wtransfer.testing.connector_kit import MakeSite
    from wtransfer.testing.connector_site import Site

Moment = tuple[str, str, str, int]
"""Before which call weights change: while something is left or found, on which side, which method,
and how often it has been called meanwhile."""
CHANGES = {"there": (1,), "there and back": (1, 0)}
"""From which seeds weights are drawn, one after the other."""
QUERIES = ("get_finished_count", "get_stats", "has_pending_push_work", "take_events")
"""Methods that only answer."""
FOLLOWING = (
    "clear_connector_metadata",
    "get_block_ids_with_load_errors",
    "handle_preemptions",
    "on_new_request",
)
"""Methods before which a change is much the same as before the one that comes next."""


class WeightsTests(ConnectorKit):
    """Weights may change whenever they like (FAULTS 31, 47)."""

    def test_other_weights_find_nothing(self, site: Site) -> None:
        """And those that computed it may find it, when they are back."""
        prompt = some_prompts(1)[0]
        params = site.leave(prompt)
        for seed in (1, 2):
            site.weights.change(seed)
            # At first the scheduler does not know of it, when it is asked; then it does.
            for _ in range(seed - 1):
                site.step()
            before = site.finder.counts["tokens_loaded"]
            site.find(prompt, params)
            assert site.finder.counts["tokens_loaded"] == before
        _check_under(site, prompt, params, 0)
        site.exchange(prompt)

    @pytest.mark.parametrize("seeds", [(0, 1), (1, 0)], ids=["in one order", "in the other"])
    def test_a_store_may_outlive_its_weights(
        self, make_site: MakeSite, weights: Weights, seeds: tuple[int, int]
    ) -> None:
        """A later instance, which never had them, finds nothing of theirs (FAULTS 50)."""
        prompt, params = some_prompts(1)[0], None
        for seed in seeds:
            weights.change(seed)
            site = make_site()
            site.find(prompt, params)
            assert site.finder.counts["tokens_loaded"] == 0
            params = site.leave(prompt)
        # One with the first weights shares what the first has left, if instances share at all.
        weights.change(seeds[0])
        site = make_site()
        site.find(prompt)
        assert site.finder.counts["tokens_loaded"] > 0 or not self.is_shared

    @pytest.mark.parametrize("seeds", CHANGES.values(), ids=CHANGES)
    def test_a_request_that_lives_through_a_change_leaves_nothing_wrong(
        self, make_site: MakeSite, seeds: tuple[int, ...]
    ) -> None:
        """Some of its blocks are of the one, some of the other, and some of both."""
        site = make_site(IN_PARTS)
        for num_steps, prompt in enumerate(some_prompts(6), start=1):
            site.weights.change(0)
            request = site.begin_leaving(prompt)
            for _ in range(num_steps):
                site.step()
            for seed in seeds:
                site.weights.change(seed)
                # The first is refused, the second computes some of it.
                site.step()
                site.step()
            site.serve(request)
            _check_under(site, prompt, site.params_of(request), seeds[-1], 1, 0)

    @pytest.mark.parametrize("seeds", CHANGES.values(), ids=CHANGES)
    def test_a_plan_may_come_too_late(self, site: Site, seeds: tuple[int, ...]) -> None:
        """The scheduler hears of a change only after it has planned to load what was left."""
        for prompt in some_prompts(2):
            site.weights.change(0)
            params = site.leave(prompt)
            site.finder.wipe()
            request = site.begin_finding(prompt, params)
            plan = site.finder.loop.scheduler.plan()
            site.weights.change(*seeds)
            planned = list(request.block_ids[: request.num_external_tokens // BLOCK_SIZE])
            results = site.finder.ranks.step(plan)
            site.finder.loop.scheduler.update(plan, results)
            site.serve(request)
            # Nothing of it had been computed: it began anew.
            site.finder.check(request)
            assert invalid_blocks(site.finder)[0].issuperset(planned), "they were loaded"
            _check_under(site, prompt, params, seeds[-1], 1, 0)

    def test_weights_may_change_between_any_two_calls(self, make_site: MakeSite) -> None:
        """Of either side, while something is left and while it is found; each kind of call once."""
        site = make_site(IN_PARTS)
        moments = _moments(site)
        # Before its second call, where there is one, a side has something to do.
        kinds = dict.fromkeys(moment[:3] for moment in moments if moment[2] not in FOLLOWING)
        chosen = [(*kind, min(2, max(m[3] for m in moments if m[:3] == kind))) for kind in kinds]
        for number, moment in enumerate(chosen):
            # Back within a call of the model's thread: then nothing was computed in between.
            goes_back = number % 2 and " S" in moment[1]
            _change_at(site, moment, CHANGES["there and back" if goes_back else "there"], number)
        site.exchange(some_prompts(1)[0])

    @pytest.mark.slow
    @pytest.mark.nightly
    @pytest.mark.parametrize("seeds", CHANGES.values(), ids=CHANGES)
    def test_weights_may_change_before_every_single_call(
        self, make_site: MakeSite, seeds: tuple[int, ...]
    ) -> None:
        """The same, without leaving one out."""
        site = make_site(IN_PARTS)
        for number, moment in enumerate(_moments(site)):
            _change_at(site, moment, seeds, number)


def _check_under(
    site: Site, prompt: list[int], params: dict[str, object] | None, *seeds: int
) -> None:
    """Find a prompt under several weights, one after the other."""
    for seed in seeds:
        if seed != site.weights.seed:
            site.weights.change(seed)
        # A scheduler that has not heard of a change finds nothing for the first that asks.
        site.step()
        site.find(prompt, params)


def _moments(site: Site) -> list[Moment]:
    """Return before which calls weights may change, while one prompt is left and found."""
    met: list[Moment] = []
    _live(site, some_prompts(1)[0], met.append)
    return met


def _change_at(site: Site, moment: Moment, seeds: tuple[int, ...], number: int) -> None:
    def hear(now: Moment) -> None:
        if now == moment:
            site.weights.change(*seeds)

    if site.weights.seed:
        site.weights.change(0)
    prompt = some_prompts(1, seed=1000 + number)[0]
    # There and back, everything that was computed is of the weights that are there now, or wrong.
    _check_under(site, prompt, _live(site, prompt, hear), *dict.fromkeys((seeds[-1], 0)))


def _live(
    site: Site, prompt: list[int], hear: Callable[[Moment], None]
) -> dict[str, object] | None:
    """Leave and find a prompt, whatever comes of it, with somebody hearing every call.

    Returns:
        What the finder's request had to say.
    """
    counted: Counter[tuple[str, str, str]] = Counter()
    phase = ""

    def before(where: int, tap: Tap, method: str) -> None:
        is_busy = site.hosts[where] is (site.leaver if phase == "leaving" else site.finder)
        if method in QUERIES or not is_busy:
            return
        kind = phase, f"{where} {tap.name}", method
        counted[kind] += 1
        hear((*kind, counted[kind]))

    for where, host in enumerate(site.hosts):
        for tap in host.taps:
            tap.before.append(functools.partial(before, where))
    phase = "leaving"
    request = site.begin_leaving(prompt)
    site.serve(request)
    params = site.params_of(request)
    phase = "finding"
    site.finder.wipe()
    site.serve(site.begin_finding(prompt, params))
    for host in site.hosts:
        for tap in host.taps:
            tap.before.clear()
    return params
