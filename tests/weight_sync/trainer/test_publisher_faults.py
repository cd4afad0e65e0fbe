"""A publisher after errors of its own: interrupts, no more threads, and what it then says."""

from __future__ import annotations

import threading
import time
from typing import ClassVar

import pytest
import torch

from wtransfer import WeightTransferEngineFactory
from wtransfer.engines.shm import ShmTrainerEngine
from wtransfer.errors import (
    CommitError,
    NoWorkersError,
    PeerLostError,
    RoundAbortedError,
)
from wtransfer.testing.fakes import MemoryEngine
from wtransfer.weight_sync.report import Report, WorkerReport
from wtransfer.weight_sync.trainer.gather_group import GatherGroup
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.trainer.sharded import ShardedSource

# -- own errors after the commit was sent


@pytest.fixture
def no_thread(monkeypatch):
    """Lets no thread of a given name start, as often as it says."""
    start = threading.Thread.start
    left = {}

    def refuse(thread):
        if left.get(thread.name, 0) > 0:
            left[thread.name] -= 1
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    return left


def test_own_error_after_the_commit_does_not_claim_that_workers_keep_their_version(
    fleet, weights, no_thread
):
    made = fleet(weights, engine="tests-deaf")
    member = made.join()
    # The engine does not return; it is left behind, and cannot even be shut down.
    no_thread["wtransfer-shutdown"] = 1
    with pytest.raises(CommitError, match="after its commit was sent") as caught:
        made.publish("v1")
    DeafTrainer.was_left.set()
    assert not isinstance(caught.value, RoundAbortedError)
    assert (caught.value.version, caught.value.phase) == ("v1", "commit")
    assert member.session.version == "v1"
    # The publisher goes on from what its workers hold.
    assert made.publisher.version == "v1"
    joiner = made.join()
    assert made.publish("v2").ok
    assert joiner.session.version == "v2"


# -- what workers that do not apply in time, and engines that come too late, are told


def test_ranks_that_have_not_applied_in_time_drop_the_update_together(
    fleet, weights, judged, report_of
):
    made = fleet(weights, engine="tests-no-resend")
    ranks = [made.join(instance="both", rank=rank, num_ranks=2) for rank in range(2)]
    with judged(made.publisher, 0.5):
        report = report_of(made.publisher.publish, "v1")
    assert [each.outcome for each in report.workers] == ["discarded", "discarded"]
    assert not any(rank.session.status().pending for rank in ranks)
    assert {rank.session.version for rank in ranks} == {None}


class LateTrainer(MemoryEngine.trainer_cls):
    """Keeps the client of its last instance, which a thread of an engine may do."""

    last_client = None

    def send_weights(self):
        super().send_weights()
        LateTrainer.last_client = self.client


class NoResend(MemoryEngine):
    trainer_cls = LateTrainer


class DeafTrainer(MemoryEngine.trainer_cls):
    """Takes longer to hear of its first round's end than anybody waits."""

    was_left = threading.Event()

    def round_finished(self, *, committed):
        if not hasattr(DeafTrainer, "heard"):
            DeafTrainer.heard = committed
            self.was_left.wait(20)


class Deaf(MemoryEngine):
    trainer_cls = DeafTrainer


@pytest.fixture(autouse=True, scope="module")
def engines():
    WeightTransferEngineFactory.register_engine("tests-no-resend", NoResend)
    WeightTransferEngineFactory.register_engine("tests-deaf", Deaf)


def test_engine_that_sends_after_the_commit_is_refused(fleet, weights):
    made = fleet(weights, engine="tests-no-resend")
    made.join()
    assert made.publish("v1").ok
    with pytest.raises(RoundAbortedError, match="over for its engine"):
        LateTrainer.last_client.update_weights({"names": []})


# -- FAULTS 49: nothing between the entry of `publish` and its round leaves the publisher busy


def test_publish_that_gets_no_thread_leaves_the_publisher_free(fleet, weights, no_thread):
    made = fleet(weights)
    made.join()
    no_thread["wtransfer-round"] = 1
    with pytest.raises(RoundAbortedError, match="can't start new thread"):
        made.publish("v1")
    assert made.publish("v2").ok


def test_catch_up_that_gets_no_thread_is_tried_again(fleet, weights, no_thread):
    made = fleet(weights)
    made.join()
    assert made.publish("v1").ok
    no_thread["wtransfer-round"] = 1
    joiner = made.join()
    deadline = time.monotonic() + 5
    while joiner.session.version != "v1" and time.monotonic() < deadline:
        made.step()
    assert joiner.session.version == "v1"
    assert made.publish("v2").ok


def end_rounds_in_every_way(fleet, gated):
    """Run a round that does not begin, one that commits, one that is called off."""
    made = fleet(gated)
    with pytest.raises(NoWorkersError):
        made.publisher.publish("v0")
    made.join({name: torch.zeros_like(each) for name, each in gated.tensors.items()})
    assert made.publish("v1").ok
    gated.gate.clear()
    round_ = made.publisher.publish("v2", wait=False)
    round_.abort("called off")
    # Only now: called off too late, the round would be committed.
    gated.gate.set()
    with pytest.raises(RoundAbortedError):
        round_.result()
    return made


@pytest.mark.parametrize("method", ["post", "pause", "wake", "start", "flush"])
def test_publisher_without_other_ranks_enters_no_lock_of_their_group(
    fleet, gated, monkeypatch, method
):
    """Those locks are Python code: a signal handler that raises there would leave them taken."""
    entered = []
    monkeypatch.setattr(GatherGroup, method, lambda *_: entered.append(method))
    end_rounds_in_every_way(fleet, gated)
    assert entered == []


def test_publisher_of_plain_weights_makes_no_group_of_ranks(fleet, gated, monkeypatch):
    for cls in (ShardedSource, GatherGroup):
        monkeypatch.setattr(cls, "__init__", lambda *_, **__: pytest.fail("there are no ranks"))
    assert end_rounds_in_every_way(fleet, gated).publish("v3").ok


# -- what engines and people are told


class Placed(MemoryEngine):
    """Notes where its worker stands among the others."""

    places: ClassVar[list[tuple[int, int]]] = []

    def __init__(self, config, parallel_config):
        super().__init__(config, parallel_config)
        self.places.append(
            (parallel_config.data_parallel_index, parallel_config.data_parallel_size)
        )


def test_joiner_takes_a_place_among_the_instances_that_no_other_has(fleet, weights):
    WeightTransferEngineFactory.register_engine("tests-placed", Placed)
    made = fleet(weights, engine="tests-placed")
    members = [made.join() for _ in range(3)]
    assert made.publish("v1").ok
    assert sorted(Placed.places) == [(0, 3), (1, 3), (2, 3)]
    Placed.places.clear()
    made.leave(members[0])
    made.join()
    ranks = [made.join(instance="both", rank=rank, num_ranks=2) for rank in range(2)]
    assert made.publish("v2").ok
    # The first is free again; both ranks of an instance have one, though it came by halves.
    assert sorted(Placed.places) == [(0, 3), (3, 4), (3, 4)]
    assert [rank.session.version for rank in ranks] == ["v2", "v2"]


@pytest.mark.parametrize("token", [None, "known"])
def test_too_few_workers_are_explained_by_a_token_that_the_publisher_made_itself(
    weights, monkeypatch, token
):
    monkeypatch.delenv("WTRANSFER_TOKEN", raising=False)
    monkeypatch.delenv("WTRANSFER_TOKEN_FILE", raising=False)
    with Publisher(weights, token=token) as publisher:
        for call in (lambda: publisher.wait_for_workers(1, 0.01), lambda: publisher.publish("v")):
            with pytest.raises(NoWorkersError) as caught:
                call()
            for hint in ("made its own", "its `token`"):
                assert (hint in str(caught.value)) == (token is None)


@pytest.mark.parametrize(
    ("outcome", "meaning"),
    [
        ("committed", "it committed, and was lost afterwards: unix:@w: process 7 is gone"),
        ("lost", "which version it holds it says when it joins again: unix:@w: process 7 is gone"),
    ],
)
def test_report_says_what_the_loss_of_a_worker_means(outcome, meaning):
    lost = PeerLostError("unix:@w: process 7 is gone", worker="w")
    line = WorkerReport("w", "i", 0, outcome, "v1", "f", digests_equal=True, error=lost)
    assert meaning in str(Report("v1", "f", "r", 4, (line,), {}, 0.0))


# -- engines that return after they were left behind


class LateEngine(ShmTrainerEngine):
    """Its first is held where its workers have been asked, or before, until it is left behind."""

    held = threading.Event()
    where: ClassVar[str]
    made: ClassVar[list[LateEngine]]
    shut: ClassVar[list[LateEngine]]

    @classmethod
    def trainer_init(cls, init_info, *, client, source=None):
        first = not cls.made
        cls.made.append(None)
        if first and cls.where == "before":
            cls.held.wait(20)
        engine = super().trainer_init(init_info, client=client, source=source)
        if first and cls.where == "after":
            cls.held.wait(20)
        return engine

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.made.append(self)

    def shutdown(self):
        self.shut.append(self)
        super().shutdown()


@pytest.mark.parametrize("where", ["before", "after"])
def test_engine_that_returns_late_is_shut_down_and_touches_no_later_round(
    fleet, weights, monkeypatch, where, until
):
    for name, value in {"where": where, "made": [], "shut": [], "held": threading.Event()}.items():
        monkeypatch.setattr(LateEngine, name, value, raising=False)
    made = fleet(weights, engine="shm", trainer=LateEngine)
    made.join()
    round_ = made.publisher.publish("v1", wait=False)
    until(lambda: LateEngine.made)
    round_.abort("late")
    with pytest.raises(RoundAbortedError):
        round_.result(10)
    LateEngine.held.set()
    assert made.publish("v2").ok
    made.close()
    # The thread that was left behind may still be at work.
    until(lambda: len(set(LateEngine.made) - {None}) == 2)
    until(lambda: set(LateEngine.shut) == set(LateEngine.made) - {None})
