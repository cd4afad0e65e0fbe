"""A dry run proves everything that a round proves, and changes nothing."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from wtransfer.errors import (
    DigestMismatchError,
    IncompleteUpdateError,
    NonfiniteError,
    RoundAbortedError,
    SchemaError,
)
from wtransfer.registry import hooks
from wtransfer.registry.hooks import hookimpl
from wtransfer.testing.contents import contents
from wtransfer.testing.faults import Fault
from wtransfer.testing.leftovers import Leftovers
from wtransfer.weight_sync.trainer.publisher import Publisher
from wtransfer.weight_sync.trainer.source import StateDictSource


class Told:
    """Notes what observers hear."""

    def __init__(self):
        self.events = []

    @hookimpl
    def wtransfer_round_started(self, version):
        self.events.append(("started", version))

    @hookimpl
    def wtransfer_weights_committed(self, version):
        self.events.append(("committed", version))

    @hookimpl
    def wtransfer_round_aborted(self, version):
        self.events.append(("aborted", version))


@pytest.fixture
def told():
    observer = Told()
    hooks.register(observer)
    yield observer.events
    hooks.unregister(observer)


def dry(fleet, version="dry"):
    return fleet.finish(fleet.publisher.publish(version, wait=False, dry_run=True))


def changed(weights):
    for tensor in weights.values():
        tensor.add_(1)
    return contents(weights)


def test_every_worker_proves_the_whole_update(fleet, engine, weights):
    made = fleet(weights, engine=engine)
    made.join()
    made.join()
    report = dry(made)
    assert (report.outcome, report.ok, report.dry_run) == ("verified", True, True)
    assert [(w.outcome, w.digests_equal, w.nbytes) for w in report.workers] == [
        ("verified", True, 192)
    ] * 2
    assert set(report.seconds) == {"init", "plan", "transfer", "prepare", "finish", "total"}
    assert "commit" not in report.workers[0].seconds
    # The same weights have the same identity when they are meant.
    assert made.publish("meant").fingerprint == report.fingerprint


@pytest.mark.parametrize("held", [None, "v1"])
def test_workers_and_publisher_have_what_they_had(fleet, engine, weights, held):
    made = fleet(weights, engine=engine)
    member = made.join()
    if held:
        assert made.publish(held).ok
    before = (
        member.contents,
        member.session.version,
        member.session.fingerprint,
        member.session.state,
        made.publisher.version,
        made.publisher.fingerprint,
    )
    changed(weights)
    assert dry(made).ok
    assert not member.session.commit_pending(0.1)
    assert before == (
        member.contents,
        member.session.version,
        member.session.fingerprint,
        member.session.state,
        made.publisher.version,
        made.publisher.fingerprint,
    )


def test_the_next_round_works_and_may_be_another_dry_one(fleet, engine, weights):
    made = fleet(weights, engine=engine)
    member = made.join()
    for number in range(3):
        changed(weights)
        assert dry(made, f"dry-{number}").ok
        assert dry(made, f"dry-{number}").ok
        sent = changed(weights)
        assert made.publish(f"v{number}").ok
        assert member.contents == sent


def test_it_never_commits_and_leaves_the_workers_free_for_others(fleet, engine, weights):
    made = fleet(weights, engine=engine)
    member = made.join()
    round_ = made.publisher.publish("dry", wait=False, dry_run=True)
    assert made.finish(round_).ok
    assert not round_.committing
    # A worker that still held it would refuse whoever comes next.
    with (
        Publisher(weights, engine=engine, token="t") as other,
        ThreadPoolExecutor(1) as pool,
    ):
        member.session.leave(made.publisher.address)
        member.session.join(other.address, token="t")
        other.wait_for_workers(1)
        publishing = pool.submit(other.publish, "others")
        while not publishing.done():
            made.step()
        assert publishing.result().ok
    assert member.session.version == "others"


def test_nothing_of_it_is_kept_in_memory(fleet, engine):
    weights = {f"w{i}": torch.zeros(1 << 20) for i in range(4)}
    made = fleet(weights, engine=engine)
    made.join()
    # The trainer's side of an engine may keep a segment to write to again, and no more.
    for number in range(2):
        assert made.publish(f"v{number}").ok
        assert dry(made).ok
    held = Leftovers()
    for _ in range(3):
        changed(weights)
        assert dry(made).ok
    assert held.found(within_s=5.0) == []


def test_observers_hear_of_no_commit(fleet, engine, weights, told):
    made = fleet(weights, engine=engine)
    made.join()
    assert dry(made).ok
    # Begun and ended, on both sides: who pairs the two is left with nothing. The worker's own end
    # of the round may come after the publisher's.
    end = time.monotonic() + 5.0
    while len(told) < 4 and time.monotonic() < end:
        time.sleep(0.005)
    assert sorted(told) == [("aborted", "dry")] * 2 + [("started", "dry")] * 2
    assert made.publish("v1").ok
    assert ("committed", "v1") in told


def test_a_late_joiner_gets_the_version_before(fleet, weights):
    made = fleet(weights, engine="shm")
    made.join()
    sent = contents(weights)
    report = made.publish("v1")
    changed(weights)
    assert dry(made).ok
    late = made.join()
    assert late.session.commit_pending(5)
    assert (late.session.version, late.session.fingerprint) == ("v1", report.fingerprint)
    assert late.contents == sent


def test_a_late_joiner_before_any_commit_gets_nothing(fleet, weights):
    made = fleet(weights, engine="shm")
    made.join()
    assert dry(made).ok
    late = made.join()
    assert not late.session.commit_pending(0.3)
    assert late.session.state == "fresh"


def test_an_update_that_does_not_fit_fails_as_it_would(fleet, engine, weights):
    made = fleet(weights, engine=engine)
    misfit = dict(weights)
    misfit["layer.1"] = torch.zeros(4, 3)
    made.join(misfit)
    with pytest.raises(SchemaError, match=r"layer\.1: wanted float32 \[4, 3\]"):
        dry(made)


@pytest.mark.parametrize(
    "fails", [("flip", DigestMismatchError), ("drop", IncompleteUpdateError)], ids=str
)
def test_a_spoiled_transfer_fails_as_it_would(fleet, engine, weights, faults, fails):
    fault, error = fails
    made = fleet(weights, engine=engine)
    member = made.join()
    before = member.contents
    faults.arm(Fault(fault, tensor=1))
    with pytest.raises(error):
        dry(made)
    faults.disarm()
    assert member.contents == before
    assert dry(made).ok


def test_the_policies_hold(fleet, weights):
    made = fleet(weights, nonfinite="reject")
    made.join()
    weights["layer.2"][0, 0] = float("nan")
    with pytest.raises(NonfiniteError):
        dry(made)


def test_the_ranks_of_an_instance_prove_it_together(fleet, engine, weights):
    made = fleet(weights, engine=engine)
    for rank in range(2):
        made.join(instance="pair", rank=rank, num_ranks=2)
    report = dry(made)
    assert [(w.rank, w.outcome) for w in report.workers] == [(0, "verified"), (1, "verified")]
    assert made.publish("v1").ok


class Held(StateDictSource):
    """A source that waits before its second tensor."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.gate, self.reached = threading.Event(), threading.Event()

    def iter_full(self):
        for number, pair in enumerate(super().iter_full()):
            if number == 1:
                self.reached.set()
                self.gate.wait(5)
            yield pair


def test_it_can_be_aborted(fleet, engine, weights):
    source = Held(weights)
    made = fleet(source, engine=engine)
    member = made.join({name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    round_ = made.publisher.publish("dry", wait=False, dry_run=True)
    assert source.reached.wait(5)
    begun = time.monotonic()
    round_.abort("enough")
    source.gate.set()
    with pytest.raises(RoundAbortedError, match="enough"):
        round_.result(5)
    assert time.monotonic() - begun < 1.0
    assert member.session.state == "fresh"
    assert dry(made).ok
