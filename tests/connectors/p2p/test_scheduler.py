"""The scheduler's side alone: what it may change, and when a request begins anew."""

from __future__ import annotations

import pytest

PROMPT = list(range(42))
BLOCKS = 10


@pytest.fixture
def kind():
    return "SharedMemoryConnector"


@pytest.mark.parametrize("changes", [False, True])
def test_prompt_computed_anew_is_handed_over_whole(make, instance, *, changes):
    one, other = make("p"), make("d")
    request = one.prefill("r", PROMPT, chunk=20, upto=20, finish=False)
    one.free += one.requests["r"]
    if changes:
        make.weights.settle("w2")
        one.weights = other.weights = "w2"
        one.step()
        other.step()
    one.scheduler.get_num_new_matched_tokens(request, 0)
    blocks = one.requests["r"] = one.take(BLOCKS + 1)
    one.scheduler.update_state_after_alloc(request, instance.Blocks(blocks), 0)
    metadata = one.step(new=[(request, blocks, 0, len(PROMPT))])
    assert [len(save.keys) for save in metadata.saves] == [BLOCKS if changes else BLOCKS - 5]
    outcome = other.decode("s", PROMPT, one.finish(request))
    assert (outcome["matched"], outcome["loaded"], outcome["wrong"]) == (BLOCKS, BLOCKS, 0)


def test_asking_does_not_let_a_running_request_begin_anew(make):
    """Else its next blocks, computed behind blocks of old weights, pass for blocks of new ones."""
    one = make("p")
    request = one.prefill("r", PROMPT, chunk=20, upto=20, finish=False)
    make.weights.settle("w2")
    one.step()
    assert one.scheduler.get_num_new_matched_tokens(request, 20) == (0, False)
    assert one.step(rows=[(request, [], 20, 22)]).saves == []
    assert one.finish(request) is None


def test_asking_does_not_change_what_is_loaded(make, instance):
    one, other = make("p"), make("d")
    request = instance.Request("d", PROMPT, 1, one.prefill("r", PROMPT))
    scheduler = other.scheduler
    before = scheduler.get_stats()
    assert scheduler.get_num_new_matched_tokens(request, 0) == (40, True)
    assert scheduler.get_num_new_matched_tokens(request, 12) == (28, True)
    assert scheduler.get_stats() == before
    scheduler.on_new_request(request)
    assert scheduler.get_num_new_matched_tokens(request, 12) == (28, True)
    blocks = other.requests["d"] = other.take(BLOCKS + 1)
    scheduler.update_state_after_alloc(request, instance.Blocks(blocks), 40)
    other.step()
    other.until_received("d")
    assert (other.invalid, other.wrong(PROMPT, blocks, BLOCKS)) == (set(), [])
    other.finish(request)


def test_blocks_that_came_before_a_commit_do_not_begin_under_the_new_weights(make, instance):
    """A request whose load has ended gets blocks once more, and has blocks of the old weights."""
    one, middle = make("p"), make("m")
    request, _ = middle.begin("m", PROMPT, {**one.prefill("r", PROMPT), "do_remote_decode": True})
    middle.until_received("m")
    make.weights.settle("w2")
    middle.step()
    blocks = middle.requests["m"]
    middle.scheduler.update_state_after_alloc(request, instance.Blocks(blocks), 0)
    assert middle.step(new=[(request, blocks, 40, 2)]).saves == []
    assert middle.finish(request) is None
