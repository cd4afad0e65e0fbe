"""Prefixes in a shared folder: stored by one instance, loaded by another, never wrong."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch
from driver import BLOCK_SIZE, Blocks, Instance, Request, answer, transfer_config

from wtransfer.connectors.storage.store import FORMAT
from wtransfer.errors import ConnectorOptionError, StorageError
from wtransfer.weights import process_weights

pytestmark = pytest.mark.usefixtures("weights", "leaves_nothing")

PROMPT = list(range(30))
"""Seven whole blocks, and two tokens."""
NUM_BLOCKS = 7


@pytest.fixture
def instance(tmp_path):
    """Make instances that share a folder."""
    made = []

    def make(role="kv_both", extra=None, **more):
        options = {"shared_storage_path": str(tmp_path / "shared"), **(extra or {})}
        made.append(Instance(transfer_config("SharedStorageConnector", role, **options), **more))
        return made[-1]

    yield make
    for each in made:
        each.shutdown()


def stats(made):
    """Return the numbers of all sides together."""
    total = {}
    for side in (made.scheduler, *made.workers):
        for name, number in side.get_stats().items():
            total[name] = total.get(name, 0) + number
    return total


def files(tmp_path, pattern="blocks-*/*"):
    return sorted((tmp_path / "shared" / FORMAT).glob(pattern))


# -- what it is for


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64], ids=str)
def test_what_one_instance_has_computed_another_one_loads(instance, tmp_path, num_ranks, dtype):
    shape = {"num_ranks": num_ranks, "dtype": dtype}
    first, second = instance(**shape), instance(**shape)
    expected = answer(PROMPT, 6, **shape)
    assert first.serve("a", PROMPT, 6).output_token_ids == expected
    # 30 tokens and 5 that were computed: eight whole blocks.
    assert len(files(tmp_path)) == 8 * num_ranks
    request = second.serve("b", PROMPT, 6)
    assert (request.num_loaded, request.num_failures) == (NUM_BLOCKS * BLOCK_SIZE, 0)
    assert request.output_token_ids == expected
    assert second.workers[0].get_stats()["blocks_loaded_total"] == NUM_BLOCKS


def test_at_least_one_token_is_left_to_compute(instance):
    instance().serve("a", range(16))
    request = instance().serve("b", range(16))
    assert (request.num_loaded, request.output_token_ids) == (12, answer(range(16)))


def test_what_is_there_on_the_instance_itself_is_not_loaded(instance):
    instance().serve("a", PROMPT)
    second = instance()
    request = second.submit("b", PROMPT)
    ask = second.scheduler.get_num_new_matched_tokens
    assert [ask(request, n)[0] for n in (0, 8, 9, 28, 29)] == [28, 20, 0, 0, 0]
    assert ask(request, 0) == (28, False)
    second.run()


def test_a_prompt_may_take_many_steps(instance):
    made = instance(budget=5)
    assert made.serve("a", PROMPT, 3).output_token_ids == answer(PROMPT, 3)
    assert made.num_steps > 6
    assert instance().serve("b", PROMPT, 3).num_loaded == 28


def test_many_requests_at_once(instance):
    for made in (instance(budget=40), instance(budget=40)):
        prompts = {f"r{n}": [*PROMPT[: 10 + 3 * n], n] for n in range(6)}
        requests = [made.submit(name, prompt, 3) for name, prompt in prompts.items()]
        made.run()
        for request in requests:
            assert request.output_token_ids == answer(request.prompt_token_ids, 3)
    assert stats(made)["blocks_loaded_total"] > 0


def test_a_conversation_grows_turn_by_turn_though_each_turn_ends_in_a_step(instance):
    """As on an instance for prefills: what a hit is followed by is stored as well."""
    prompt = PROMPT
    for turn in range(4):
        made = instance(num_ranks=2)
        request = made.serve(f"turn-{turn}", prompt)
        assert request.num_loaded == (0 if turn == 0 else (len(prompt) - 12) // 4 * 4)
        assert request.output_token_ids == answer(prompt, num_ranks=2)
        prompt = prompt + list(range(100 * turn, 100 * turn + 12))


def test_another_salt_is_another_prefix(instance):
    made = instance()
    made.serve("a", PROMPT, cache_salt="tenant 1")
    assert made.serve("b", PROMPT, cache_salt="tenant 2").num_loaded == 0
    assert made.serve("c", PROMPT, cache_salt="tenant 1").num_loaded == 28


def test_a_request_that_was_preempted_loads_what_it_had(instance):
    made = instance()
    request = made.submit("a", PROMPT, 5)
    made.step()
    made.preempt("a")
    made.run()
    assert (request.num_loaded, request.output_token_ids) == (28, answer(PROMPT, 5))


def test_a_request_that_comes_back_under_other_weights_is_stored_under_these(instance, weights):
    """It is computed anew from its first token on."""
    made = instance()
    request = made.submit("a", PROMPT, 3)
    made.step()
    made.preempt("a")
    weights.settle("fingerprint-2")
    made.weights = "w2"
    made.waiting.clear()
    made.step()
    made.waiting.append(request)
    made.run()
    fresh = instance(weights="w2").serve("b", PROMPT, 3)
    assert (fresh.num_loaded, fresh.output_token_ids) == (28, answer(PROMPT, 3, weights="w2"))


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("keeps_saving", [True, False])
@pytest.mark.parametrize("has_begun", [True, False])
def test_what_a_step_has_computed_as_a_whole_is_stored_though_weights_changed_before_it(
    instance, weights, has_begun, keeps_saving, num_ranks
):
    """The scheduler's side hears of them only after the step, and has planned for other ones."""
    made = instance(num_ranks=num_ranks, keeps_saving=keeps_saving)
    request = made.submit("a", PROMPT, 5)
    if has_begun:
        # What it finds then is of the old weights, and refused.
        made.step()
        made.preempt("a")
    weights.settle("fingerprint-2")
    made.weights = "w2"
    made.run()
    assert request.num_failures == has_begun
    fresh = instance(weights="w2", num_ranks=num_ranks)
    request = fresh.serve("b", PROMPT, 3)
    expected = answer(PROMPT, 3, weights="w2", num_ranks=num_ranks)
    assert (request.num_loaded, request.output_token_ids) == (28, expected)


@pytest.mark.parametrize("budget", [1024, 10])
def test_what_a_step_has_computed_while_weights_changed_is_not_stored(
    instance, tmp_path, weights, budget
):
    """Nor what others have computed before it: a part of a prompt is not the whole."""
    made = instance(budget=budget)
    made.submit("a", PROMPT, 5)
    if budget < len(PROMPT):
        made.step()
    before, compute = files(tmp_path), made.compute

    def change_and_compute(output):
        weights.settle("fingerprint-2")
        made.compute = compute
        compute(output)

    made.compute = change_and_compute
    made.run()
    assert files(tmp_path) == before


def test_a_request_of_the_same_name_does_not_inherit_what_a_whole_step_tells(instance, weights):
    made = instance()
    request, hear = made.submit("x", PROMPT, 5), made.scheduler.update_connector_output

    def end_and_hear(said):
        made.scheduler.request_finished(request, [])
        hear(said)

    made.scheduler.update_connector_output = end_and_hear
    weights.settle("fingerprint-2")
    made.step()
    assert made.scheduler.side._fence._began == {}


def test_what_becomes_of_a_step_says_nothing_of_a_request_that_has_other_blocks_since(
    instance, tmp_path
):
    """Late word of a step that did not count would have it store what it has not computed."""
    made = instance()
    request = made.submit("a", PROMPT, 2)
    hear, late = made.scheduler.update_connector_output, []
    made.scheduler.update_connector_output = late.append
    for worker in made.workers:
        worker.wait_for_save = lambda: None
    made.step()
    made.preempt("a")
    made.scheduler.update_connector_output = hear
    made.waiting.clear()
    assert made.scheduler.get_num_new_matched_tokens(request, 8) == (0, False)
    request.block_ids = [made.free.popleft() for _ in range(9)]
    made.scheduler.update_state_after_alloc(request, Blocks(request.block_ids), 0)
    request.num_computed = 8
    made._start(request)
    build = made.scheduler.build_connector_meta

    def build_and_hear(output):
        told = build(output)
        for each in late:
            hear(each)
        late.clear()
        return told

    made.scheduler.build_connector_meta = build_and_hear
    for worker in made.workers:
        del worker.wait_for_save
    made.run()
    stored = {each.name for each in files(tmp_path)}
    made.serve("b", PROMPT)
    assert stored
    assert len(files(tmp_path)) == len(stored) + 2


def test_the_blocks_of_a_preempted_request_are_somebody_elses(instance, tmp_path):
    """It is given up while it waits, and what it had not stored yet is lost."""
    instance().serve("a", PROMPT)
    made = instance(num_blocks=20)
    request = made.submit("b", PROMPT + PROMPT, 2)
    made.step()
    made.preempt("b")
    made.waiting.remove(request)
    made.serve("c", [7] * 60, 2)
    made.waiting.append(request)
    made.abort("b")
    made.run()
    fresh = instance().serve("d", PROMPT + PROMPT, 2)
    expected = answer(PROMPT + PROMPT, 2)
    assert (fresh.num_loaded, fresh.output_token_ids) == (28, expected)


def test_a_host_is_asked_for_a_step_more_where_a_request_ended_too_early(instance):
    instance().serve("a", PROMPT)
    made = instance()
    made.submit("b", PROMPT + PROMPT)
    made.step()
    assert (made.running, list(made.held), made.scheduler.has_pending_push_work()) == (
        {},
        ["b"],
        True,
    )
    made.step()
    assert (made.held, made.scheduler.has_pending_push_work()) == ({}, False)
    assert instance().serve("c", PROMPT + PROMPT).num_loaded == 56


def test_a_request_may_be_given_up_at_any_time(instance):
    for num_steps in range(4):
        made = instance()
        request = made.submit("a", PROMPT, 9)
        for _ in range(num_steps):
            made.step()
        made.abort("a")
        made.run()
        assert len(made.free) == 63
        assert request.output_token_ids == answer(PROMPT, 9)[:num_steps]


def test_a_request_whose_blocks_stay_is_none_of_the_next_of_its_name(instance):
    """Its name is free as soon as it has ended."""
    first, other = list(range(100, 130)), list(range(200, 230))
    instance().serve("a", first)
    made = instance()
    made.submit("x", first + [1] * 8)
    made.step()
    assert list(made.held) == ["x"]
    request = made.submit("x", other, 2)
    assert made.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    made.run()
    assert request.output_token_ids == answer(other, 2)
    # What was the first one's is stored as its own, and what is the next one's likewise.
    assert instance().serve("c", first + [1] * 8).num_loaded == 36
    assert instance().serve("d", other).num_loaded == 28


def test_a_request_that_ends_twice_ends_once(instance):
    instance().serve("a", PROMPT)
    made = instance()
    request = made.submit("x", PROMPT + PROMPT)
    made.step()
    assert list(made.held) == ["x"]
    for _ in range(2):
        assert made.scheduler.request_finished(request, []) == (True, None)
    made.run()
    assert made.scheduler.request_finished(request, []) == (False, None)
    assert len(made.free) == 63
    assert instance().serve("b", PROMPT + PROMPT).num_loaded == 56


@pytest.mark.parametrize("num_there", [8, 7])
def test_what_somebody_else_has_put_into_the_cache_is_not_stored(instance, tmp_path, num_there):
    """It may be of other weights: nobody here has computed it, or compared it with a name."""
    made = instance()
    request = made.submit("a", PROMPT)
    made.waiting.clear()
    assert made.scheduler.get_num_new_matched_tokens(request, num_there) == (0, False)
    request.block_ids = [made.free.popleft() for _ in range(9)]
    made.scheduler.update_state_after_alloc(request, Blocks(request.block_ids), 0)
    request.num_computed = num_there
    made._start(request)
    made.run()
    stored = {each.name for each in files(tmp_path)}
    made.serve("b", PROMPT)
    # Of seven whole blocks it has computed all but two.
    assert (len(stored), len(files(tmp_path))) == (5, 7)


# -- who may, and what fits


def test_a_producer_only_stores_and_a_consumer_only_loads(instance, tmp_path):
    consumer, producer = instance("kv_consumer"), instance("kv_producer")
    consumer.serve("a", PROMPT)
    assert files(tmp_path) == []
    producer.serve("b", PROMPT)
    assert producer.serve("c", PROMPT).num_loaded == 0
    # Nor does it write what is there.
    assert stats(producer)["blocks_saved_total"] == NUM_BLOCKS
    num_files = len(files(tmp_path))
    assert consumer.serve("d", PROMPT + PROMPT).num_loaded == 28
    assert len(files(tmp_path)) == num_files == NUM_BLOCKS


OTHERS = {"model": "another", "num_ranks": 2, "dtype": torch.float16}


@pytest.mark.parametrize("other", OTHERS)
def test_blocks_of_another_model_are_not_found(instance, other):
    instance().serve("a", PROMPT)
    assert instance(**{other: OTHERS[other]}).serve("b", PROMPT).num_loaded == 0


def test_blocks_with_another_layout_are_refused(instance):
    """What a model's name does not say, the header does. FAULTS 29."""
    made = [instance(), instance(num_layers=4)]
    for each in made:
        # As with a host that passes no handshake on.
        each.scheduler.side._layouts.clear()
    made[0].serve("a", PROMPT)
    request = made[1].serve("b", PROMPT)
    assert (request.num_failures, request.output_token_ids) == (1, answer(PROMPT, num_layers=4))


def test_those_who_lay_blocks_out_in_other_ways_do_not_lose_them_by_each_other(instance):
    """As with a cache of half the width: the model and what it computes in are the same."""
    shapes = [{}, {"num_layers": 4}, {"num_ranks": 2}]
    for turn, num_loaded in enumerate((0, 28, 28)):
        for shape in shapes:
            made = instance(**shape)
            request = made.serve(f"turn-{turn}", PROMPT)
            assert (request.num_loaded, request.num_failures) == (num_loaded, 0)
            assert request.output_token_ids == answer(PROMPT, **shape)
            assert "load_failures_total" not in stats(made)


@pytest.mark.parametrize("name", ["../../up", "/etc", "a\0b", "n" * 300, "", "ключ"])
def test_no_model_is_called_what_leads_out_of_the_folder(instance, tmp_path, name):
    """FAULTS 35."""
    instance(model=name).serve("a", PROMPT)
    assert instance(model=name).serve("b", PROMPT).num_loaded == 28
    assert [each.name for each in tmp_path.iterdir()] == ["shared"]
    assert [each.name for each in (tmp_path / "shared").iterdir()] == [FORMAT]


# -- weights


def test_blocks_of_other_weights_are_not_found(instance, weights):
    """FAULTS 31."""
    instance().serve("a", PROMPT)
    weights.settle("fingerprint-2")
    second = instance(weights="w2")
    request = second.serve("b", PROMPT)
    assert (request.num_loaded, request.output_token_ids) == (0, answer(PROMPT, weights="w2"))
    weights.settle("fingerprint-1")
    assert instance().serve("c", PROMPT).num_loaded == 28


def test_a_request_that_lives_through_a_commit_is_neither_stored_nor_loaded(
    instance, tmp_path, weights
):
    """FAULTS 47: under neither name, at whichever step the commit comes."""
    for num_steps in range(4):
        made = instance(budget=10)
        made.submit("a", PROMPT, 6)
        for _ in range(num_steps):
            made.step()
        before = files(tmp_path)
        weights.settle(f"later-{num_steps}")
        made.weights = f"later-{num_steps}"
        if num_steps:
            made.run()
            assert files(tmp_path) == before
        weights.settle("fingerprint-1")
    fresh = instance()
    request = fresh.serve("b", PROMPT, 6)
    assert (request.num_failures, request.output_token_ids) == (0, answer(PROMPT, 6))


def test_a_load_that_was_planned_before_a_commit_is_refused(instance, weights):
    """FAULTS 47: the scheduler's side has not heard of it yet, and the worker has."""
    instance().serve("a", PROMPT)
    second = instance()
    second.submit("b", PROMPT)
    weights.settle("fingerprint-2")
    second.weights = "w2"
    second.step()
    assert stats(second)["loads_fenced_total"] == 1
    refused = second.running["b"].block_ids[:NUM_BLOCKS]
    assert second.invalid == set(refused)
    for cache in second.caches[0].values():
        assert cache[refused].eq(1).all(), "a byte of it has come"
    second.run()
    assert second.done["b"].output_token_ids == answer(PROMPT, weights="w2")


def test_while_weights_change_nothing_is_found_or_stored(instance, tmp_path, weights):
    first = instance()
    with weights.changing(lambda: "fingerprint-1"):
        first.serve("a", PROMPT)
        assert files(tmp_path) == []
        assert first.scheduler.reset_cache() is False


def test_ranks_of_other_weights_than_each_other_do_not_name_blocks(instance, tmp_path):
    made = instance(num_ranks=2)
    said = {
        0: made.workers[0].get_handshake_metadata(),
        1: made.workers[1].get_handshake_metadata(),
    }
    said[1].version = None
    made.scheduler.set_xfer_handshake_metadata(said)
    made.submit("a", PROMPT)
    made.step()
    assert files(tmp_path) == []


# -- loads that fail


def losing(made, call):
    """Let something happen between a look for names and the loads that come of it."""
    find = made.scheduler.side._num_found
    made.scheduler.side._num_found = lambda *given: (find(*given), call())[0]


@pytest.mark.parametrize("keeps_saving", [True, False], ids=["as in vLLM", "as here"])
@pytest.mark.parametrize("lost", [0, 3, 6])
def test_what_was_computed_on_a_load_that_failed_is_not_stored(
    instance, tmp_path, keeps_saving, lost
):
    """On no rank: what one rank has in its cache after that depends on what the other lacks."""
    longer = PROMPT + list(range(50, 71))
    instance(num_ranks=2).serve("a", PROMPT)
    first_rank = [each for each in files(tmp_path) if each.suffix == ".0"]
    first_rank.sort(key=lambda each: each.stat().st_mtime_ns)
    second = instance(num_ranks=2, keeps_saving=keeps_saving)
    request = second.submit("b", longer, 3)
    losing(second, first_rank[lost].unlink)
    second.run()
    expected = answer(longer, 3, num_ranks=2)
    assert (request.num_failures, request.output_token_ids) == (1, expected)
    third = instance(num_ranks=2)
    request = third.serve("c", longer, 3)
    assert (request.num_failures, request.output_token_ids) == (0, expected)
    # All that the second one computed once more is there, and right.
    assert request.num_loaded == 48


def test_what_a_step_that_did_not_count_has_computed_is_stored_later(instance, tmp_path):
    """Another request's load fails in that step, and the host lets nothing of it be kept."""
    instance().serve("a", PROMPT)
    second = instance(keeps_saving=False)
    losing(second, lambda: files(tmp_path)[-1].unlink(missing_ok=True))
    second.submit("b", PROMPT, 3)
    second.submit("c", [7, *PROMPT], 3)
    second.step()
    assert second.invalid
    second.run()
    assert instance().serve("d", [7, *PROMPT], 3).num_loaded == 28


@pytest.mark.parametrize("hit", [False, True])
def test_a_request_that_ends_with_a_step_that_did_not_count_stores_nothing_of_it(
    instance, tmp_path, hit
):
    """What is in its blocks is anybody's guess."""
    if hit:
        instance().serve("a", PROMPT)
    before = files(tmp_path)
    second = instance()
    for worker in second.workers:
        worker.wait_for_save = lambda: None
    second.compute = lambda output: None
    second.submit("b", PROMPT + PROMPT, 2)
    second.step()
    second.abort("b")
    second.run()
    assert files(tmp_path) == before


def test_blocks_stay_until_it_is_known_what_became_of_the_last_step(instance, tmp_path):
    """Also where its outcome comes late, or never, and then nothing of it is stored."""
    instance().serve("a", PROMPT)
    before = files(tmp_path)
    second = instance()
    second.submit("b", PROMPT + PROMPT)
    hear = second.scheduler.update_connector_output
    second.scheduler.update_connector_output = lambda said: None
    for _ in range(3):
        second.step()
        assert list(second.held) == ["b"]
    second.scheduler.update_connector_output = hear
    second.run()
    assert (len(second.free), files(tmp_path)) == (63, before)


def test_a_request_that_comes_back_is_sure_of_nothing_that_it_had_before(instance, tmp_path):
    instance().serve("a", PROMPT)
    before = files(tmp_path)
    second = instance()
    second.submit("b", PROMPT + PROMPT, 9)
    second.step()
    second.preempt("b")
    for worker in second.workers:
        worker.wait_for_save = lambda: None
    second.compute = lambda output: None
    second.step()
    second.abort("b")
    second.run()
    assert files(tmp_path) == before


def test_what_was_stored_and_lost_is_stored_again(instance, tmp_path):
    made = instance()
    request = made.submit("a", PROMPT, 4)
    made.step()
    assert len(files(tmp_path)) == NUM_BLOCKS
    made.preempt("a")
    losing(made, lambda: [each.unlink(missing_ok=True) for each in files(tmp_path)])
    made.step()
    made.scheduler.side._num_found = lambda *_: pytest.fail("it looks again")
    assert request.num_failures == 1
    made.run()
    assert request.output_token_ids == answer(PROMPT, 4)
    assert instance().serve("b", PROMPT).num_loaded == 28


def test_a_request_that_ends_with_a_failed_load_stores_nothing(instance, tmp_path):
    instance().serve("a", PROMPT)
    second = instance()
    second.submit("b", PROMPT + PROMPT)
    losing(second, files(tmp_path)[0].unlink)
    second.step()
    assert second.invalid
    second.abort("b")
    second.run()
    assert len(files(tmp_path)) == NUM_BLOCKS - 1


def test_after_a_failed_load_a_request_does_not_look_again(instance, tmp_path):
    """Else it would find the same block for ever where nothing can be set aside."""
    instance().serve("a", PROMPT)
    files(tmp_path)[0].write_bytes(b"")
    second = instance()
    request = second.submit("b", PROMPT, 3)
    second.step()
    assert request.num_failures == 1
    assert second.scheduler.get_num_new_matched_tokens(request, 0) == (0, False)
    second.run()


# -- what a look costs


def test_a_request_that_is_asked_about_again_costs_a_look_at_its_last_block(instance, monkeypatch):
    """As by a host that asks in each step until there is room for it."""
    prompt = list(range(401))
    first, second = (instance(num_ranks=2, num_blocks=128) for _ in range(2))
    first.serve("a", prompt)
    request = second.submit("b", prompt)
    looks, stat = [], os.stat
    monkeypatch.setattr(
        os, "stat", lambda *args, **more: (looks.append(args), stat(*args, **more))[1]
    )
    costs = []
    for _ in range(5):
        looks.clear()
        assert second.scheduler.get_num_new_matched_tokens(request, 0) == (400, False)
        costs.append(len(looks))
    assert costs == [200, 2, 2, 2, 2]


def test_after_a_failed_load_nobody_is_promised_what_was_seen_before(instance, tmp_path):
    """Else each request with that beginning would fail once, until the moment is over."""
    instance().serve("a", PROMPT)
    by_age = sorted(files(tmp_path), key=lambda each: -each.stat().st_mtime_ns)
    second = instance()
    ask = second.scheduler.get_num_new_matched_tokens
    assert ask(second.submit("b", PROMPT), 0) == (28, False)
    by_age[3].write_bytes(b"")
    second.step()
    assert second.invalid
    assert ask(Request("c", PROMPT), 0) == (12, False)
    second.run()


# -- the bound


def test_what_was_not_used_for_longest_goes_first(instance, tmp_path):
    prompts = {name: [n, *PROMPT] for n, name in enumerate("abcdefgh")}
    made = instance()
    made.serve("a", prompts["a"])
    nbytes = sum(each.stat().st_size for each in files(tmp_path))
    small = instance(extra={"max_bytes": 4 * nbytes})
    most = 0
    for turn, name in enumerate("bcadefagh"):
        small.serve(f"{name}{turn}", prompts[name])
        most = max(most, sum(each.stat().st_size for each in files(tmp_path)))
    assert 3 * nbytes < most <= 4 * nbytes
    assert stats(small)["evicted_total"] > 0
    ask = small.scheduler.get_num_new_matched_tokens
    found = {name: ask(Request(name, prompts[name]), 0)[0] for name in "abcdefgh"}
    assert [name for name, number in found.items() if number == 28] == ["a", "g", "h"]
    # What goes of a prefix is its end.
    assert all(found[name] for name in "f")
    assert not any(found[name] for name in "bcd")


def test_instances_that_store_at_once_stay_near_the_bound(instance, tmp_path):
    """Each has made room before any of the others has written."""
    prompts = [[n, *range(100)] for n in range(7)]
    instance().serve("a", prompts[0])
    nbytes = files(tmp_path)[0].stat().st_size
    bound = 60 * nbytes
    made = [instance(extra={"max_bytes": bound}) for _ in range(3)]
    for prompt in prompts[1:4]:
        made[0].serve(f"before-{prompt[0]}", prompt)

    def chain(number):
        """Let the next one store all that it has, as soon as this one has made room."""
        room, begun = made[number].workers[0].side._room, []
        make = room.make

        def make_and_wait(wanted):
            there_is = make(wanted)
            if number + 1 < len(made) and not begun:
                begun.append(True)
                made[number + 1].serve(f"r{number + 1}", prompts[5 + number])
            return there_is

        room.make = make_and_wait

    for number in range(len(made)):
        chain(number)
    made[0].serve("r0", prompts[4])
    total = sum(each.stat().st_size for each in files(tmp_path))
    assert bound / 2 < total <= bound + len(made) * nbytes


def test_a_bound_that_is_less_than_a_block_keeps_nothing(instance, tmp_path):
    made = instance(extra={"max_bytes": 10})
    assert made.serve("a", PROMPT).output_token_ids == answer(PROMPT)
    assert files(tmp_path) == []
    assert stats(made)["save_failures_no_room_total"] == 1
    assert files(tmp_path, "blocks-*") == []


# -- forgetting


def test_the_cache_can_be_reset_for_these_weights(instance, tmp_path, weights):
    first, second = instance(), instance()
    first.serve("a", PROMPT)
    weights.settle("fingerprint-2")
    first.step()
    first.serve("b", PROMPT)
    assert first.scheduler.reset_cache() is True
    assert first.serve("c", PROMPT).num_loaded == 0
    weights.settle("fingerprint-1")
    assert second.serve("d", PROMPT).num_loaded == 28


def test_a_reset_leaves_no_file_and_is_no_error_if_there_is_none(instance, tmp_path):
    made = instance()
    assert made.scheduler.reset_cache() is True
    made.serve("a", PROMPT)
    assert made.scheduler.reset_cache() is True
    for thread in [each for each in threading.enumerate() if "removal" in each.name]:
        thread.join(5)
    assert files(tmp_path, "blocks-*") == files(tmp_path, "removed-*") == []
    made.serve("b", PROMPT)
    assert len(files(tmp_path)) == NUM_BLOCKS


# -- options


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {},
            "missing required field `shared_storage_path`; the options are shared_storage_path, m",
        ),
        ({"shared_storage_path": ""}, "length >= 1"),
        ({"shared_storage_path": "a\0b"}, "no path has a NUL"),
        ({"shared_storage_path": "x", "max_byte": 1}, "unknown field `max_byte`"),
        ({"shared_storage_path": "x", "max_bytes": 0}, ">= 1"),
        ({"shared_storage_path": "x", "max_bytes": "1G"}, "max_bytes"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused(options, text):
    with pytest.raises(ConnectorOptionError, match=text):
        Instance(transfer_config("SharedStorageConnector", **options))


def test_a_folder_that_others_may_write_to_is_refused(instance, tmp_path):
    instance().serve("a", PROMPT)
    (tmp_path / "shared" / FORMAT).chmod(0o777)
    with pytest.raises(StorageError, match="is not this user's alone"):
        instance()


def test_nobody_else_can_read_what_is_kept(instance, tmp_path):
    before = os.umask(0)
    try:
        instance().serve("a", PROMPT)
    finally:
        os.umask(before)
    inner = tmp_path / "shared" / FORMAT
    modes = {path.stat().st_mode & 0o077 for path in (inner, *inner.rglob("*"))}
    assert modes == {0}
    assert len(list(inner.rglob("*"))) > NUM_BLOCKS


def test_a_path_that_is_no_folder_is_an_error_that_says_so(tmp_path):
    Path(tmp_path / "file").write_text("")
    options = {"shared_storage_path": str(tmp_path / "file")}
    with pytest.raises(StorageError, match="making the folder"):
        Instance(transfer_config("SharedStorageConnector", **options))


def test_nothing_holds_the_cache_after_a_shutdown(instance):
    made = instance()
    made.serve("a", PROMPT)
    pages = weakref.ref(made.workers[0].side._pages)
    made.shutdown()
    gc.collect()
    assert pages() is None


def test_numbers_are_plain(instance):
    made = instance()
    made.serve("a", PROMPT)
    numbers = stats(made)
    assert numbers["blocks_saved_total"] == NUM_BLOCKS
    assert {type(each) for each in numbers.values()} <= {int, float}


def test_without_a_session_blocks_are_this_processes_own(instance, weights, tmp_path):
    """Nobody knows what it computes with, and it does not claim to."""
    weights.close()
    process_weights.begin_anew()
    instance().serve("a", PROMPT)
    assert instance().serve("b", PROMPT).num_loaded == 28
    process_weights.begin_anew()
    assert instance().serve("c", PROMPT).num_loaded == 0


@pytest.mark.parametrize("kind", ["committed unheard", "begins with a load"])
def test_blocks_that_the_host_has_taken_back_are_not_stored(instance, weights, kind):
    """Between two steps: preempted, as vLLM does for a reset, and then given up by its user."""
    prompt = [*range(30)] if kind == "committed unheard" else [*range(40)]
    made = instance(num_blocks=12)
    made.step()
    if kind == "committed unheard":
        weights.settle("fingerprint-2")
    else:
        instance().serve("p", prompt[:30])
    made.submit("r", prompt, max_tokens=4)
    made.step()
    made.preempt("r")
    made.abort("r")
    # It gets the very blocks.
    made.serve("other", range(500, 540))
    shorter = prompt[:-6]
    assert instance().serve("again", shorter).output_token_ids == answer(shorter)


def test_a_reset_forgets_what_was_seen_a_moment_ago(instance):
    """The last of a prefix may be there again at once, and what comes before it is not."""
    made = instance()
    made.serve("a", PROMPT)
    assert made.serve("b", PROMPT).num_loaded
    finder = made.scheduler.side._finder
    assert finder._seen
    assert made.scheduler.reset_cache() is True
    assert not finder._seen
