"""How far each request has come, step by step."""

from __future__ import annotations

import pytest

from wtransfer.connectors.tracked_requests import TrackedRequests, only_group
from wtransfer.errors import ConnectorOptionError
from wtransfer.testing.mini_engine.contract import (
    CachedRequestData,
    NewRequestData,
    Request,
    SchedulerOutput,
)

REQUEST, OTHER = Request("r", [1, 2, 3], 1), Request("s", [4], 1)


@pytest.fixture
def progress():
    made = TrackedRequests()
    made.know(REQUEST)
    made.know(OTHER)
    return made


def new(request_id="r", blocks=(7, 8), before=0, number=3):
    data = NewRequestData(request_id, [1, 2, 3], (list(blocks),), before)
    return SchedulerOutput([data], num_scheduled_tokens={request_id: number})


def cached(request_id="r", blocks=None, before=3, number=1, resumed=()):
    data = CachedRequestData([request_id], set(resumed), [blocks], [before])
    return SchedulerOutput(scheduled_cached_reqs=data, num_scheduled_tokens={request_id: number})


def step(progress, output):
    return [
        (each.request.request_id, each.block_ids, each.num_before, each.num_computed)
        for each in progress.step(output)
    ]


def test_new_request(progress):
    assert step(progress, new(before=4, number=3)) == [("r", [7, 8], 4, 7)]
    assert next(progress.step(new())).request is REQUEST


def test_running_request_is_given_more_blocks_or_none(progress):
    step(progress, new())
    assert step(progress, cached()) == [("r", [7, 8], 3, 4)]
    assert step(progress, cached(blocks=([9],), before=4)) == [("r", [7, 8, 9], 4, 5)]
    assert step(progress, cached(blocks=([],), before=5)) == [("r", [7, 8, 9], 5, 6)]


def test_request_that_was_set_back_computes_once_more(progress):
    step(progress, new(before=8, number=3))
    assert step(progress, cached(before=4, number=7)) == [("r", [7, 8], 4, 11)]


def test_resumed_request_has_other_blocks(progress):
    step(progress, new())
    output = cached(blocks=([1, 2],), before=0, number=4, resumed="r")
    assert step(progress, output) == [("r", [1, 2], 0, 4)]
    assert step(progress, cached(before=4)) == [("r", [1, 2], 4, 5)]


def test_speculated_token_is_not_computed(progress):
    """Its keys and values are there, but may be those of another token than comes out."""
    step(progress, new())
    output = cached(number=4)
    output.scheduled_spec_decode_tokens = {"r": [98, 99, 97], "s": [1]}
    assert step(progress, output) == [("r", [7, 8], 3, 4)]
    output = new(number=5)
    output.scheduled_spec_decode_tokens = {"r": [98]}
    assert step(progress, output) == [("r", [7, 8], 0, 4)]


def test_step_with_new_and_running_requests(progress):
    step(progress, new("s", blocks=[3]))
    output = new()
    output.scheduled_cached_reqs = cached("s", before=1).scheduled_cached_reqs
    output.num_scheduled_tokens["s"] = 1
    assert step(progress, output) == [("r", [7, 8], 0, 3), ("s", [3], 1, 2)]


def test_step_without_requests(progress):
    assert step(progress, SchedulerOutput()) == []


def test_lists_of_the_host_are_not_changed(progress):
    output = new()
    step(progress, output)
    step(progress, cached(blocks=([9],)))
    assert output.scheduled_new_reqs[0].block_ids == ([7, 8],)


def test_finished_request_is_removed(progress):
    step(progress, new())
    progress.forget("r")
    progress.forget("r")
    with pytest.raises(KeyError):
        step(progress, cached())


def test_several_cache_groups_are_refused():
    assert only_group(([1, 2],)) == [1, 2]
    with pytest.raises(ConnectorOptionError, match="this model has 2 KV cache groups"):
        only_group(([1], [2]))
