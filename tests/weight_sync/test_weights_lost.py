"""Weights that a host has lost by itself: said at once, named no more, and brought again."""

from __future__ import annotations

import pytest
import torch

from wtransfer.checkpoint.versions import VersionStore
from wtransfer.errors import ClosedError, CommitError, RoundBusyError
from wtransfer.testing.contents import contents
from wtransfer.weight_sync.trainer.catch_up import MAX_ATTEMPTS
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.worker.session import WorkerSession
from wtransfer.weight_sync.worker.target import StateDictTarget


class Remembering(StateDictTarget):
    """Gives back what it was given last, as a serving engine's model does, and has no form."""

    def __init__(self, tensors):
        super().__init__(tensors, "copy")
        self.applied = None
        self.fails = False

    def schema(self):
        return None

    def apply(self, tensors):
        if self.fails:
            raise RuntimeError("the model says no")
        super().apply(tensors)
        self.applied = dict(tensors)

    def capture(self):
        return self.applied

    present = capture

    def forget(self):
        self.applied = None


def told(fleet):
    return [(each.version, each.state) for each in fleet.publisher.workers()]


def lose(member):
    """Let a model's memory go, as sleep does."""
    for tensor in member.model.values():
        tensor.zero_()
    member.session.weights_lost("asleep")


def zeros(weights):
    return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}


def test_worker_that_loses_its_weights_is_empty_until_the_publisher_sends_them_again(
    fleet, weights, until
):
    made = fleet(weights, engine="shm")
    stays, loses = made.join(), made.join(commit="copy")
    report = made.publish("v1")
    lose(loses)
    assert (loses.session.version, loses.session.state) == (None, "empty")
    assert loses.session.fingerprint.startswith("local:")
    assert not loses.session.status().pending
    # Nobody publishes: the publisher was told, and brings what is current.
    assert loses.session.commit_pending(5.0)
    assert (loses.session.fingerprint, loses.session.state) == (report.fingerprint, "serving")
    assert loses.contents == stays.contents == contents(weights)
    until(lambda: told(made) == [("v1", "serving")] * 2)


def test_worker_that_cannot_be_sent_its_weights_again_is_empty_until_the_next_round(
    fleet, engines, weights, until
):
    made = fleet(weights, engine=engines["memory"])
    stays, loses = made.join(), made.join(commit="copy")
    assert made.publish("v1").ok
    lose(loses)
    until(lambda: told(made) == [("v1", "serving"), (None, "empty")])
    assert stays.session.version == "v1"
    assert made.publish("v2").ok
    assert told(made) == [("v2", "serving")] * 2


def test_a_set_that_waits_outlives_the_weights_that_it_was_to_replace(
    fleet, engine, weights, caplog, until, *, judged, report_of
):
    made = fleet(weights, engine=engine)
    member = made.join(commit="copy")
    assert made.publish("v1").ok
    weights["layer.0"] += 1
    with judged(made.publisher, 0.5):
        late = made.publisher.publish("v2", wait=False)
    until(lambda: member.session.status().pending)
    lose(member)
    # For the host: it must not serve. For the publisher: there is nothing to send.
    assert (member.session.state, member.session.status().pending) == ("empty", True)
    until(lambda: told(made) == [(None, "pending")])
    assert [each.outcome for each in report_of(late.result, 5).workers] == ["pending"]
    assert member.session.commit_pending()
    assert (member.session.version, member.session.state) == ("v2", "serving")
    assert member.contents == contents(weights)
    until(lambda: told(made) == [("v2", "serving")])
    assert "catch-up" not in caplog.text


def test_publisher_joined_after_the_loss_is_told_of_the_pending_set(
    fleet, engines, weights, until, report_of
):
    made = fleet(weights, engine=engines["memory"])
    member = made.join(commit="copy")
    round_ = made.publisher.publish("v1", wait=False)
    until(lambda: member.session.status().pending)
    lose(member)
    member.session.leave(made.publisher.address)
    with Publisher(weights, engine=engines["memory"]) as other:
        member.session.join(other.address, token=other.token)
        other.wait_for_workers(1, 5.0)
        assert [(each.version, each.state) for each in other.workers()] == [(None, "pending")]
        # Its publisher has gone, and the next one hears what came of it.
        assert member.session.status().orphaned
        assert member.session.commit_pending()
        until(lambda: [each.version for each in other.workers()] == ["v1"])
    assert [each.outcome for each in report_of(round_.result, 5).workers] == ["lost"]


def test_a_commit_that_fails_after_the_loss_does_not_name_the_old_set_again(
    fleet, engines, weights, report_of
):
    made = fleet(weights, engine=engines["memory"])
    target = Remembering(zeros(weights))
    member = made.join(target)
    assert made.publish("v1").ok
    assert member.session.digests()
    member.session.weights_lost("reloaded")
    assert member.session.digests() == {}
    target.fails = True
    round_ = made.publisher.publish("v2", wait=False)
    with pytest.raises(CommitError, match="must not serve") as caught:
        member.session.commit_pending(5.0)
    assert not caught.value.restored
    assert [each.outcome for each in report_of(round_.result, 5).workers] == ["empty"]
    target.fails = False
    assert made.publish("v3").ok


def test_worker_that_was_given_up_is_sent_the_weights_when_it_reports_a_loss_again(
    fleet, weights, caplog
):
    made = fleet(weights, engine="shm")
    target = Remembering(zeros(weights))
    member = made.join(target)
    assert made.publish("v1").ok
    member.session.weights_lost("asleep")
    target.fails = True
    for _ in range(MAX_ATTEMPTS):
        with pytest.raises(CommitError, match="the model says no"):
            member.session.commit_pending(5.0)
    target.fails = False
    assert not member.session.commit_pending(1.0)
    member.session.weights_lost("awake without weights")
    assert member.session.commit_pending(5.0)
    assert contents(target.applied) == contents(weights)
    caplog.clear()  # what was logged holds frames, and those hold tensors


def test_worker_that_loses_its_weights_after_the_commit_is_reported_empty(
    fleet, engines, weights, until
):
    made = fleet(weights, engine=engines["memory"])
    quick, slow = made.join(commit="copy"), made.join()
    round_ = made.publisher.publish("v1", wait=False)
    assert quick.session.commit_pending(5.0)
    lose(quick)
    until(lambda: (None, "empty") in told(made))
    assert slow.session.commit_pending(5.0)
    report = round_.result(5)
    assert [each.outcome for each in report.workers] == ["empty", "committed"]
    assert report.outcome == "mixed"


def test_a_loss_in_the_middle_of_a_round_does_not_end_it(fleet, engines, weights, gated, until):
    made = fleet(gated, engine=engines["memory"])
    member = made.join(zeros(weights), commit="copy")
    gated.gate.clear()
    round_ = made.publisher.publish("v1", wait=False)
    assert gated.reached.wait(5.0)
    lose(member)
    until(lambda: told(made) == [(None, "empty")])
    gated.gate.set()
    assert made.finish(round_).ok
    assert (member.session.version, member.contents) == ("v1", contents(weights))


def test_a_folder_brings_it_again_where_no_publisher_lives(fleet, weights, tmp_path, monkeypatch):
    monkeypatch.setattr("wtransfer.weight_sync.worker.follower.POLL_S", 0.02)
    store = VersionStore(tmp_path / "store")
    made = fleet(weights, engine="file", options={"path": str(store.root)})
    made.join()
    assert made.publish("v1").ok
    made.close()
    tensors = zeros(weights)
    with WorkerSession(tensors, join=f"file:{store.root}", commit="copy") as session:
        for _ in range(3):
            assert session.commit_pending(5.0)
            assert (session.version, contents(tensors)) == ("v1", contents(weights))
            assert not session.commit_pending(0.1)
            for tensor in tensors.values():
                tensor.zero_()
            session.weights_lost("asleep")


def test_a_session_that_applies_or_is_closed_loses_nothing(fleet, engines, weights):
    made = fleet(weights, engine=engines["memory"])
    refused = []

    class Losing(StateDictTarget):
        def apply(self, tensors):
            with pytest.raises(RoundBusyError) as caught:
                member.session.weights_lost("from within")
            refused.append(caught.value.message)
            super().apply(tensors)

    member = made.join(Losing(zeros(weights)))
    assert made.publish("v1").ok
    assert (len(refused), member.session.state) == (1, "serving")
    member.session.close()
    with pytest.raises(ClosedError):
        member.session.weights_lost("too late")
    assert member.session.version == "v1"
