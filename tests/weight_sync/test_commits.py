"""Applying a verified update: whole, or the old version again, and what is said of it."""

from __future__ import annotations

import asyncio
import time
import weakref

import pytest
import torch
from torch import nn

from wtransfer.errors import ClosedError, CommitError, PeerLostError, RoundBusyError
from wtransfer.testing.contents import contents
from wtransfer.weight_sync.report import Report, WorkerReport


@pytest.fixture
def two_workers(fleet, engine, weights, commit, join):
    """A worker whose model may refuse, and one whose model does not."""
    made = fleet(weights, engine=engine, deadline_s=5.0)
    join(made, commit)
    made.join(commit=commit)
    return made


def step_on(fleet):
    for tensor in fleet.source.values():
        tensor.add_(1)


def outcomes(report):
    return [each.outcome for each in report.workers]


# -- FAULTS 17: the model's own loading raises


@pytest.mark.parametrize("failing_round", [1, 2])
def test_the_old_version_is_back_wherever_loading_raised(two_workers, failing_round):
    broken, sound = two_workers.members
    for round_number in range(1, failing_round):
        assert two_workers.publish(f"v{round_number}").ok
        step_on(two_workers)
    for at, name in enumerate(two_workers.source):
        before = (broken.session.version, broken.session.fingerprint, broken.contents)
        broken.target.fails_at = at
        report = two_workers.publish(f"failing at {at}")
        assert not report.ok
        assert report.outcome == "mixed"
        assert outcomes(report) == ["restored", "committed"]
        # Whole again, bit for bit, and it says so.
        told = report.workers[0]
        assert (told.version, told.fingerprint) == before[:2]
        (error,) = two_workers.commit_errors
        assert error.restored
        assert (error.piece, error.phase, error.worker) == (name, "commit", "worker-0")
        assert (error.version, error.round_id) == (f"failing at {at}", report.round_id)
        assert f"after reading {name!r}" in str(error)
        assert "the model says no" in str(told.error)
        assert isinstance(told.error, CommitError)
        assert isinstance(error.__cause__, RuntimeError)
        assert sound.contents == contents(two_workers.source)
        two_workers.commit_errors.clear()
        step_on(two_workers)
        assert two_workers.publish(f"after {at}").ok
        assert [m.contents for m in two_workers.members] == [contents(two_workers.source)] * 2
        step_on(two_workers)


# FAULTS 43, for a worker that is alive and stays behind
def test_weights_that_a_restored_worker_serves_are_never_rewritten(
    fleet, engine, weights, commit, join, *, report_of
):
    made = fleet(weights, engine=engine)
    member = join(made, commit)
    assert made.publish("v1").ok
    before = member.contents
    # Only v1 is ever applied, however often the others are sent.
    member.target.fails_at, member.target.keeps_failing, member.target.takes = 0, True, before
    for version in ("v2", "v3", "v4"):
        step_on(made)
        assert outcomes(report_of(made.publish, version)) == ["restored"]
        assert (member.session.version, member.contents) == ("v1", before)
        made.commit_errors.clear()


def test_an_interrupt_while_applying_restores_and_goes_on_as_an_interrupt(two_workers):
    broken, sound = two_workers.members
    assert two_workers.publish("v1").ok
    before = broken.contents
    step_on(two_workers)
    broken.target.fails_at, broken.target.error = 2, KeyboardInterrupt()
    round_ = two_workers.publisher.publish("v2", wait=False)
    assert sound.session.commit_pending(5)
    with pytest.raises(KeyboardInterrupt):
        broken.session.commit_pending(5)
    assert broken.contents == before
    assert outcomes(round_.result()) == ["restored", "committed"]


def test_an_error_that_is_kept_keeps_no_tensors(fleet, weights, join, report_of):
    made = fleet(weights, engine="shm")
    member = join(made)
    handed = []

    def fail(tensors):
        del member.target.apply
        handed.extend(weakref.ref(tensor) for tensor in tensors.values())
        raise RuntimeError("no")

    member.target.apply = fail
    round_ = made.publisher.publish("v1", wait=False)
    with pytest.raises(CommitError) as kept:
        member.session.commit_pending(5)
    report_of(round_.result)
    assert isinstance(kept.value.__cause__, RuntimeError)
    assert [each() for each in handed] == [None] * len(weights)


# -- what the caller of a round is told


@pytest.mark.parametrize("call", ["publish", "result", "publish_async"])
def test_a_commit_that_no_worker_applies_raises_with_its_report(
    fleet, weights, judged, call, report_of
):
    made = fleet(weights, engine="shm")
    members = [made.join(), made.join()]
    calls = {
        "publish": made.publisher.publish,
        "result": lambda version: made.publisher.publish(version, wait=False).result(),
        "publish_async": lambda version: asyncio.run(made.publisher.publish_async(version)),
    }
    # The deadline bounds the steps before the commit as well, on a busy machine too.
    with judged(made.publisher, 1.0):
        report = report_of(calls[call], "v1")
    assert outcomes(report) == ["pending", "pending"]
    assert (report.version, report.holders, report.ok) == ("v1", (), False)
    # Verified is verified: it may be applied yet.
    assert made.publisher.version == "v1"
    assert [each.session.commit_pending(5) for each in members] == [True, True]
    assert made.publish("v2").raise_unless_ok().ok


def test_a_rollback_that_no_worker_applies_raises_with_its_report(publishing, judged, report_of):
    made = publishing(keep=2)
    assert made.publish("v1").ok
    step_on(made)
    assert made.publish("v2").ok
    # The deadline bounds the steps before the commit as well, on a busy machine too.
    with judged(made.publisher, 1.0):
        report = report_of(made.publisher.rollback, "v1")
    assert (report.version, outcomes(report)) == ("v1", ["pending"])


def test_a_mixed_report_raises_where_the_caller_wants_every_worker(two_workers):
    two_workers.members[0].target.fails_at = 0
    report = two_workers.publish("v1")
    with pytest.raises(CommitError, match="1 of 2 workers hold 'v1'") as caught:
        report.raise_unless_ok()
    assert caught.value.report is report
    assert "\n  worker-0 restored: " in str(caught.value)
    assert "the model says no" in str(caught.value)
    assert "worker-1" not in str(caught.value)
    two_workers.commit_errors.clear()


@pytest.mark.parametrize(
    ("ends", "restored"),
    [
        (["restored", "reverted", "discarded"], True),
        *((["restored", end], False) for end in ("pending", "empty", "lost", "dropped", "behind")),
    ],
)
def test_an_error_after_the_commit_says_whether_every_worker_is_on_its_old_version(ends, restored):
    workers = tuple(WorkerReport(f"w{n}", "i", n, end, None, "f") for n, end in enumerate(ends))
    with pytest.raises(CommitError) as caught:
        Report("v1", "f", "r", 4, workers, {}, 0.0).raise_unless_ok()
    assert caught.value.restored is restored
    assert (caught.value.round_id, caught.value.phase) == ("r", "commit")


def test_an_error_after_the_commit_names_the_first_workers_and_counts_the_others():
    lost = PeerLostError("process 7 is gone", worker="w1")
    ends = ["dropped", "lost", *["restored"] * 4]
    workers = tuple(
        WorkerReport(f"w{n}", "i", n, end, None, "f", error=lost if end == "lost" else None)
        for n, end in enumerate(ends)
    )
    with pytest.raises(CommitError) as caught:
        Report("v1", "f", "r", 4, workers, {}, 0.0).raise_unless_ok()
    named = ["w1 lost: process 7 is gone", *(f"w{n} restored" for n in (2, 3, 4)), "and 2 more"]
    assert caught.value.message.split("\n  ")[1:] == named


# -- no way back


@pytest.mark.parametrize("way_back", ["not kept", "not captured", "fails as well"])
def test_without_a_way_back_a_failed_commit_leaves_the_worker_empty(
    fleet, engine, weights, way_back, caplog, *, join, report_of
):
    made = fleet(weights, engine=engine)
    member = join(made, captures=way_back != "not captured", keep_previous=way_back != "not kept")
    if way_back != "not captured":
        assert made.publish("v1").ok
        step_on(made)
    member.target.fails_at = 2
    member.target.keeps_failing = way_back == "fails as well"
    round_ = made.publisher.publish("v2", wait=False)
    with pytest.raises(CommitError, match="must not serve") as caught:
        member.session.commit_pending(5)
    assert caught.value.restored is False
    # It never claims a version that it does not hold.
    assert member.session.version is None
    assert member.session.fingerprint.startswith("local:")
    assert member.session.state == "empty"
    report = report_of(round_.result)
    assert outcomes(report) == ["empty"]
    assert report.workers[0].fingerprint == member.session.fingerprint
    assert ("keeps no previous version" in str(report.workers[0].notes)) is (way_back == "not kept")

    member.target.fails_at = None
    assert made.publish("v3").ok
    assert (member.session.state, member.contents) == ("serving", contents(weights))
    caplog.clear()  # what was logged holds frames, and those hold tensors


# -- nobody calls commit_pending


def test_a_commit_that_is_not_applied_in_time_is_pending_and_can_be_applied_later(
    fleet, weights, until, judged
):
    made = fleet(weights, engine="shm")
    slow, quick = made.join(), made.join()
    assert made.publish("v1").ok
    before = slow.contents
    step_on(made)
    with judged(made.publisher, 0.5):
        round_ = made.publisher.publish("v2", wait=False)
    assert quick.session.commit_pending(5)
    report = round_.result(timeout_s=10)
    assert outcomes(report) == ["pending", "committed"]
    assert report.outcome == "mixed"
    assert (slow.session.state, slow.session.version, slow.contents) == ("pending", "v1", before)
    published = contents(weights)
    # It is not sent again what it has (it would have to refuse that), though there is time for it.
    time.sleep(0.2)
    assert [each.state for each in made.publisher.workers()] == ["pending", "serving"]
    assert slow.session.status().last_error is None

    # A new plan is refused, by everybody.
    step_on(made)
    with pytest.raises(RoundBusyError, match=r"commit pending since \d+\.\d s: 'v2'") as busy:
        made.publisher.publish("v3")
    assert (busy.value.worker, busy.value.phase) == ("worker-0", "plan")
    assert quick.contents == published

    assert slow.session.commit_pending()
    assert (slow.session.state, slow.contents) == ("serving", published)
    until(lambda: {each.version for each in made.publisher.workers()} == {"v2"})
    assert made.publish("v4").ok


def test_a_pending_set_can_be_discarded(fleet, engines, weights, until, report_of):
    made = fleet(weights, engine=engines["memory"])
    member = made.join()
    assert made.publish("v1").ok
    before = member.contents
    step_on(made)
    round_ = made.publisher.publish("v2", wait=False)
    until(lambda: member.session.state == "pending")
    assert member.session.discard_pending()
    assert outcomes(report_of(round_.result)) == ["discarded"]
    assert (member.session.version, member.session.state) == ("v1", "behind")
    assert member.contents == before
    assert not member.session.discard_pending()
    assert not member.session.commit_pending()
    assert made.publish("v3").ok


def test_a_closed_session_refuses_to_be_used(fleet, weights):
    session = fleet(weights).join().session
    session.close()
    session.close()
    for use in (session.commit_pending, session.discard_pending, lambda: session.join("unix:@x")):
        with pytest.raises(ClosedError):
            use()


def test_closing_wakes_a_thread_that_waits_for_an_update(fleet, weights):
    import threading

    session = fleet(weights).join().session
    threading.Timer(0.1, session.close).start()
    begun = time.monotonic()
    assert not session.commit_pending(30)
    assert time.monotonic() - begun < 5


# -- what adopting means


def test_a_parameter_that_was_adopted_may_be_written_to(fleet):
    """Both copies are private: neither the trainer nor the next round sees the other's writes."""
    source = {"w": torch.zeros(4096), "b": torch.zeros(10)}
    made = fleet(source, engine="shm")
    writer, reader = made.join(), made.join()
    for number in range(1, 4):
        source["w"].fill_(number)
        assert made.publish(f"v{number}").ok
        assert (writer.model["w"] == number).all()
        writer.model["w"].add_(1000)
        assert (reader.model["w"] == number).all()
        assert (source["w"] == number).all()


# FAULTS 45
@pytest.mark.parametrize("wire", [torch.float32, torch.float16, torch.float64], ids=str)
def test_a_declared_cast_is_applied_at_the_commit(fleet, engine, commit, wire):
    source = {"w": torch.randn(64).to(wire), "count": torch.tensor(3)}
    made = fleet(source, engine=engine)
    model = {"w": torch.zeros(64, dtype=torch.bfloat16), "count": torch.tensor(0)}
    member = made.join(model, cast=True, commit=commit)
    for version in ("v1", "v2"):
        source["w"].add_(0.1)
        report = made.publish(version)
        assert report.ok
        assert "casts floating dtypes at commit" in report.workers[0].notes
        assert torch.equal(model["w"], source["w"].to(torch.bfloat16))
    assert member.session.fingerprint == report.fingerprint


# FAULTS 45
def test_tied_weights_stay_tied_and_buffers_arrive(fleet, engine, commit):
    class Tied(nn.Module):
        def __init__(self, value):
            super().__init__()
            self.embed = nn.Embedding.from_pretrained(torch.full((5, 3), value), freeze=False)
            self.head = nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight
            self.register_buffer("steps", torch.tensor(int(value)))
            self.register_buffer("cache", torch.full((2,), value), persistent=False)

    trainer, server = Tied(7.0), Tied(0.0)
    made = fleet(trainer, engine=engine)
    member = made.join(server, commit=commit)
    assert made.publish("v1").ok
    assert member.contents == contents(trainer.state_dict())
    assert server.head.weight is server.embed.weight
    assert server.steps == 7
    assert server.cache.tolist() == [0.0, 0.0]
