"""A dry run proves everything that a round proves, and changes nothing."""

from __future__ import annotations

import pytest
import torch

from wtransfer.errors import (
    DigestMismatchError,
    IncompleteUpdateError,
)
from wtransfer.registry import hooks
from wtransfer.registry.hooks import hookimpl
from wtransfer.testing.contents import contents
from wtransfer.testing.faults import Fault
from wtransfer.testing.leftovers import Leftovers


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


def facts(fleet):
    publisher = fleet.publisher
    return (publisher.version, publisher.fingerprint), [
        (m.session.version, m.session.fingerprint, m.session.state, m.contents)
        for m in fleet.members
    ]


def test_every_worker_proves_the_whole_update_and_keeps_what_it_had(fleet, engine, weights):
    made = fleet(weights, engine=engine)
    member = made.join()
    for rank in range(2):
        made.join(instance="pair", rank=rank, num_ranks=2)
    for version in ("v1", "v2"):
        changed(weights)
        for _ in range(2):
            before = facts(made)
            round_ = made.publisher.publish("dry", wait=False, dry_run=True)
            report = made.finish(round_)
            assert not round_.committing
            assert (report.outcome, report.ok, report.dry_run) == ("verified", True, True)
            assert [(w.outcome, w.digests_equal, w.nbytes) for w in report.workers] == [
                ("verified", True, 192)
            ] * 3
            assert not member.session.commit_pending(0.1)
            assert facts(made) == before
        assert set(report.seconds) == {"init", "plan", "transfer", "prepare", "finish", "total"}
        assert "commit" not in report.workers[0].seconds
        # The same weights have the same identity when they are meant.
        assert made.publish(version).fingerprint == report.fingerprint
        assert member.contents == contents(weights)


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


def test_observers_hear_of_no_commit(fleet, engine, weights, told, until):
    made = fleet(weights, engine=engine)
    made.join()
    assert dry(made).ok
    # Begun and ended, on both sides: who pairs the two is left with nothing. The worker's own end
    # of the round may come after the publisher's.
    until(lambda: len(told) >= 4)
    assert sorted(told) == [("aborted", "dry")] * 2 + [("started", "dry")] * 2
    assert made.publish("v1").ok
    assert ("committed", "v1") in told


@pytest.mark.parametrize("held", [None, "v1"])
def test_a_late_joiner_gets_the_version_before(fleet, weights, held):
    made = fleet(weights, engine="shm")
    made.join()
    if held:
        assert made.publish(held).ok
    sent = changed(weights) if held is None else contents(weights)
    weights["layer.0"].add_(1)
    assert dry(made).ok
    late = made.join()
    assert late.session.commit_pending(5 if held else 0.3) is bool(held)
    assert late.session.version == held
    assert (late.contents == sent) is bool(held)


@pytest.mark.parametrize(
    "fails", [("flip", DigestMismatchError), ("drop", IncompleteUpdateError)], ids=str
)
def test_a_spoiled_transfer_fails_as_it_would(fleet, engine, weights, faults, fails):
    fault, error = fails
    made = fleet(weights, engine=engine)
    made.join()
    before = facts(made)
    faults.arm(Fault(fault, tensor=1))
    with pytest.raises(error):
        dry(made)
    faults.disarm()
    assert facts(made) == before
    assert dry(made).ok
