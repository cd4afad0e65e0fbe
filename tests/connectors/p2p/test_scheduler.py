"""What the scheduler's side plans, hands over and takes back, call by call."""

from __future__ import annotations

import pytest
from sides import request_of, step

from wtransfer.connectors.interface import KVConnectorOutput

NUM_TOKENS = 42
BLOCKS = 10
DECODE = {"do_remote_decode": True}


@pytest.fixture
def make(sides):
    return lambda: sides("SharedMemoryConnector", num_blocks=32, staging_bytes=1 << 20)


def begin(one, name="r"):
    """Compute the first half of a prompt; return its request."""
    request = request_of(name, NUM_TOKENS, params=DECODE)
    one.begin(request, range(BLOCKS + 1))
    one.step(step(new=[(request, 0, 20)]))
    return request


def finish(one, request):
    """End a request, and tell the workers; return the parameters for the next instance."""
    stays, params = one.scheduler.request_finished(request, request.block_ids)
    assert not stays
    one.step()
    return params


def prefill(one):
    request = begin(one)
    one.step(step(cached=[(request, 20, 22)]))
    return finish(one, request)


def count(one, what):
    return one.workers[0].get_stats().get(what, 0)


def until_received(one, name):
    while not any(name in said.received for said in one.step()[1]):
        pass


@pytest.mark.parametrize("changes", [False, True])
def test_prompt_computed_anew_is_handed_over_whole(make, weights, *, changes):
    one = make()
    request = begin(one)
    if changes:
        weights.settle("B")
        one.step()
    one.ask(request)
    one.allocate(request, range(BLOCKS + 1, 2 * BLOCKS + 2))
    metadata, _ = one.step(step(cached=[(request, 0, NUM_TOKENS)], resumed=["r"]))
    assert [len(save.keys) for save in metadata.saves] == [BLOCKS if changes else BLOCKS - 5]
    assert finish(one, request)["remote_num_tokens"] == BLOCKS * 4
    assert count(one, "blocks_saved_total") == BLOCKS + (5 if changes else 0)


def test_asking_does_not_let_a_running_request_begin_anew(make, weights):
    """Else its next blocks, computed behind blocks of old weights, pass for blocks of new ones."""
    one = make()
    request = begin(one)
    weights.settle("B")
    one.step()
    assert one.ask(request, 20) == (0, False)
    assert one.step(step(cached=[(request, 20, 22)]))[0].saves == []
    assert finish(one, request) is None


def test_asking_does_not_change_what_is_loaded(make):
    one, other = make(), make()
    request = request_of("d", NUM_TOKENS, params=prefill(one))
    before = other.scheduler.get_stats()
    assert other.ask(request) == (40, True)
    assert other.ask(request, 12) == (28, True)
    assert other.scheduler.get_stats() == before
    other.scheduler.on_new_request(request)
    assert other.ask(request, 12) == (28, True)
    other.allocate(request, range(BLOCKS + 1), 40)
    (load,) = other.tell().loads
    assert (len(load.keys), load.block_ids) == (BLOCKS, list(range(BLOCKS)))


def test_blocks_that_came_before_a_commit_do_not_begin_under_the_new_weights(make, weights):
    """A request whose load has ended gets blocks once more, and has blocks of the old weights."""
    one, middle = make(), make()
    request = request_of("m", NUM_TOKENS, params={**prefill(one), **DECODE})
    assert middle.begin(request, range(BLOCKS + 1)) == 40
    until_received(middle, "m")
    weights.settle("B")
    middle.step()
    middle.allocate(request, request.block_ids)
    assert middle.step(step(new=[(request, 40, 2)]))[0].saves == []
    assert finish(middle, request) is None


def test_prompt_that_lives_through_a_commit_is_not_handed_over(make, weights):
    """FAULTS 47."""
    one = make()
    request = begin(one)
    weights.settle("B")
    # The scheduler's side does not know of it yet; the worker's does.
    metadata, _ = one.step(step(cached=[(request, 20, 20)]))
    assert len(metadata.saves) == 1
    assert count(one, "blocks_saved_total") == 5
    assert one.step(step(cached=[(request, 40, 2)]))[0].saves == []
    assert finish(one, request) is None
    assert count(one, "leases") == 0


def test_load_planned_before_a_commit_is_not_looked_up(make, weights):
    one, other = make(), make()
    request = request_of("d", NUM_TOKENS, params=prefill(one))
    assert other.begin(request, range(BLOCKS + 1)) == 40
    weights.settle("B")
    (said,) = other.step()[1]
    assert (said.bad, said.received) == (set(range(BLOCKS)), {"d"})
    assert count(other, "blocks_missed_weights_total") == BLOCKS
    assert "lookups_total" not in one.workers[0].get_stats()


def test_blocks_of_a_failed_load_are_invalidated(make):
    one = make()
    request = begin(one)
    one.step(step(cached=[(request, 20, 22)]))
    one.scheduler.update_connector_output(KVConnectorOutput(invalid_block_ids={4}))
    one.step()
    assert count(one, "blocks_invalidated_total") == BLOCKS - 4
    assert finish(one, request)["remote_num_tokens"] == 4 * 4


@pytest.mark.parametrize("why", ["invalid blocks", "a step that does not count", "other weights"])
def test_request_whose_saves_were_all_taken_back_is_released(make, weights, why):
    one = make()
    if why == "a step that does not count":
        request = request_of("r", NUM_TOKENS, params=DECODE)
        one.begin(request, range(BLOCKS + 1))
        one.step(step(new=[(request, 0, NUM_TOKENS)]), counts=False)
        assert count(one, "blocks_saved_total") == 0
    else:
        request = begin(one)
        assert count(one, "leases") == 1
    if why == "invalid blocks":
        one.scheduler.update_connector_output(KVConnectorOutput(invalid_block_ids={0}))
    elif why == "other weights":
        weights.settle("B")
        one.step()
        one.ask(request)  # after a preemption
    assert finish(one, request) is None
    assert count(one, "leases") == count(one, "slots_leased") == 0
