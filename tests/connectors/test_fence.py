"""What each side of a connector knows of the weights, and when it has to do without."""

from __future__ import annotations

import pytest

from wtransfer.connectors.fence import (
    SchedulerFence,
    StampedHandshake,
    WorkerFence,
    WorkerStamps,
    handshake_stamps,
    plain_stamps,
)
from wtransfer.connectors.interface import KVConnectorHandshakeMetadata
from wtransfer.weights import ProcessWeights, instance_fingerprint, known_stamps

A, B = ("A", 1), ("B", 2)


@pytest.fixture
def fence():
    """Of two ranks, both of which have been heard."""
    made = SchedulerFence(2)
    made.hear({0: A, 1: A})
    return made


# -- the scheduler's side


def test_nothing_is_known_before_all_ranks_are_heard():
    fence = SchedulerFence(2)
    assert fence.begin("r") is None
    fence.hear({0: A})
    assert (fence.now, fence.begin("r")) == (None, None)
    fence.hear({1: A})
    assert fence.begin("r") == "A"


def test_hearing_the_same_again_changes_nothing(fence):
    fence.begin("r")
    before = fence.now
    for said in ({0: A}, {}, {0: A, 1: A}):
        fence.hear(said)
        assert (fence.now, fence.stamps("r")) == (before, before)


def test_while_a_rank_changes_nothing_is_known(fence):
    fence.begin("r")
    fence.hear({1: None})
    assert (fence.now, fence.begin("s"), fence.stamps("r")) == (None, None, None)


def test_ranks_with_different_weights_have_a_name_together(fence):
    fence.hear({1: B})
    assert fence.begin("r") == instance_fingerprint(known_stamps([A, B]))
    assert fence.begin("r") not in ("A", "B")


def test_a_request_begins_with_what_there_is_when_it_gets_blocks(fence):
    """Until then it has computed nothing, and may be asked about again and again."""
    assert fence.begin("r") == "A"
    fence.hear({0: B, 1: B})
    assert fence.begin("r") == "B"
    fence.settle("r")
    assert (fence.fingerprint("r"), fence.stamps("r")) == ("B", known_stamps([B, B]))


def test_a_request_that_lives_through_a_change_has_no_name_any_more(fence):
    fence.begin("r")
    fence.settle("r")
    fence.hear({0: B, 1: B})
    fence.settle("r")
    assert (fence.fingerprint("r"), fence.stamps("r")) == (None, None)


def test_not_even_when_the_weights_come_back(fence):
    """Epochs tell: what was computed in between was computed with others."""
    fence.begin("r")
    fence.settle("r")
    fence.hear({0: ("A", 3), 1: ("A", 3)})
    fence.settle("r")
    assert fence.fingerprint("r") is None
    assert fence.begin("s") == "A"


def test_a_request_that_has_lost_its_blocks_begins_anew(fence):
    """It is asked about only then, and is computed anew whole: under the weights there are now."""
    fence.begin("r")
    fence.settle("r")
    fence.hear({0: B, 1: B})
    assert fence.begin("r") == "B"
    fence.settle("r")
    assert fence.stamps("r") == known_stamps([B, B])


def test_a_request_that_nobody_asked_about_begins_when_it_gets_blocks(fence):
    fence.settle("r")
    assert fence.fingerprint("r") == "A"


def test_a_request_that_got_blocks_while_nothing_was_known_stays_out():
    fence = SchedulerFence(1)
    fence.begin("r")
    fence.settle("r")
    fence.hear({0: A})
    fence.settle("r")
    assert (fence.fingerprint("r"), fence.stamps("r")) == (None, None)


def test_a_request_that_has_ended_is_forgotten(fence):
    fence.begin("r")
    fence.settle("r")
    fence.hear({0: B, 1: B})
    fence.forget("r")
    assert fence.stamps("r") is None
    assert fence.begin("r") == "B"
    fence.forget("r")
    assert fence._began == {}


# -- a worker's side


@pytest.fixture
def process():
    return ProcessWeights()


def test_a_worker_admits_what_was_planned_for_the_weights_it_has(process):
    held = process.hold("A")
    fence = WorkerFence(1, process)
    planned = [("other rank", 7), tuple(fence.stamp())]
    assert fence.admits(planned)
    # As they arrive from another process.
    assert fence.admits([list(each) for each in planned])
    held.settle("B")
    assert not fence.admits(planned)
    held.settle("A")
    assert not fence.admits(planned)


@pytest.mark.parametrize("stamps", [[], [("A", 1)], [None, ("A", 1)], [("A", 1), None]])
def test_a_worker_admits_nothing_that_does_not_say_what_it_is_for(process, stamps):
    process.hold("A")
    assert not WorkerFence(1, process).admits(stamps)


def test_while_its_weights_change_a_worker_admits_nothing(process):
    held = process.hold("A")
    fence = WorkerFence(0, process)
    planned = [tuple(fence.stamp())]
    with held.changing(lambda: "A"):
        assert not fence.admits(planned)
        assert (fence.stamp(), fence.say()) == (None, {0: None})
    assert fence.say() == {0: ("A", fence.stamp().epoch)}


# -- in between


def test_what_ranks_say_is_put_together():
    one, other = WorkerStamps({0: A}), WorkerStamps({1: None})
    assert one.aggregate(other) is one
    assert one.stamps == {0: A, 1: None}


def test_a_worker_that_says_nothing_of_its_weights_has_none():
    assert StampedHandshake().stamp is None
    assert WorkerStamps().stamps == {}


def test_both_sides_together_through_a_change(process):
    held = process.hold("A")
    worker, scheduler = WorkerFence(0, process), SchedulerFence(1)
    scheduler.hear(worker.say())
    assert scheduler.begin("r") == "A"
    scheduler.settle("r")
    planned = scheduler.stamps("r")
    assert worker.admits(planned)
    held.settle("B")
    # The scheduler's side has not heard of it, and the worker has the last word.
    assert scheduler.stamps("r") == planned
    assert not worker.admits(planned)
    before = scheduler.now
    scheduler.hear(worker.say())
    assert scheduler.now != before
    assert scheduler.stamps("r") is None


def test_stamps_travel_as_plain_data():
    assert plain_stamps(known_stamps([A, B])) == [A, B]
    assert {type(each) for each in plain_stamps(known_stamps([A, B]))} == {tuple}
    assert plain_stamps(None) == []


def test_handshakes_that_say_nothing_of_weights_are_passed_over():
    said = {0: StampedHandshake(A), 1: KVConnectorHandshakeMetadata(), 2: StampedHandshake()}
    assert handshake_stamps(said) == {0: A, 2: None}
