"""Which worker a round blames when a group of workers breaks or stalls."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from wtransfer.errors import GroupError, PeerLostError, StallError
from wtransfer.weight_sync.messages import Accept, Hello, Progress
from wtransfer.weight_sync.trainer.coordinator import Coordinator, Rules
from wtransfer.weight_sync.trainer.engine_runner import Origin
from wtransfer.weight_sync.trainer.membership import Membership
from wtransfer.weight_sync.trainer.workers import Worker


@pytest.fixture
def group():
    """A round of a group of three, whose peers' answers a test makes up; and the three."""

    def make(deadline_s=0.2):
        names = [f"worker-{i}" for i in range(3)]
        workers = [
            Worker(SimpleNamespace(last_heard_s=0.0), Hello(name, name, 0, 1, None, "", "fresh"))
            for name in names
        ]
        source = SimpleNamespace(moved_at=0.0, reading=False)
        round_ = Coordinator(
            "v1",
            runner=SimpleNamespace(source=source, name="gloo", plugin="engines:gloo", started=True),
            membership=Membership(on_join=None),
            instances={worker.name: [worker] for worker in workers},
            rules=Rules(deadline_s=deadline_s),
            origin=Origin("gloo", needs_generation=True, epoch=1),
            is_gating=lambda _workers: True,
            absent=dict,
            apply=None,
            on_planned=None,
            on_packed=None,
            on_done=None,
        )
        for worker in workers:
            worker.connection.send_frame = lambda _frame: None
        return round_, workers

    return make


def move(round_, workers, nbytes):
    for worker, each in zip(workers, nbytes, strict=True):
        round_.state.answer(worker, Accept(round_.round_id, []))
        round_.state.answer(worker, Progress(round_.round_id, each))


def test_a_rank_that_is_lost_is_told_though_others_complained_before(group):
    round_, workers = group()
    round_.state.fault(workers[0], GroupError("connection closed by peer"))
    round_.check()
    round_.state.lose(workers[2], PeerLostError("worker-2 is gone", worker="worker-2"))
    with pytest.raises(PeerLostError) as lost:
        round_.check()
    assert lost.value.worker == "worker-2"


def test_a_group_that_broke_for_no_other_reason_ends_the_round(group):
    round_, workers = group(deadline_s=30)
    round_.state.fault(workers[1], GroupError("connection closed by peer", worker="worker-1"))
    with pytest.raises(GroupError) as broken:
        round_._await(lambda _rank: False, "an ack")
    assert broken.value.worker == "worker-1"


def test_silent_worker_is_blamed_though_others_stopped_moving_before(group):
    round_, workers = group()
    move(round_, workers, [5, 5, 9])
    workers[2].connection.last_heard_s = 0.15
    with pytest.raises(StallError) as stalled:
        round_._await(lambda _rank: False, "an ack")
    assert stalled.value.worker == "worker-2"
    assert str(stalled.value).startswith("worker-2 made no progress on an ack for 0.2 s")


def test_where_all_answer_all_are_named_and_the_one_behind_comes_first(group):
    round_, workers = group()
    move(round_, workers, [7, 5, 9])
    with pytest.raises(StallError) as stalled:
        round_._await(lambda _rank: False, "an ack")
    assert stalled.value.worker == "worker-1"
    assert str(stalled.value).startswith("worker-1, worker-0, worker-2 (all of them answer")
