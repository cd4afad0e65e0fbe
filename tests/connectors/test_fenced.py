"""The fence around connectors that do not name weights: the view of a request, and the rules."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from host import names_in
from sides import step

from wtransfer.connectors.fenced import RequestKey, RequestView
from wtransfer.testing.mini_engine.contract import (
    CachedRequestData,
    NewRequestData,
    Request,
    SchedulerOutput,
)
from wtransfer.weight_version import process_weights

PROMPT = list(range(100, 130))


def ask(name="r", prompt=PROMPT, params=None, **particulars):
    """Return a request with particulars of its own."""
    request = Request(name, prompt, 100, params)
    vars(request).update(particulars)
    return request


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
    one, other = (RequestView(ask("r", [*PROMPT, last]), key) for last in (1, 2))
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
    request = ask(params={"for": "it"}, cache_salt="s")
    view = RequestView(request, key)
    assert (view.request_id, view.num_tokens, view.cache_salt) == ("r", 30, "s")
    assert view.kv_transfer_params is request.kv_transfer_params
    view.priority = 3
    assert request.priority == 3
    assert not hasattr(view, "block_hashes")
    request.prompt_token_ids = None
    assert view.prompt_token_ids is None


# -- sides, made as a host makes them


def inner(made):
    """Return the connector's own scheduler's side."""
    return made.scheduler.side or made.scheduler


def calls(made):
    """Return what the connector heard of requests, since it was last looked at."""
    heard, inner(made).calls = list(inner(made).calls), []
    return heard


def plan(made, *new, cached=(), **more):
    """Return the metadata of a step that computes new requests, or the last token of others."""
    return made.tell(
        step(
            [(request, 0, request.num_tokens) for request in new],
            [(request, 29, request.num_tokens - 29) for request in cached],
            **more,
        )
    )


def end(made):
    """End a step of one rank; return the requests that it received, and its load errors."""
    said = made.end()
    made.hear(said)
    return said[0].received, said[0].bad


def run(made, told):
    made.load(told)
    made.save()
    return end(made)


@pytest.fixture
def make(sides, tmp_path):
    """Maker of sides over one folder."""

    def made(num_ranks=1, connector="TokensConnector", **options):
        places = {"module_path": "tokens_connector", "folder": str(tmp_path), "num_blocks": 64}
        return sides(connector, num_ranks, **places, **options)

    return made


@pytest.fixture
def left(make):
    """A prompt that another instance has left; 28 tokens of it can be loaded."""
    one, request = make(), ask("left")
    assert one.begin(request) == 0
    run(one, plan(one, request))
    one.scheduler.request_finished(request, request.block_ids)
    return request


def test_the_object_is_what_the_seed_says(make):
    made = make(connector="SeedTokensConnector")
    for side in (made.scheduler, made.workers[0]):
        assert type(side).__name__ == "SeedTokensConnector"
        assert (side.names_weights, type(side).names_weights) == (True, False)


# -- becoming known


def test_while_the_weights_are_not_known_nothing_is_asked_and_nothing_saved(make, tmp_path, left):
    before = names_in(tmp_path)
    made, request = make(meets=False), ask("r", PROMPT[::-1])
    assert made.begin(request) == 0
    told = plan(made, request)
    assert (calls(made), told.versions, told.inner.saves) == ([], (), [])
    run(made, told)
    # What it has computed meanwhile has no name, whoever asks about it.
    assert plan(made, cached=[request]).inner.saves == []
    assert made.ask(request) == (0, False)
    assert (calls(made), names_in(tmp_path)) == ([], before)


def test_a_request_becomes_known_when_it_is_asked_about(make, weights, left):
    made, request = make(), ask()
    made.scheduler.on_new_request(request)
    assert calls(made) == []
    # Not under the weights that there were when it came.
    weights.settle("B")
    made.step()
    assert made.ask(request) == (0, False)
    assert calls(made) == [("new", "r"), ("asked", "r")]
    assert made.ask(request) == (0, False)
    assert calls(made) == [("asked", "r")]


@pytest.mark.parametrize(
    "particulars",
    [
        {"prompt_embeds": object()},
        {"lora_request": SimpleNamespace(lora_name="a", lora_path="/a")},
        {"mm_features": [SimpleNamespace(identifier=None, mm_position=None)]},
    ],
    ids=["embeddings", "an adapter", "a feature without identifier"],
)
def test_a_request_that_cannot_be_named_is_not_seen(make, left, particulars):
    made, request = make(), ask("r", **particulars)
    seen = ask("s")
    assert (made.begin(request), made.begin(seen)) == (0, 28)
    run(made, plan(made, request, seen, preempted_req_ids={"r", "s"}))
    (output,) = inner(made).steps
    assert [each.req_id for each in output.scheduled_new_reqs] == ["s"]
    assert output.num_scheduled_tokens == {"s": 30}
    assert (output.total_num_scheduled_tokens, output.preempted_req_ids) == (30, {"s"})
    assert made.scheduler.request_finished(request, request.block_ids) == (False, None)
    plan(made, finished_req_ids={"r", "t"})
    assert inner(made).steps[-1].finished_req_ids == {"t"}
    assert [call for call in calls(made) if "r" in call] == []
    # The next one of this name is another request.
    assert made.begin(ask()) == 28


# -- a change of weights


@pytest.fixture(params=["TokensConnector", "SeedTokensConnector"])
def living(request, make, weights):
    """Sides with a request that is computed in part, and a function that changes the weights."""
    made = make(connector=request.param, hands_over=True)
    lives = ask()
    assert made.begin(lives) == 0
    run(made, plan(made, lives))

    def change(*fingerprints):
        for each in fingerprints:
            weights.settle(each)
            made.step()

    return made, lives, change


@pytest.mark.parametrize("fingerprints", [("B",), ("B", "A")], ids=["there", "there and back"])
def test_a_request_that_lives_through_a_change_is_stale_for_good(living, tmp_path, fingerprints):
    made, request, change = living
    before, _ = names_in(tmp_path), calls(made)
    change(*fingerprints)
    request.all_token_ids += PROMPT
    other = ask("s")
    made.begin(other, range(10, 18))
    assert all("r" not in call for call in calls(made))
    told = plan(made, other, cached=[request])
    assert {each.request_id for each in told.inner.saves} == {"s"}
    assert inner(made).steps[-1].scheduled_cached_reqs.req_ids == []
    assert inner(made).steps[-1].num_scheduled_tokens == {"s": 30}
    # Its blocks are taken away, and it gets others: it stays out, and is not asked about.
    told = plan(made, preempted_req_ids={"r"})
    assert inner(made).steps[-1].preempted_req_ids == {"r"}
    assert made.ask(request) == (0, False)
    made.allocate(request, [9])
    assert calls(made) == []
    # Nothing of it is saved, and the next instance hears nothing.
    assert made.scheduler.request_finished(request, [9]) == (False, None)
    assert calls(made) == [("finished", "r", 0)]
    assert names_in(tmp_path) == before


def test_a_request_that_was_left_out_once_stays_out_though_nothing_has_changed(make, weights):
    """The connector has missed a step of it."""
    made, request = make(), ask()
    made.begin(request)
    with process_weights.withheld():
        made.step()
    assert plan(made, request).inner.saves == []
    made.step()
    assert plan(made, cached=[request]).inner.saves == []
    assert made.scheduler.request_finished(request, [1]) == (False, None)


def test_a_request_that_ends_under_its_weights_says_which(living):
    made, request, _ = living
    assert made.scheduler.request_finished(request, [1, 2]) == (
        False,
        {"do_remote_prefill": True, "num_blocks": 2, "remote_weights": "A"},
    )


def test_a_connector_that_says_nothing_to_the_next_instance_says_no_weights(make, left):
    made, request = make(), ask()
    made.begin(request)
    assert made.scheduler.request_finished(request, [1, 2]) == (False, None)


@pytest.mark.parametrize(
    ("params", "is_asked"),
    [
        ({"do_remote_prefill": True, "remote_weights": "A"}, True),
        ({"do_remote_prefill": True, "remote_weights": "B"}, False),
        ({"do_remote_prefill": True}, False),
        ({"do_remote_prefill": False}, True),
        ({"do_remote_decode": True}, True),
        ("no parameters", True),
    ],
)
def test_remote_prefill_is_looked_up_only_under_the_weights_of_its_producer(
    make, left, params, is_asked
):
    made = make()
    found = made.begin(ask(params=params))
    assert (found, ("asked", "r") in calls(made)) == (28 * is_asked, is_asked)


# -- the worker's side


@pytest.mark.parametrize("change", ["before the step", "after the loads", "before the last save"])
def test_in_a_step_for_other_weights_nothing_is_saved(make, weights, tmp_path, change):
    made, request = make(), ask()
    made.begin(request)
    told = plan(made, request)
    if change == "before the step":
        weights.settle("B")
    made.load(told)
    if change == "after the loads":
        weights.settle("B")
    for name, cache in made.caches[0].items():
        made.workers[0].save_kv_layer(name, cache, None)
    if change == "before the last save":
        weights.settle("B")
    made.workers[0].wait_for_save()
    end(made)
    assert names_in(tmp_path) == []
    other = ask("s")
    made.begin(other)
    run(made, plan(made, other))
    assert len(names_in(tmp_path)) == 7, "the next one is"


def test_a_step_one_layer_of_which_was_left_out_is_not_saved(make, weights, tmp_path):
    made, request = make(), ask()
    made.begin(request)
    made.load(plan(made, request))
    for number, (name, cache) in enumerate(made.caches[0].items()):
        if number == 1:
            with process_weights.withheld():
                made.workers[0].save_kv_layer(name, cache, None)
        else:
            made.workers[0].save_kv_layer(name, cache, None)
    made.workers[0].wait_for_save()
    end(made)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("change", ["before the step", "within it"])
def test_loads_within_a_step_for_other_weights_have_failed(make, weights, left, change):
    made, request = make(), ask()
    assert made.begin(request, range(20, 28)) == 28
    told = plan(made, request)
    assert inner(made).loads == []
    if change == "before the step":
        weights.settle("B")
    made.load(told)
    if change == "within it":
        assert made.workers[0].get_block_ids_with_load_errors() == set()
        weights.settle("B")
    assert made.workers[0].get_block_ids_with_load_errors() == set(range(20, 27))
    assert end(made) == (set(), set()), "each is named once"


@pytest.mark.parametrize("change", ["before its step", "after its step"])
def test_a_load_across_a_change_is_received_with_its_blocks_as_errors(make, weights, left, change):
    made, request = make(outlasts=True), ask()
    assert made.begin(request, range(20, 28)) == 28
    told = plan(made)
    if change == "before its step":
        weights.settle("B")
    assert run(made, told) == (set(), set())
    weights.settle("B")
    assert run(made, plan(made)) == ({"r"}, set(range(20, 27)))
    assert run(made, plan(made)) == (set(), set())


def test_a_load_under_the_weights_that_it_was_planned_for_is_good(make, left):
    made, request = make(outlasts=True), ask()
    assert made.begin(request) == 28
    assert run(made, plan(made)) == (set(), set())
    assert run(made, plan(made)) == ({"r"}, set())


# -- blocks that could not be loaded


def serve(made, name, prompt=PROMPT):
    """Serve a prompt; return the tokens that were found, and the errors of their load."""
    request = ask(name, prompt)
    found = made.begin(request, range(20, 28))
    _, bad = run(made, made.tell(step([(request, found, len(prompt) - found)])))
    if bad:
        # The host begins the request anew.
        run(made, plan(made, request))
    made.scheduler.request_finished(request, request.block_ids)
    return found, bad


@pytest.mark.parametrize("replaces", [True, False])
def test_a_block_that_could_not_be_loaded_is_computed_and_loaded_from_then_on(
    make, tmp_path, left, monkeypatch, replaces
):
    made = make()
    if not replaces:
        cls = type(made.workers[0].side)
        save = cls.wait_for_save

        def save_new(self):
            self.staged = {n: data for n, data in self.staged.items() if not self.path(n).exists()}
            save(self)

        monkeypatch.setattr(cls, "wait_for_save", save_new)
    fourth = sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime_ns)[3]
    fourth.write_bytes(b"torn")
    assert serve(made, "first") == (28, {23})
    assert serve(made, "second") == (12, set())
    assert serve(made, "third") == (28, set())
    # A prompt that shares the block has the same names, and so has another process that learns it.
    assert serve(made, "beside", [*PROMPT[:18], 1, 2, 3]) == (16, set())
    if not replaces:
        other = make()
        assert serve(other, "first") == (28, {23})
        assert serve(other, "second") == (28, set())
    # What could not be loaded is looked for again by a process that has not learnt it.
    assert serve(make(), "shorter", PROMPT[:13]) == (12, set())


@pytest.mark.parametrize("reason", ["other weights", "another request has computed it"])
def test_a_block_that_may_be_whole_is_not_invalidated(make, tmp_path, weights, left, reason):
    is_changed = reason == "other weights"
    made, request = make(), ask(params=None if is_changed else {"for": "it"})
    fourth = sorted(tmp_path.iterdir(), key=lambda file: file.stat().st_mtime_ns)[3]
    whole = fourth.read_bytes()
    if not is_changed:
        fourth.write_bytes(b"torn")
    assert made.begin(request, range(20, 28)) == 28
    told = plan(made)
    if is_changed:
        weights.settle("B")
    assert run(made, told)[1] == (set(range(20, 27)) if is_changed else {23})
    made.scheduler.request_finished(request, request.block_ids)
    weights.settle("A")
    made.step()
    fourth.write_bytes(whole)
    assert serve(made, "again") == (28, set())


def test_hashes_of_an_invalidated_block_and_of_those_behind_it_are_others():
    key, renamed = (RequestKey(bytes(16), hash_block_size=2) for _ in range(2))
    renamed.change(6, bytes(range(16)))
    hashes = [bytes([number]) * 16 for number in range(6)]
    same = [a == b for a, b in zip(key.hashes(hashes), renamed.hashes(hashes), strict=True)]
    assert same == [True] * 3 + [False] * 3
    assert renamed.hashes(hashes[2:], 2) == renamed.hashes(hashes)[2:]
    tokens = [7] * 20
    assert renamed.tokens(tokens)[:6] == key.tokens(tokens)[:6]
    assert not set(renamed.tokens(tokens)[6:]) & set(key.tokens(tokens))


def test_a_load_that_was_promised_under_other_weights_fails(make, weights, left):
    """The scheduler's side hears of a change after it has answered, and before there are blocks."""
    made, request = make(), ask()
    made.scheduler.on_new_request(request)
    assert made.ask(request) == (28, False)
    weights.settle("B")
    made.step()
    made.allocate(request, range(20, 28), 28)
    made.load(plan(made, request))
    assert end(made) == (set(), set(range(20, 27)))


def test_only_the_blocks_that_were_to_be_loaded_are_errors(make, weights, left):
    """The first are the host's own, and the last are computed."""
    made, request = make(), ask()
    made.scheduler.on_new_request(request)
    assert made.ask(request, 8) == (20, False)
    made.allocate(request, range(20, 28), 20)
    weights.settle("B")
    made.load(plan(made))
    assert end(made) == (set(), set(range(22, 27)))


def test_a_worker_that_is_no_more_up_to_date_lets_go_of_blocks_all_the_same(
    make, weights, monkeypatch
):
    made, heard = make(), []
    monkeypatch.setattr(
        type(made.workers[0].side), "handle_preemptions", lambda *a: heard.append(a[1])
    )
    told = plan(made, preempted_req_ids={"r"})
    weights.settle("B")
    made.workers[0].handle_preemptions(told)
    assert heard == [told.inner]


# -- between the sides


def test_handshake_and_worker_metadata_of_the_inner_connector_are_passed_through(
    make, tmp_path, weights
):
    made, request = make(meets=False), ask()
    # A host may tell the weights again, by the same way; the connector is called once.
    for _ in range(2):
        said = made.meet()
    assert inner(made).met == {0: said[0].inner}
    made.begin(request)
    run(made, plan(made, request))
    assert inner(made).num_saved == 7
    run(made, plan(made))
    assert inner(made).num_saved == 7


def test_a_step_shows_encoded_ids_wherever_it_has_some(make):
    made, new, old = make(), ask("new"), ask("old")
    for each in (new, old):
        made.begin(each)
    plan(made, old)
    old.all_token_ids += [5, 6]
    hidden = ask("hidden", lora_request=object())
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
    seen = inner(made).steps[-1]
    views = {name: inner(made).requests[name] for name in ("new", "old")}
    (seen_new,) = seen.scheduled_new_reqs
    assert seen_new.prompt_token_ids == seen_new.prefill_token_ids
    assert seen_new.prompt_token_ids == views["new"].prompt_token_ids != PROMPT
    seen = seen.scheduled_cached_reqs
    assert (seen.req_ids, seen.resumed_req_ids) == (["old"], {"old"})
    assert (seen.new_block_ids, seen.num_computed_tokens) == ([([1],)], [30])
    assert seen.all_token_ids == {"old": views["old"].all_token_ids}
    assert seen.new_token_ids == [views["old"].all_token_ids[30:]]
    assert dataclasses.asdict(output) == before, "the host's own is as it was"


def test_events_of_encoded_hashes_are_taken_and_told_to_no_host(make, monkeypatch):
    cls = type(make(connector="SeedTokensConnector").scheduler)
    events = ["of a hash that no host knows"]
    monkeypatch.setattr(cls, "take_events", lambda _: [events.pop()])
    assert list(make(connector="SeedTokensConnector").scheduler.take_events()) == []
    assert events == []


def test_a_connector_may_call_methods_of_its_own(make, weights, left, monkeypatch):
    """What it learns then is its own: the errors of the fence are for the host."""
    cls = type(make(connector="SeedTokensConnector").workers[0])
    begin = cls.start_load_kv

    def begin_anew(self, forward_context):
        assert self.get_block_ids_with_load_errors() == set()
        begin(self, forward_context)

    monkeypatch.setattr(cls, "start_load_kv", begin_anew)
    made, request = make(connector="SeedTokensConnector"), ask()
    assert made.begin(request) == 28
    told = plan(made, request)
    weights.settle("B")
    made.load(told)
    assert end(made) == (set(), set(range(7)))


def test_other_models_and_numbers_of_ranks_do_not_share(make, left):
    others = [make(model="another"), make(num_ranks=2), make()]
    assert [made.begin(ask()) for made in others] == [0, 0, 28]
