"""Tests of the connector kit: what the methods of each side promise."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

from wtransfer.connectors.factory import KVConnectorFactory
from wtransfer.connectors.interface import (
    SCHEDULER_METHODS,
    WORKER_METHODS,
    KVConnectorRole,
)
from wtransfer.errors import ConnectorRoleError
from wtransfer.testing.connector_kit import ConnectorKit
from wtransfer.testing.connector_tokens import BLOCK_SIZE, IN_PARTS, SIX_HEADS
from wtransfer.testing.mini_engine.config import EngineConfig
from wtransfer.testing.mini_engine.contract import SchedulerOutput
from wtransfer.testing.mini_engine.reference import some_prompts
from wtransfer.testing.mini_engine.serialize import deserialize, serialize

if TYPE_CHECKING:
    from pathlib import Path

    from wtransfer.testing.connector_host import KitHost
    from wtransfer.testing.connector_kit import MakeSite
    from wtransfer.testing.connector_site import Site
    from wtransfer.testing.mini_engine.contract import Request

OTHERS = {KVConnectorRole.SCHEDULER: WORKER_METHODS, KVConnectorRole.WORKER: SCHEDULER_METHODS}
SPEAKING = ("build_connector_meta", "build_connector_worker_meta")
"""Methods that return metadata."""


class CallTests(ConnectorKit):
    """Each side keeps to its contract."""

    @pytest.mark.parametrize("role", KVConnectorRole)
    def test_methods_of_the_other_side_are_refused(
        self, tmp_path: Path, role: KVConnectorRole
    ) -> None:
        """They share no state, though here they share a process."""
        settings = self._settings(EngineConfig(), tmp_path)
        side: Any = settings.make_connector(role)
        try:
            for name in sorted(OTHERS[role]):
                with pytest.raises(ConnectorRoleError):
                    getattr(side, name)()
        finally:
            side.shutdown()

    @pytest.mark.parametrize("role", KVConnectorRole)
    def test_a_side_need_not_be_told_the_shape_of_the_cache(
        self, tmp_path: Path, role: KVConnectorRole
    ) -> None:
        """Hosts of another generation do not say it."""
        config = self._settings(EngineConfig(), tmp_path).serving_config()
        side = KVConnectorFactory.create_connector(config, role)
        side.shutdown()

    # -- asking

    def test_asking_changes_nothing(self, site: Site) -> None:
        """However often; the answer counts whole blocks, and leaves a token to compute."""
        tap, found = site.finder.scheduler, 0

        def ask(own: Any, request: Request, num_computed: int) -> Any:
            answers = [own(request, num_computed) for _ in range(3)]
            number, later = answers[-1]
            if number is not None:
                known = [answer for answer in answers if answer[0] is not None]
                assert known == [(number, later)] * len(known)
                assert number % BLOCK_SIZE == 0
                assert 0 <= number < request.num_tokens - num_computed
                nonlocal found
                found += number
            return number, later

        tap.instead["get_num_new_matched_tokens"] = ask
        for prompt in [*some_prompts(2), some_prompts(1)[0][: 2 * BLOCK_SIZE]]:
            site.exchange(prompt)
        assert found > 0, "nothing was found"
        site.settle(self.deadline_s)

    def test_who_was_only_asked_about_leaves_nothing(self, site: Site) -> None:
        """A request that gives up before it has got blocks: nothing waits for it, or is held."""
        prompt = some_prompts(1)[0]
        params = site.leave(prompt)
        site.finder.wipe()

        def put_off(own: Any, request: Request, num_computed: int) -> Any:
            own(request, num_computed)
            return None, False

        site.finder.scheduler.instead["get_num_new_matched_tokens"] = put_off
        request = site.begin_finding(prompt, params)
        for _ in range(3):
            site.step()
        site.finder.loop.scheduler.abort(request)
        del site.finder.scheduler.instead["get_num_new_matched_tokens"]
        site.settle(self.deadline_s)
        assert all(request.request_id not in each for each in said(site.finder, "get_finished"))
        site.exchange(prompt)

    def test_what_is_offered_need_not_be_taken(self, site: Site) -> None:
        """The host computes what it was offered, on blocks that nobody else writes to."""
        prompt = some_prompts(1)[0]
        params = site.leave(prompt)

        def decline(own: Any, request: Request, num_computed: int) -> Any:
            own(request, num_computed)
            return 0, False

        site.finder.scheduler.instead["get_num_new_matched_tokens"] = decline
        before = site.finder.counts["tokens_loaded"]
        site.find(prompt, params)
        assert site.finder.counts["tokens_loaded"] == before
        assert received(site.finder) == [Counter()]
        del site.finder.scheduler.instead["get_num_new_matched_tokens"]
        site.exchange(prompt)
        site.settle(self.deadline_s)

    # -- telling

    def test_what_was_told_is_not_told_again(self, site: Site) -> None:
        """Who builds metadata once more gets that of a step in which there is nothing to do."""
        tap, told = site.finder.scheduler, []

        def build(own: Any, output: SchedulerOutput) -> Any:
            first = own(output)
            idle = [own(SchedulerOutput()) for _ in range(2)]
            told.append([settled(each) for each in (first, *idle)])
            return first

        prompt = some_prompts(1)[0]
        params = site.leave(prompt)
        tap.instead["build_connector_meta"] = build
        site.find(prompt, params)
        loads = [each for each in told if each[0] != each[1]]
        assert loads, "nothing was told but what an idle step is told"
        for number, (_, second, third) in enumerate(told):
            assert without_numbers(second) == without_numbers(third), f"of step {number}"

    def test_metadata_is_plain_data(self, site: Site) -> None:
        """Numbers, texts and collections of them; what a user gets can be written as JSON."""
        for prompt in some_prompts(2):
            site.exchange(prompt)
        for host in site.hosts:
            for tap in host.taps:
                for name in (*SPEAKING, "get_handshake_metadata"):
                    for metadata in tap.results(name):
                        assert settled(deserialize(serialize(metadata))) == settled(metadata)
            for _, params in host.scheduler.results("request_finished"):
                assert json.loads(json.dumps(params)) == params

    def test_metadata_is_not_changed_once_it_was_told(self, site: Site) -> None:
        """A host may send it later than it got it."""
        told: list[tuple[str, Any, Any]] = []

        def note(own: Any, *args: Any) -> Any:
            metadata = own(*args)
            told.append((type(metadata).__name__, metadata, settled(metadata)))
            return metadata

        for host in site.hosts:
            for tap in host.taps:
                tap.instead |= dict.fromkeys(SPEAKING, note)
        for prompt in some_prompts(2):
            site.exchange(prompt)
        for name, metadata, before in told:
            assert settled(metadata) == before, f"{name} was changed after it was told"

    def test_metadata_need_not_be_copied(self, site: Site) -> None:
        """Where both sides share a process, a host may hand on the very objects."""
        for host in site.hosts:
            hand_on_objects(host)
        for prompt in some_prompts(2):
            site.exchange(prompt)
            site.exchange(prompt)
        site.settle(self.deadline_s)

    @pytest.mark.parametrize("num_ranks", [1, 2, 3])
    def test_what_ranks_say_adds_up_in_any_order(self, make_site: MakeSite, num_ranks: int) -> None:
        """One after the other, or some of them first."""
        site = make_site(EngineConfig(model=SIX_HEADS, num_ranks=num_ranks))
        site.exchange(some_prompts(1)[0])
        for host in site.hosts:
            steps = zip(
                *(tap.results("build_connector_worker_meta") for tap in host.workers), strict=True
            )
            for each in steps:
                # Those that say nothing are left out, as hosts do.
                metas = [serialize(meta) for meta in each if meta is not None]
                if not metas:
                    continue
                sums = [added(order) for order in itertools.permutations(metas)]
                sums += [added([one, added([*others])]) for one, *others in [metas] if others]
                assert all(settled_plain(one) == settled_plain(sums[0]) for one in sums)

    # -- being told

    def test_every_load_is_named_once(self, make_site: MakeSite) -> None:
        """By every rank; loads that end within their step are not named."""
        site = make_site(EngineConfig(model=SIX_HEADS, num_ranks=2, limits=IN_PARTS.limits))
        for prompt in some_prompts(3):
            site.exchange(prompt)
        assert received(site.finder) == [loads_of(site.finder)] * 2

    def test_a_load_that_is_refused_is_named_as_well(self, site: Site) -> None:
        """It ends, and its blocks are named before it or with it."""
        prompt = some_prompts(1)[0]
        params = site.leave(prompt)
        site.finder.wipe()
        request = site.begin_finding(prompt, params)
        plan = site.finder.loop.scheduler.plan()
        # They are the same weights, and still the plan is of another time.
        site.weights.change(1, 0)
        results = site.finder.ranks.step(plan)
        site.finder.loop.scheduler.update(plan, results)
        site.serve(request)
        site.finder.check(request)
        assert received(site.finder) == [loads_of(site.finder)]
        check_errors_in_time(site.finder)
        site.settle(self.deadline_s)

    def test_nothing_is_said_about_requests_that_load_nothing(self, site: Site) -> None:
        """Prompts shorter than a block, and prompts that nobody has left."""
        for prompt in ([1, 2, 3], *some_prompts(1, seed=5)):
            request = site.begin_finding(prompt, None)
            site.serve(request)
            site.finder.check(request)
        assert received(site.finder) == [Counter()]
        assert all(not each for each in invalid_blocks(site.finder))

    def test_numbers_are_plain_and_counters_rise(self, site: Site) -> None:
        """Names and numbers; those whose names end in ``_total`` never fall."""
        before: dict[str, float] = {}
        for prompt in some_prompts(3):
            site.exchange(prompt)
            after = numbers_of(site)
            fallen = [
                name
                for name, value in before.items()
                if name.endswith("_total") and after.get(name, 0) < value
            ]
            assert fallen == []
            before = after


# -- what was said


def received(host: KitHost) -> list[Counter[str]]:
    """Return, for each rank, how often it has named each request as received."""
    return [
        Counter(each for _, names in tap.results("get_finished") for each in names or ())
        for tap in host.workers
    ]


def said(host: KitHost, name: str) -> list[set[str]]:
    """Return, for each rank, all requests that it has named, as sent or as received."""
    return [
        {each for pair in tap.results(name) for names in pair for each in names or ()}
        for tap in host.workers
    ]


def loads_of(host: KitHost) -> Counter[str]:
    """Return how often each request was to be loaded beyond its step."""
    outlasting, loads = {}, Counter[str]()
    for call in host.scheduler.calls:
        if call.name == "get_num_new_matched_tokens":
            outlasting[call.args[0].request_id] = call.result[1]
        elif call.name == "update_state_after_alloc" and call.args[2]:
            request_id = call.args[0].request_id
            loads[request_id] += outlasting[request_id]
    return +loads


def invalid_blocks(host: KitHost) -> list[set[int]]:
    """Return, for each rank, all blocks that it has named as not loaded."""
    return [set().union(*tap.results("get_block_ids_with_load_errors")) for tap in host.workers]


def check_errors_in_time(host: KitHost) -> None:
    """Fail if a rank names blocks in a later step than their request, of a host with one."""
    for tap in host.workers:
        is_received = is_over = False
        for call in tap.calls:
            if call.name == "get_finished":
                is_received |= bool(call.result[1])
            elif call.name == "clear_connector_metadata":
                is_over = is_received
            elif call.name == "get_block_ids_with_load_errors":
                assert not (is_over and call.result), "blocks were named after their request"


def numbers_of(site: Site) -> dict[str, float]:
    """Return all numbers of all sides."""
    found: dict[str, float] = {}
    for where, host in enumerate(site.hosts):
        for tap in host.taps:
            for name, value in tap.get_stats().items():
                assert isinstance(name, str)
                assert isinstance(value, (int, float)), f"{name} is {value!r}, which is no number"
                found[f"{where} {tap.name} {name}"] = value
    return found


# -- metadata


def settled(metadata: Any) -> Any:
    """Return metadata as something that can be compared: collections without order are sorted."""
    return settled_plain(serialize(metadata))


def settled_plain(plain: Any) -> Any:
    """Return the same of what is plain already."""
    if isinstance(plain, dict):
        return {name: settled_plain(each) for name, each in plain.items()}
    if not isinstance(plain, list):
        return plain
    kind, *rest = map(settled_plain, plain)
    return [kind, *(sorted(rest, key=repr) if kind in ("set", "frozenset", "dict") else rest)]


def without_numbers(settled_metadata: Any) -> Any:
    """Return metadata without its numbers: steps may be counted."""
    if isinstance(settled_metadata, dict):
        return {name: without_numbers(each) for name, each in settled_metadata.items()}
    if isinstance(settled_metadata, list):
        return [without_numbers(each) for each in settled_metadata]
    return 0 if type(settled_metadata) is int else settled_metadata


def added(metas: Any) -> Any:
    """Return what several ranks have said as one: plain to plain."""
    total, *others = map(deserialize, metas)
    for each in others:
        total = total.aggregate(each)
    return serialize(total)


def hand_on_objects(host: KitHost) -> None:
    """Let both sides of a host of one rank have each other's very objects."""
    (worker,) = host.workers
    told: list[Any] = []
    heard: list[Any] = []

    def keep(into: list[Any]) -> Any:
        def call(own: Any, *args: Any) -> Any:
            into[:] = [own(*args)]
            return into[0]

        return call

    def give(own: Any, _: Any) -> Any:
        return own(told[0])

    def answer(own: Any, output: Any) -> Any:
        output.kv_connector_worker_meta = heard[0]
        return own(output)

    host.scheduler.instead |= {
        "build_connector_meta": keep(told),
        "update_connector_output": answer,
    }
    worker.instead |= {
        "build_connector_worker_meta": keep(heard),
        "handle_preemptions": give,
        "bind_connector_metadata": give,
    }
