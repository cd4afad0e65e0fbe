"""The fence around connectors that do not name weights: the view of a request, and the rules."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from driver import BLOCK_SIZE, Instance, Request, answer, names_in, transfer_config

from wtransfer import KVConnectorFactory, ServingConfig
from wtransfer.config import KVCacheConfig, ModelConfig
from wtransfer.connectors.fenced import FencedReport, RequestKey, RequestView
from wtransfer.connectors.interface import KVConnectorOutput, KVConnectorRole
from wtransfer.testing.mini_engine.contract import (
    CachedRequestData,
    NewRequestData,
    SchedulerOutput,
)
from wtransfer.testing.mini_engine.contract import KVCacheBlocks as Blocks
from wtransfer.weight_version import process_weights

PROMPT = list(range(100, 130))
SCHEDULER, WORKER = KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER


# -- the view of a request


class ConstantList:
    """As vLLM has them: neither a list nor equal to one."""

    def __init__(self, values):
        self._values = values

    def __len__(self):
        return len(self._values)

    def __getitem__(self, item):
        return self._values[item]


@pytest.fixture
def key():
    return RequestKey(bytes(range(16)))


def test_ids_are_encoded_by_their_place_and_the_key(key):
    encoded = key.tokens([7] * 1000)
    assert len(set(encoded)) == 1000
    assert all(0 <= each < 2**31 for each in encoded)
    assert key.tokens([7] * 990, 10) == encoded[10:]
    # However much of the stream is drawn at a time.
    other = RequestKey(bytes(range(16)))
    assert [other.tokens([7], place)[0] for place in range(1000)] == encoded
    assert not set(RequestKey(bytes(16)).tokens([7] * 1000)) & set(encoded)


def test_a_store_that_was_filled_by_an_earlier_release_is_still_found(key):
    assert key.tokens([0, 0, 0, 1]) == [1666740667, 2064172537, 571081289, 1432155750]
    assert key.hashes([b"hash"]) == [bytes.fromhex("0be57615")]


def test_requests_that_begin_alike_have_views_that_begin_alike(key):
    one, other = (RequestView(Request("r", [*PROMPT, last]), key) for last in (1, 2))
    assert one.prompt_token_ids[:-1] == other.prompt_token_ids[:-1]
    assert one.prompt_token_ids[-1] != other.prompt_token_ids[-1]


@pytest.mark.parametrize("sequence", [lambda tokens: tokens, ConstantList])
def test_a_view_grows_with_its_request(key, sequence):
    tokens, output = [*PROMPT], []
    request = SimpleNamespace(
        prompt_token_ids=PROMPT,
        all_token_ids=sequence(tokens),
        output_token_ids=sequence(output),
        _all_token_ids=tokens,
        num_tokens=30,
    )
    view = RequestView(request, key)
    seen = view.all_token_ids
    assert seen == view.prompt_token_ids == view._all_token_ids == key.tokens(PROMPT)
    assert view.output_token_ids == []
    for token in (5, 6):
        tokens.append(token)
        output.append(token)
    assert view.all_token_ids is seen
    assert seen == key.tokens([*PROMPT, 5, 6])
    assert view.output_token_ids == seen[30:]
    # As where a session goes on with another prompt, which may end as the one before.
    del tokens[20:]
    tokens += [8, 9]
    assert view.all_token_ids == key.tokens([*PROMPT[:20], 8, 9])
    tokens[21:] = [4, 9]
    assert view.all_token_ids == key.tokens([*PROMPT[:20], 8, 4, 9])
    tokens[21] = 5
    assert view.all_token_ids == key.tokens([*PROMPT[:20], 8, 5, 9])


def test_block_hashes_are_bytes_of_the_same_length(key):
    hashes = [b"a" * 32, b"b" * 16]
    view = RequestView(SimpleNamespace(block_hashes=hashes), key)
    assert list(map(type, view.block_hashes)) == [bytes, bytes]
    assert [len(each) for each in view.block_hashes] == [32, 16]
    assert not set(view.block_hashes) & set(hashes)
    hashes.append(hashes[0])
    assert view.block_hashes[2] == view.block_hashes[0]
    other = RequestView(SimpleNamespace(block_hashes=hashes), RequestKey(bytes(16)))
    assert not set(view.block_hashes) & set(other.block_hashes)


def test_all_else_is_the_requests_own(key):
    request = Request("r", PROMPT, kv_transfer_params={"for": "it"}, cache_salt="s")
    view = RequestView(request, key)
    assert (view.request_id, view.num_tokens, view.cache_salt) == ("r", 30, "s")
    assert view.kv_transfer_params is request.kv_transfer_params
    view.priority = 3
    assert request.priority == 3
    assert not hasattr(view, "block_hashes")
    request.prompt_token_ids = None
    assert view.prompt_token_ids is None


# -- sides, made as a host makes them


def tokens_config(folder, connector="TokensConnector", **options):
    transfer = transfer_config(connector, folder=str(folder), **options)
    return dataclasses.replace(transfer, kv_connector_module_path="tokens_connector")


class Sides:
    """Both sides of a connector of one rank, with the caches of three layers."""

    def __init__(self, folder, **options):
        config = ServingConfig(
            kv_transfer_config=tokens_config(folder, **options),
            cache_config=KVCacheConfig(64, BLOCK_SIZE, 0),
            model_config=ModelConfig("a model", "bfloat16"),
        )
        self.scheduler = KVConnectorFactory.create_connector_v1(config, SCHEDULER)
        self.worker = KVConnectorFactory.create_connector_v1(config, WORKER)
        self.caches = {f"layer.{n}": torch.zeros(64, 1, BLOCK_SIZE, 8) for n in range(3)}
        self.worker.register_kv_caches(self.caches)

    @property
    def inner(self):
        """The connector's own scheduler's side."""
        return self.scheduler.side or self.scheduler

    @property
    def calls(self):
        """What the connector heard of requests, since it was last looked at."""
        heard, self.inner.calls = self.inner.calls, []
        return heard

    def hear(self):
        """Let the scheduler's side hear what the worker computes with."""
        said = self.worker.build_connector_worker_meta()
        self.scheduler.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=said))

    def begin(self, request, blocks=None):
        """Let a request have blocks; return how many of its tokens are to be loaded."""
        self.scheduler.on_new_request(request)
        found, _ = self.scheduler.get_num_new_matched_tokens(request, 0)
        request.block_ids = blocks or list(range(8))
        self.scheduler.update_state_after_alloc(request, Blocks(request.block_ids), found)
        return found

    def plan(self, *new, cached=(), **more):
        """Return the metadata of a step that computes new requests, or goes on with others."""
        output = SchedulerOutput(**more)
        for each in new:
            blocks = (list(each.block_ids),)
            data = NewRequestData(each.request_id, each.prompt_token_ids, blocks, 0)
            output.scheduled_new_reqs.append(data)
        ids = [each.request_id for each in cached]
        places = [each.num_computed for each in cached]
        output.scheduled_cached_reqs = CachedRequestData(ids, set(), [None for _ in ids], places)
        for each in (*new, *cached):
            output.num_scheduled_tokens[each.request_id] = each.num_tokens - each.num_computed
        return self.scheduler.build_connector_meta(output)

    def load(self, told):
        """Begin a step."""
        self.worker.handle_preemptions(told)
        self.worker.bind_connector_metadata(told)
        self.worker.start_load_kv(None)

    def save(self):
        """Let the step compute; whatever is in the caches counts as computed."""
        for name, cache in self.caches.items():
            self.worker.wait_for_layer_load(name)
            self.worker.save_kv_layer(name, cache, None)
        self.worker.wait_for_save()

    def end(self):
        """End the step; return who was received, and the blocks that were not loaded."""
        _, received = self.worker.get_finished(set())
        errors = self.worker.get_block_ids_with_load_errors()
        self.hear()
        self.worker.clear_connector_metadata()
        return received or set(), errors

    def step(self, told):
        self.load(told)
        self.save()
        return self.end()


@pytest.fixture
def sides(tmp_path, weights):
    """Makes sides over one folder; they have heard of the weights."""

    def make(**options):
        made = Sides(tmp_path, **options)
        made.hear()
        return made

    return make


@pytest.fixture
def left(sides, tmp_path):
    """A prompt that somebody has left; 28 tokens of it can be loaded."""
    one = sides()
    request = Request("left", PROMPT)
    assert one.begin(request) == 0
    one.step(one.plan(request))
    assert len(names_in(tmp_path)) == 7
    one.scheduler.request_finished(request, request.block_ids)
    return request


def test_the_object_is_what_the_seed_says(sides):
    made = sides(connector="SeedTokensConnector")
    for side in (made.scheduler, made.worker):
        assert type(side).__name__ == "SeedTokensConnector"
        assert (side.names_weights, type(side).names_weights) == (True, False)


# -- becoming known


def test_while_the_weights_are_not_known_nothing_is_asked_and_nothing_saved(
    tmp_path, weights, left
):
    before = names_in(tmp_path)
    made, request = Sides(tmp_path), Request("r", PROMPT[::-1])
    assert made.begin(request) == 0
    told = made.plan(request)
    assert (made.calls, told.versions, told.inner.saves) == ([], (), [])
    made.step(told)
    # What it has computed meanwhile has no name, whoever asks about it.
    request.num_computed = 29
    assert made.plan(cached=[request]).inner.saves == []
    assert made.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert (made.calls, names_in(tmp_path)) == ([], before)


def test_a_request_becomes_known_when_it_is_asked_about(sides, weights, left):
    made, request = sides(), Request("r", PROMPT)
    made.scheduler.on_new_request(request)
    assert made.calls == []
    # Not under the weights that there were when it came.
    weights.settle("fingerprint-2")
    made.hear()
    assert made.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert made.calls == [("new", "r"), ("asked", "r")]
    assert made.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    assert made.calls == [("asked", "r")]


@pytest.mark.parametrize(
    "particulars",
    [
        {"prompt_embeds": object()},
        {"lora_request": SimpleNamespace(lora_name="a", lora_path="/a")},
        {"mm_features": [SimpleNamespace(identifier=None, mm_position=None)]},
    ],
    ids=["embeddings", "an adapter", "a feature without identifier"],
)
def test_a_request_that_cannot_be_named_is_not_seen(sides, left, particulars):
    made, request = sides(), Request("r", PROMPT, **particulars)
    seen = Request("s", PROMPT)
    assert (made.begin(request), made.begin(seen)) == (0, 28)
    made.step(made.plan(request, seen, preempted_req_ids={"r", "s"}))
    (step,) = made.inner.steps
    assert [each.req_id for each in step.scheduled_new_reqs] == ["s"]
    assert step.num_scheduled_tokens == {"s": 30}
    assert (step.total_num_scheduled_tokens, step.preempted_req_ids) == (30, {"s"})
    assert made.scheduler.request_finished(request, request.block_ids) == (False, None)
    made.plan(finished_req_ids={"r", "t"})
    assert made.inner.steps[-1].finished_req_ids == {"t"}
    assert [call for call in made.calls if "r" in call] == []
    # The next one of this name is another request.
    assert made.begin(Request("r", PROMPT)) == 28


# -- a change of weights


@pytest.fixture(params=["TokensConnector", "SeedTokensConnector"])
def living(request, sides, weights):
    """Sides with a request that is computed in part, and a function that changes the weights."""
    made = sides(connector=request.param, hands_over=True)
    lives = Request("r", PROMPT)
    assert made.begin(lives) == 0
    made.step(made.plan(lives))
    lives.num_computed = 29

    def change(*fingerprints):
        for each in fingerprints:
            weights.settle(each)
            made.hear()

    return made, lives, change


@pytest.mark.parametrize(
    "fingerprints", [("B",), ("B", "fingerprint-1")], ids=["there", "there and back"]
)
def test_a_request_that_lives_through_a_change_is_stale_for_good(living, tmp_path, fingerprints):
    made, request, change = living
    before, _ = names_in(tmp_path), made.calls
    change(*fingerprints)
    request.output_token_ids += PROMPT
    other = Request("s", PROMPT)
    made.begin(other, blocks=list(range(10, 18)))
    assert all("r" not in call for call in made.calls)
    told = made.plan(other, cached=[request])
    assert {each.request_id for each in told.inner.saves} == {"s"}
    assert made.inner.steps[-1].scheduled_cached_reqs.req_ids == []
    assert made.inner.steps[-1].num_scheduled_tokens == {"s": 30}
    # Its blocks are taken away, and it gets others: it stays out, and is not asked about.
    told = made.plan(preempted_req_ids={"r"})
    assert made.inner.steps[-1].preempted_req_ids == {"r"}
    assert made.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    made.scheduler.update_state_after_alloc(request, Blocks([9]), 0)
    assert made.calls == []
    # Nothing of it is saved, and the next instance hears nothing.
    assert made.scheduler.request_finished(request, [9]) == (False, None)
    assert made.calls == [("finished", "r", 0)]
    assert names_in(tmp_path) == before


def test_a_request_that_was_left_out_once_stays_out_though_nothing_has_changed(sides, weights):
    """The connector has missed a step of it."""
    made, request = sides(), Request("r", PROMPT)
    made.begin(request)
    with process_weights.withheld():
        made.hear()
    assert made.plan(request).inner.saves == []
    made.hear()
    request.num_computed = 29
    assert made.plan(cached=[request]).inner.saves == []
    assert made.scheduler.request_finished(request, [1]) == (False, None)


def test_a_request_that_ends_under_its_weights_says_which(living):
    made, request, _ = living
    assert made.scheduler.request_finished(request, [1, 2]) == (
        False,
        {"do_remote_prefill": True, "num_blocks": 2, "remote_weights": "fingerprint-1"},
    )


def test_a_connector_that_says_nothing_to_the_next_instance_says_no_weights(sides, left):
    made, request = sides(), Request("r", PROMPT)
    made.begin(request)
    assert made.scheduler.request_finished(request, [1, 2]) == (False, None)


@pytest.mark.parametrize(
    ("params", "is_asked"),
    [
        ({"do_remote_prefill": True, "remote_weights": "fingerprint-1"}, True),
        ({"do_remote_prefill": True, "remote_weights": "fingerprint-2"}, False),
        ({"do_remote_prefill": True}, False),
        ({"do_remote_prefill": False}, True),
        ({"do_remote_decode": True}, True),
        ("no parameters", True),
    ],
)
def test_what_another_instance_computed_is_asked_for_under_its_weights_only(
    sides, left, params, is_asked
):
    made = sides()
    found = made.begin(Request("r", PROMPT, kv_transfer_params=params))
    assert (found, ("asked", "r") in made.calls) == (28 * is_asked, is_asked)


# -- the worker's side


@pytest.mark.parametrize("change", ["before the step", "after the loads", "before the last save"])
def test_in_a_step_for_other_weights_nothing_is_saved(sides, weights, tmp_path, change):
    made, request = sides(), Request("r", PROMPT)
    made.begin(request)
    told = made.plan(request)
    if change == "before the step":
        weights.settle("B")
    made.load(told)
    if change == "after the loads":
        weights.settle("B")
    for name, cache in made.caches.items():
        made.worker.save_kv_layer(name, cache, None)
    if change == "before the last save":
        weights.settle("B")
    made.worker.wait_for_save()
    made.end()
    assert names_in(tmp_path) == []
    other = Request("s", PROMPT)
    made.begin(other)
    made.step(made.plan(other))
    assert len(names_in(tmp_path)) == 7, "the next one is"


def test_a_step_one_layer_of_which_was_left_out_is_not_saved(sides, weights, tmp_path):
    made, request = sides(), Request("r", PROMPT)
    made.begin(request)
    made.load(made.plan(request))
    for number, (name, cache) in enumerate(made.caches.items()):
        if number == 1:
            with process_weights.withheld():
                made.worker.save_kv_layer(name, cache, None)
        else:
            made.worker.save_kv_layer(name, cache, None)
    made.worker.wait_for_save()
    made.end()
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("change", ["before the step", "within it"])
def test_loads_within_a_step_for_other_weights_have_failed(sides, weights, left, change):
    made, request = sides(), Request("r", PROMPT)
    assert made.begin(request, blocks=list(range(20, 28))) == 28
    told = made.plan(request)
    assert made.inner.loads == []
    if change == "before the step":
        weights.settle("B")
    made.load(told)
    if change == "within it":
        assert made.worker.get_block_ids_with_load_errors() == set()
        weights.settle("B")
    assert made.worker.get_block_ids_with_load_errors() == set(range(20, 27))
    assert made.end() == (set(), set()), "each is named once"


@pytest.mark.parametrize("change", ["before its step", "after its step"])
def test_a_load_across_a_change_is_received_with_its_blocks_as_errors(sides, weights, left, change):
    made, request = sides(outlasts=True), Request("r", PROMPT)
    assert made.begin(request, blocks=list(range(20, 28))) == 28
    told = made.plan()
    if change == "before its step":
        weights.settle("B")
    assert made.step(told) == (set(), set())
    weights.settle("B")
    assert made.step(made.plan()) == ({"r"}, set(range(20, 27)))
    assert made.step(made.plan()) == (set(), set())


def test_a_load_under_the_weights_that_it_was_planned_for_is_good(sides, left):
    made, request = sides(outlasts=True), Request("r", PROMPT)
    assert made.begin(request) == 28
    assert made.step(made.plan()) == (set(), set())
    assert made.step(made.plan()) == ({"r"}, set())


def test_a_load_that_was_promised_under_other_weights_fails(sides, weights, left):
    """The scheduler's side hears of a change after it has answered, and before there are blocks."""
    made, request = sides(), Request("r", PROMPT)
    made.scheduler.on_new_request(request)
    assert made.scheduler.get_num_new_matched_tokens(request, 0) == (28, False)
    weights.settle("B")
    made.hear()
    made.scheduler.update_state_after_alloc(request, Blocks(list(range(20, 28))), 28)
    request.block_ids = list(range(20, 28))
    made.load(made.plan(request))
    assert made.end() == (set(), set(range(20, 27)))


def test_only_the_blocks_that_were_to_be_loaded_are_errors(sides, weights, left):
    """The first are the host's own, and the last are computed."""
    made, request = sides(), Request("r", PROMPT)
    made.scheduler.on_new_request(request)
    assert made.scheduler.get_num_new_matched_tokens(request, 8) == (20, False)
    made.scheduler.update_state_after_alloc(request, Blocks(list(range(20, 28))), 20)
    weights.settle("B")
    made.load(made.plan())
    assert made.end() == (set(), set(range(22, 27)))


def test_a_worker_that_is_no_more_up_to_date_lets_go_of_blocks_all_the_same(
    sides, weights, monkeypatch
):
    made, heard = sides(), []
    monkeypatch.setattr(type(made.worker.side), "handle_preemptions", lambda *a: heard.append(a[1]))
    told = made.plan(preempted_req_ids={"r"})
    weights.settle("B")
    made.worker.handle_preemptions(told)
    assert heard == [told.inner]


# -- between the sides


def test_what_the_connector_says_comes_through(sides, tmp_path, weights):
    made, request = Sides(tmp_path), Request("r", PROMPT)
    # A host may tell the weights again, by the same way; the connector is called once.
    for _ in range(2):
        said = {0: made.worker.get_handshake_metadata()}
        made.scheduler.set_xfer_handshake_metadata(said)
    assert made.inner.met == {0: said[0].inner}
    made.begin(request)
    made.step(made.plan(request))
    assert made.inner.num_saved == 7
    made.step(made.plan())
    assert made.inner.num_saved == 7


def test_what_ranks_say_is_put_together(sides):
    saved = type(sides().worker.side).build_connector_worker_meta
    one, two = (SimpleNamespace(num_saved=number) for number in (1, 2))
    said = [
        FencedReport({0: ("A", 1)}, saved(one)),
        FencedReport({1: None}),
        FencedReport({2: ("B", 3)}),
    ]
    said.append(FencedReport({3: ("A", 2)}, saved(two)))
    total = said[1]
    for each in (said[2], said[0], said[3]):
        total = total.aggregate(each)
    assert total.versions == {0: ("A", 1), 1: None, 2: ("B", 3), 3: ("A", 2)}
    assert total.inner.number == 3


def test_a_step_shows_encoded_ids_wherever_it_has_some(sides):
    made, new, old = sides(), Request("new", PROMPT), Request("old", PROMPT, 3)
    for each in (new, old):
        made.begin(each)
    made.plan(old)
    old.num_computed, old.output_token_ids = 30, [5, 6]
    hidden = Request("hidden", PROMPT, lora_request=object())
    made.begin(hidden)
    output = SchedulerOutput(num_scheduled_tokens={"new": 30, "hidden": 1, "old": 2})
    data = NewRequestData("new", PROMPT, ([0],), 0)
    data.prefill_token_ids = PROMPT
    output.scheduled_new_reqs.append(data)
    cached = CachedRequestData(["hidden", "old"], {"hidden", "old"}, [None, ([1],)], [29, 30])
    cached.new_token_ids = [[1], [5, 6]]
    cached.all_token_ids = {"hidden": PROMPT, "old": [*PROMPT, 5, 6]}
    output.scheduled_cached_reqs = cached
    before = dataclasses.asdict(output)
    made.scheduler.build_connector_meta(output)
    seen = made.inner.steps[-1]
    views = {name: made.inner.requests[name] for name in ("new", "old")}
    (seen_new,) = seen.scheduled_new_reqs
    assert seen_new.prompt_token_ids == seen_new.prefill_token_ids
    assert seen_new.prompt_token_ids == views["new"].prompt_token_ids != PROMPT
    seen = seen.scheduled_cached_reqs
    assert (seen.req_ids, seen.resumed_req_ids) == (["old"], {"old"})
    assert (seen.new_block_ids, seen.num_computed_tokens) == ([([1],)], [30])
    assert seen.all_token_ids == {"old": views["old"].all_token_ids}
    assert seen.new_token_ids == [views["old"].all_token_ids[30:]]
    assert dataclasses.asdict(output) == before, "the host's own is as it was"


def test_a_connector_may_call_methods_of_its_own(sides, weights, left, monkeypatch):
    """What it learns then is its own: the errors of the fence are for the host."""
    cls = type(sides(connector="SeedTokensConnector").worker)
    begin = cls.start_load_kv

    def begin_anew(self, forward_context):
        assert self.get_block_ids_with_load_errors() == set()
        begin(self, forward_context)

    monkeypatch.setattr(cls, "start_load_kv", begin_anew)
    made, request = sides(connector="SeedTokensConnector"), Request("r", PROMPT)
    assert made.begin(request) == 28
    told = made.plan(request)
    weights.settle("B")
    made.load(told)
    assert made.end() == (set(), set(range(7)))


# -- whole instances


@pytest.mark.parametrize("outlasts", [False, True])
def test_instances_share_under_equal_weights_only(tmp_path, weights, outlasts):
    """FAULTS 50: over one folder, in both orders."""

    def serve(name, prompt):
        # No model, and no memory, that a later one could have.
        process_weights.begin_anew()
        held = process_weights.hold(name)
        config = tokens_config(tmp_path, outlasts=outlasts)
        with Instance(config, weights=name, num_ranks=2) as made:
            request = made.serve("r", prompt, 2)
        held.close()
        assert request.output_token_ids == answer(prompt, 2, num_ranks=2, weights=name)
        return request.num_loaded

    other = PROMPT[::-1]
    assert [serve("A", PROMPT), serve("B", PROMPT), serve("B", other)] == [0, 0, 0]
    assert [serve("A", other), serve("A", PROMPT), serve("B", PROMPT)] == [0, 28, 28]


def media(identifier):
    return {
        "mm_features": [
            SimpleNamespace(identifier=identifier, mm_position=SimpleNamespace(offset=2))
        ]
    }


def test_tenants_and_pictures_do_not_share(tmp_path, weights):
    """FAULTS 51."""
    kinds = [{}, {"cache_salt": "a"}, {"cache_salt": "b"}, media("one"), media("other")]
    with Instance(tokens_config(tmp_path)) as made:
        for number, each in enumerate([*kinds, *kinds]):
            request = made.serve(f"r{number}", PROMPT, **each)
            assert request.num_loaded == (28 if number >= len(kinds) else 0)
        adapter = SimpleNamespace(lora_name="a", lora_path="/a")
        for name in "ab":
            assert made.serve(name, PROMPT, lora_request=adapter).num_loaded == 0


def test_other_models_and_numbers_of_ranks_do_not_share(tmp_path, weights):
    def serve(**more):
        with Instance(tokens_config(tmp_path), **more) as made:
            return made.serve("r", PROMPT).num_loaded

    different = [{}, {"model": "another"}, {"dtype": torch.float32}, {"num_ranks": 2}]
    assert [serve(**each) for each in different] == [0, 0, 0, 0]
    assert [serve(**each) for each in different] == [28, 28, 28, 28]
