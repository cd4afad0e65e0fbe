"""Prefixes in a shared folder: stored by one instance, loaded by another, never wrong."""

from __future__ import annotations

import gc
import os
import shutil
import time
import weakref
from pathlib import Path

import pytest
import torch
from driver import BLOCK_SIZE, Blocks, Instance, Request, answer, transfer_config

from wtransfer.errors import StorageError
from wtransfer.specs.file import FORMAT
from wtransfer.weight_version import process_weights

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


def files(tmp_path, pattern="blocks/*"):
    return sorted((tmp_path / "shared" / FORMAT).glob(pattern))


def until(made, ready):
    """Step until something has come about."""
    end = time.monotonic() + 10
    while not ready():
        assert time.monotonic() < end
        made.step()
        time.sleep(0.0005)


def begin(made, request_id, *args, **more):
    """Step until a request has been computed in one step; return it."""
    request = made.submit(request_id, *args, **more)
    until(made, lambda: request_id in made.running or request_id in made.done)
    return request


def ask(made, request, num_computed_tokens=0):
    """Return how many tokens can be loaded, once the folder has been looked at."""
    end = time.monotonic() + 10
    while True:
        number, _ = made.scheduler.get_num_new_matched_tokens(request, num_computed_tokens)
        if number is not None:
            return number
        assert time.monotonic() < end
        time.sleep(0.0005)


# -- what it is for


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64], ids=str)
def test_prefix_of_one_instance_is_loaded_by_another(instance, tmp_path, num_ranks, dtype):
    shape = {"num_ranks": num_ranks, "dtype": dtype}
    first, second = instance(**shape), instance(**shape)
    expected = answer(PROMPT, 6, **shape)
    assert first.serve("a", PROMPT, 6).output_token_ids == expected
    # 30 tokens and 5 that were computed: eight whole blocks.
    assert len(files(tmp_path)) == 8 * num_ranks
    request = second.serve("b", PROMPT, 6)
    assert (request.num_loaded, request.num_failures) == (NUM_BLOCKS * BLOCK_SIZE, 0)
    assert request.output_token_ids == expected


def test_last_token_is_always_computed(instance):
    instance().serve("a", range(16))
    request = instance().serve("b", range(16))
    assert (request.num_loaded, request.output_token_ids) == (12, answer(range(16)))


def test_locally_computed_blocks_are_not_loaded(instance):
    instance().serve("a", PROMPT)
    second = instance()
    request = second.submit("b", PROMPT)
    assert [ask(second, request, n) for n in (0, 8, 9, 28, 29)] == [28, 20, 0, 0, 0]
    second.run()


def test_chunked_prefill(instance):
    made = instance(budget=5)
    assert made.serve("a", PROMPT, 3).output_token_ids == answer(PROMPT, 3)
    assert made.num_steps > 6
    assert instance().serve("b", PROMPT, 3).num_loaded == 28


def test_concurrent_requests(instance):
    for made in (instance(budget=40), instance(budget=40)):
        prompts = {f"r{n}": [*PROMPT[: 10 + 3 * n], n] for n in range(6)}
        requests = [made.submit(name, prompt, 3) for name, prompt in prompts.items()]
        made.run()
        for request in requests:
            assert request.output_token_ids == answer(request.prompt_token_ids, 3)
    assert stats(made)["load_bytes_total"] > 0


def test_conversation_grows_turn_by_turn(instance):
    """As on an instance for prefills: what a hit is followed by is stored as well."""
    prompt = PROMPT
    for turn in range(4):
        made = instance(num_ranks=2)
        request = made.serve(f"turn-{turn}", prompt)
        assert request.num_loaded == (0 if turn == 0 else (len(prompt) - 12) // 4 * 4)
        assert request.output_token_ids == answer(prompt, num_ranks=2)
        prompt = prompt + list(range(100 * turn, 100 * turn + 12))


def test_other_salt_is_a_miss(instance):
    made = instance()
    made.serve("a", PROMPT, cache_salt="tenant 1")
    assert made.serve("b", PROMPT, cache_salt="tenant 2").num_loaded == 0
    assert made.serve("c", PROMPT, cache_salt="tenant 1").num_loaded == 28


def test_preempted_request_loads_its_blocks(instance):
    made = instance()
    request = begin(made, "a", PROMPT, 5)
    made.preempt("a")
    made.waiting.clear()
    until(made, lambda: not made.scheduler.has_pending_push_work())
    made.waiting.append(request)
    made.run()
    assert (request.num_loaded, request.output_token_ids) == (28, answer(PROMPT, 5))


def test_request_resumed_under_new_weights_is_stored_under_them(instance, weights):
    """It is computed anew from its first token on."""
    made = instance()
    request = begin(made, "a", PROMPT, 3)
    made.preempt("a")
    weights.settle("fingerprint-2")
    made.weights = "w2"
    made.waiting.clear()
    made.step()
    made.waiting.append(request)
    made.run()
    fresh = instance(weights="w2").serve("b", PROMPT, 3)
    assert (fresh.num_loaded, fresh.output_token_ids) == (28, answer(PROMPT, 3, weights="w2"))


def test_step_during_which_weights_change_stores_nothing(instance, tmp_path, weights):
    made = instance()
    made.submit("a", PROMPT, 5)
    compute = made.compute

    def change_and_compute(output):
        if output.num_scheduled_tokens:
            weights.settle("fingerprint-2")
            made.compute = compute
        compute(output)

    made.compute = change_and_compute
    made.run()
    assert files(tmp_path) == []


def test_blocks_of_preempted_request_are_not_stored_for_it(instance, tmp_path):
    """It is given up while it waits, and what it had not stored yet is lost."""
    instance().serve("a", PROMPT)
    made = instance(num_blocks=20)
    request = begin(made, "b", PROMPT + PROMPT, 2)
    made.preempt("b")
    made.waiting.remove(request)
    made.serve("c", [7] * 60, 2)
    made.waiting.append(request)
    made.abort("b")
    made.run()
    fresh = instance().serve("d", PROMPT + PROMPT, 2)
    expected = answer(PROMPT + PROMPT, 2)
    assert (fresh.num_loaded, fresh.output_token_ids) == (28, expected)


def test_abort_after_any_step(instance):
    for num_tokens in range(4):
        made = instance()
        request = made.submit("a", PROMPT, 9)
        until(made, lambda of=request, least=num_tokens: len(of.output_token_ids) >= least)
        made.abort("a")
        made.run()
        assert len(made.free) == 63
        assert request.output_token_ids == answer(PROMPT, 9)[:num_tokens]


@pytest.mark.parametrize("num_there", [8, 7])
def test_blocks_loaded_by_another_connector_are_not_stored(instance, tmp_path, num_there):
    """Nor a block of which it has loaded a part."""
    made = instance()
    request = made.submit("a", PROMPT, 3)
    made.waiting.clear()
    assert ask(made, request) == 0
    request.block_ids = [made.free.popleft() for _ in range(9)]
    made.scheduler.update_state_after_alloc(request, Blocks(request.block_ids), 0)
    request.num_computed = num_there
    made._start(request)
    made.run()
    stored = {each.name for each in files(tmp_path)}
    made.serve("b", PROMPT)
    # Of eight whole blocks it has computed all but two.
    assert (len(stored), len(files(tmp_path))) == (6, 8)


# -- who may, and what fits


def test_producer_only_stores_and_consumer_only_loads(instance, tmp_path):
    consumer, producer = instance("kv_consumer"), instance("kv_producer")
    consumer.serve("a", PROMPT)
    assert files(tmp_path) == []
    producer.serve("b", PROMPT)
    assert producer.serve("c", PROMPT).num_loaded == 0
    # Nor does it write what is there.
    assert stats(producer)["puts_total"] == NUM_BLOCKS
    num_files = len(files(tmp_path))
    assert consumer.serve("d", PROMPT + PROMPT).num_loaded == 28
    assert len(files(tmp_path)) == num_files == NUM_BLOCKS


OTHERS = {"model": "another", "num_ranks": 2, "dtype": torch.float16}


@pytest.mark.parametrize("other", OTHERS)
def test_blocks_of_another_model_are_a_miss(instance, other):
    instance().serve("a", PROMPT)
    assert instance(**{other: OTHERS[other]}).serve("b", PROMPT).num_loaded == 0


def test_layout_mismatch_is_found_by_the_header(instance):
    """What a model's name does not say, the header does. FAULTS 29."""
    made = [instance(), instance(num_layers=4)]
    for each in made:
        # As with a host whose workers say nothing of their layout.
        said = each.workers[0].get_handshake_metadata()
        said.layout = b""
        each.scheduler.set_xfer_handshake_metadata({0: said})
    made[0].serve("a", PROMPT)
    request = made[1].serve("b", PROMPT)
    assert (request.num_failures, request.output_token_ids) == (1, answer(PROMPT, num_layers=4))


def test_layouts_do_not_replace_each_others_blocks(instance):
    """As with a cache of half the width: the model and what it computes in are the same."""
    shapes = [{}, {"num_layers": 4}, {"num_ranks": 2}]
    for turn, num_loaded in enumerate((0, 28, 28)):
        for shape in shapes:
            made = instance(**shape)
            request = made.serve(f"turn-{turn}", PROMPT)
            assert (request.num_loaded, request.num_failures) == (num_loaded, 0)
            assert request.output_token_ids == answer(PROMPT, **shape)


@pytest.mark.parametrize("name", ["../../up", "/etc", "a\0b", "n" * 300, "", "ключ"])
def test_model_names_cannot_leave_the_folder(instance, tmp_path, name):
    """FAULTS 35."""
    instance(model=name).serve("a", PROMPT)
    assert instance(model=name).serve("b", PROMPT).num_loaded == 28
    assert [each.name for each in tmp_path.iterdir()] == ["shared"]
    assert [each.name for each in (tmp_path / "shared").iterdir()] == [FORMAT]


# -- weights


def test_blocks_of_other_weights_are_a_miss(instance, weights):
    """FAULTS 31."""
    instance().serve("a", PROMPT)
    weights.settle("fingerprint-2")
    second = instance(weights="w2")
    request = second.serve("b", PROMPT)
    assert (request.num_loaded, request.output_token_ids) == (0, answer(PROMPT, weights="w2"))
    weights.settle("fingerprint-1")
    assert instance().serve("c", PROMPT).num_loaded == 28


def test_request_that_lives_through_a_commit_is_neither_stored_nor_loaded(
    instance, tmp_path, weights
):
    """FAULTS 47: under neither name, at whichever step the commit comes."""
    for num_computed in (10, 20, 30):
        made = instance(budget=10)
        request = made.submit("a", PROMPT, 6)
        until(made, lambda of=request, least=num_computed: of.num_computed >= least)
        # Of the step before, which is still being put.
        until(made, lambda of=made: not of.scheduler.has_pending_push_work())
        before = files(tmp_path)
        weights.settle(f"later-{num_computed}")
        made.weights = f"later-{num_computed}"
        made.run()
        assert files(tmp_path) == before
        weights.settle("fingerprint-1")
    fresh = instance()
    request = fresh.serve("b", PROMPT, 6)
    assert (request.num_failures, request.output_token_ids) == (0, answer(PROMPT, 6))


def test_load_planned_before_a_commit_is_refused(instance, weights):
    """FAULTS 47: the scheduler's side has not heard of it yet, and the worker has."""
    instance().serve("a", PROMPT)
    second = instance()
    request = second.submit("b", PROMPT)
    assert ask(second, request) == 28
    weights.settle("fingerprint-2")
    second.weights = "w2"
    compute, untouched = second.compute, []

    def look_and_compute(output):
        blocks = request.block_ids[:NUM_BLOCKS]
        untouched.append(all(each[blocks].eq(1).all() for each in second.caches[0].values()))
        second.compute = compute
        compute(output)

    second.compute = look_and_compute
    second.run()
    assert stats(second)["fence_loads_refused_total"] == 1
    assert untouched == [True], "a byte of it has come"
    assert second.done["b"].output_token_ids == answer(PROMPT, weights="w2")


def test_while_weights_change_nothing_is_found_or_stored(instance, tmp_path, weights):
    first = instance()
    with weights.changing(lambda: "fingerprint-1"):
        first.serve("a", PROMPT)
        assert files(tmp_path) == []


def test_ranks_of_different_weights_store_nothing(instance, tmp_path):
    made = instance(num_ranks=2)
    said = {
        0: made.workers[0].get_handshake_metadata(),
        1: made.workers[1].get_handshake_metadata(),
    }
    said[1].version = None
    made.scheduler.set_xfer_handshake_metadata(said)
    made.scheduler.update_connector_output = lambda output: None
    begin(made, "a", PROMPT)
    assert files(tmp_path) == []


# -- loads that fail


@pytest.mark.parametrize("keeps_saving", [True, False], ids=["as in vLLM", "as here"])
@pytest.mark.parametrize("lost", [0, 3, 6])
def test_blocks_after_a_failed_load_are_recomputed_and_stored_right(
    instance, tmp_path, keeps_saving, lost
):
    """On no rank: what one rank has in its cache after that depends on what the other lacks."""
    longer = PROMPT + list(range(50, 71))
    instance(num_ranks=2).serve("a", PROMPT)
    first_rank = [each for each in files(tmp_path) if each.name.endswith("0000")]
    first_rank.sort(key=lambda each: each.stat().st_mtime_ns)
    second = instance(num_ranks=2, keeps_saving=keeps_saving)
    request = second.submit("b", longer, 3)
    assert ask(second, request) == 28
    first_rank[lost].unlink()
    second.run()
    expected = answer(longer, 3, num_ranks=2)
    assert (request.num_failures, request.output_token_ids) == (1, expected)
    third = instance(num_ranks=2)
    request = third.serve("c", longer, 3)
    assert (request.num_failures, request.output_token_ids) == (0, expected)
    # All that the second one computed once more is there, and right.
    assert request.num_loaded == 48


def test_lost_blocks_are_stored_again(instance, tmp_path):
    made = instance()
    made.serve("a", PROMPT, 4)
    for each in files(tmp_path):
        each.unlink()
    assert made.serve("b", PROMPT, 4).num_loaded == 0
    assert instance().serve("c", PROMPT).num_loaded == 28


def test_folder_removed_by_hand_is_made_again(instance, tmp_path):
    made = instance()
    made.serve("a", PROMPT)
    shutil.rmtree(tmp_path / "shared" / FORMAT)
    assert made.serve("b", PROMPT).num_loaded == 0
    assert instance().serve("c", PROMPT).num_loaded == 28


def test_reset_is_refused_as_other_instances_share_the_folder(instance):
    assert instance().scheduler.reset_cache() is False


# -- the bound


def test_least_recently_used_prefix_is_evicted_from_its_end(instance, tmp_path):
    prompts = {name: [n, *PROMPT] for n, name in enumerate("abcdefgh")}
    made = instance()
    made.serve("a", prompts["a"])
    nbytes = sum(each.stat().st_size for each in files(tmp_path))
    # One thread: two would use the blocks of a prefix in nearly, not exactly, their order.
    small = instance(extra={"max_bytes": 4 * nbytes, "num_io_threads": 1})
    most = 0
    for turn, name in enumerate("bcadefagh"):
        small.serve(f"{name}{turn}", prompts[name])
        most = max(most, sum(each.stat().st_size for each in files(tmp_path)))
    assert 3 * nbytes < most <= 4 * nbytes
    assert stats(small)["files_evicted_total"] > 0
    found = {name: ask(small, Request(name, prompts[name])) for name in "abcdefgh"}
    assert [name for name, number in found.items() if number == 28] == ["a", "g", "h"]
    # What goes of a prefix is its end.
    assert all(found[name] for name in "f")
    assert not any(found[name] for name in "bcd")


def test_bound_below_one_block_keeps_nothing(instance, tmp_path):
    made = instance(extra={"max_bytes": 10})
    assert made.serve("a", PROMPT).output_token_ids == answer(PROMPT)
    assert files(tmp_path) == []
    assert stats(made)["put_failures_StorageError_total"] > 0


# -- options


def test_folder_that_others_may_write_to_is_refused(instance, tmp_path):
    instance().serve("a", PROMPT)
    (tmp_path / "shared" / FORMAT).chmod(0o777)
    with pytest.raises(StorageError, match="is not this user's alone"):
        instance()


def test_files_are_private(instance, tmp_path):
    before = os.umask(0)
    try:
        instance().serve("a", PROMPT)
    finally:
        os.umask(before)
    inner = tmp_path / "shared" / FORMAT
    modes = {path.stat().st_mode & 0o077 for path in (inner, *inner.rglob("*"))}
    assert modes == {0}
    assert len(list(inner.rglob("*"))) > NUM_BLOCKS


def test_path_that_is_no_folder_is_refused(tmp_path):
    Path(tmp_path / "file").write_text("")
    options = {"shared_storage_path": str(tmp_path / "file")}
    with pytest.raises(StorageError, match="making the folder"):
        Instance(transfer_config("SharedStorageConnector", **options))


def test_cache_is_released_by_shutdown(instance):
    made = instance()
    made.serve("a", PROMPT)
    caches = [weakref.ref(each) for each in made.caches[0].values()]
    made.shutdown()
    made.caches.clear()
    gc.collect()
    assert [each() for each in caches] == [None] * len(caches)


def test_stats_are_numbers(instance):
    made = instance()
    made.serve("a", PROMPT)
    numbers = stats(made)
    assert numbers["puts_total"] == NUM_BLOCKS
    assert {type(each) for each in numbers.values()} <= {int, float}


def test_unknown_weights_share_within_the_process_only(instance, weights, tmp_path):
    """Nobody knows what it computes with, and it does not claim to."""
    weights.close()
    process_weights.begin_anew()
    instance().serve("a", PROMPT)
    assert instance().serve("b", PROMPT).num_loaded == 28
    process_weights.begin_anew()
    assert instance().serve("c", PROMPT).num_loaded == 0


@pytest.mark.parametrize("kind", ["committed unheard", "begins with a load"])
def test_blocks_freed_by_the_host_are_not_stored(instance, weights, kind):
    """Between two steps: preempted, as vLLM does for a reset, and then given up by its user."""
    prompt = [*range(30)] if kind == "committed unheard" else [*range(40)]
    made = instance(num_blocks=12)
    made.step()
    if kind == "committed unheard":
        weights.settle("fingerprint-2")
    else:
        instance().serve("p", prompt[:30])
    begin(made, "r", prompt, max_tokens=4)
    if "r" in made.running:
        made.preempt("r")
    made.abort("r")
    # It gets the very blocks.
    made.serve("other", range(500, 540))
    shorter = prompt[:-6]
    assert instance().serve("again", shorter).output_token_ids == answer(shorter)
