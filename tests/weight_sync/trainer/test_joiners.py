"""Joiners between rounds: served, waited for where needed, and never in the others' way."""

from __future__ import annotations

import time

import pytest
import torch

from wtransfer.engines.factory import WeightTransferEngineFactory
from wtransfer.errors import DigestMismatchError, LimitError
from wtransfer.manifest import MAX_NAME_NBYTES
from wtransfer.testing.contents import contents
from wtransfer.testing.faults import Fault
from wtransfer.weight_sync.trainer import coordinator

PATIENCE_S = 60.0


def states(publisher):
    return {info.worker: info.state for info in publisher.workers()}


def test_a_joiner_that_never_commits_does_not_hold_up_the_others(fleet, weights, until):
    made = fleet(weights, engine="shm", deadline_s=20.0)
    made.join(name="good")
    assert made.publish("v1").ok
    # Not one of the fleet's members, so nobody calls its commit_pending.
    lazy = made.join(name="lazy")
    made.members.remove(lazy)
    until(lambda: lazy.session.state == "pending")
    begun = time.monotonic()
    for version in ("v2", "v3"):
        weights["layer.0"] += 1
        report = made.publish(version)
        assert {each.worker: each.outcome for each in report.workers} == {
            "good": "committed",
            "lazy": "behind",
        }
        # Who joined by itself and has never held a version is named, and does not count.
        assert report.ok
    # Far below the deadline: it was not waited for.
    assert time.monotonic() - begun < 10.0
    assert states(made.publisher)["lazy"] == "pending"
    # As soon as it does, it is whole, and is brought to the current version.
    assert lazy.session.commit_pending(5.0)
    assert lazy.session.version == "v1"
    assert lazy.session.commit_pending(5.0)
    assert (lazy.session.version, lazy.contents) == ("v3", contents(weights))
    made.members.append(lazy)


@pytest.mark.usefixtures("libuv")
def test_joiner_that_takes_part_and_never_commits_holds_up_no_round(fleet, weights):
    # Every worker is in the group, so none can be brought up to date between rounds.
    made = fleet(weights, engine="gloo", deadline_s=15.0)
    made.join(name="good")
    assert made.publish("v1").ok
    lazy = made.join(name="lazy")
    made.members.remove(lazy)
    weights["layer.0"] += 1
    report = made.publish("v2")
    assert {each.worker: each.outcome for each in report.workers} == {
        "good": "committed",
        "lazy": "behind",
    }
    assert report.ok
    # Nothing that it has verified is lost, and it counts from then on.
    assert lazy.session.commit_pending(PATIENCE_S)
    assert (lazy.session.version, lazy.contents) == ("v2", contents(weights))
    made.members.append(lazy)
    report = made.publish("v3")
    assert {each.outcome for each in report.workers} == {"committed"}


@pytest.mark.usefixtures("libuv")
def test_the_rank_that_is_late_is_the_one_that_is_named(fleet, weights, monkeypatch):
    # Else the other rank may be late as well, on a busy machine.
    monkeypatch.setattr(coordinator, "JOINER_PATIENCE_S", 5.0)
    made = fleet(weights, engine="gloo", deadline_s=15.0)
    for rank in range(2):
        made.join(instance="good", rank=rank, num_ranks=2)
    assert made.publish("v1").ok
    made.join(name="prompt", instance="pair", rank=0, num_ranks=2)
    lazy = made.join(name="lazy", instance="pair", rank=1, num_ranks=2)
    made.members.remove(lazy)
    weights["layer.0"] += 1
    rows = {each.worker: each for each in made.publish("v2").workers}
    made.members.append(lazy)
    assert (rows["lazy"].outcome, rows["lazy"].error.worker) == ("behind", "lazy")


def test_worker_logs_once_why_it_refuses_every_update(fleet, weights, caplog):
    made = fleet(weights, engine="shm", deadline_s=20.0)
    made.join(name="good")
    assert made.publish("v1").ok
    made.join({"another": torch.zeros(1)}, name="misfit")
    for version in ("v2", "v3", "v4"):
        weights["layer.0"] += 1
        rows = {each.worker: each.outcome for each in made.publish(version).workers}
        assert rows == {"good": "committed", "misfit": "behind"}
    refusals = [each for each in caplog.messages if "misfit refuses an update" in each]
    assert len(refusals) == 1


def test_joiner_that_has_not_committed_by_the_end_of_its_round_takes_no_part_in_the_next(
    fleet, weights, until, judged
):
    made = fleet(weights, engine="shm", deadline_s=20.0)
    made.join(name="good")
    assert made.publish("v1").ok
    with judged(made.publisher, 0.3):
        lazy = made.join(name="lazy")
        made.members.remove(lazy)
        until(lambda: lazy.session.state == "pending")
    # The publisher's face does not show a catch-up.
    until(lambda: states(made.publisher)["lazy"] == "pending" and made.publisher._active is None)
    weights["layer.0"] += 1
    assert {each.worker: each.outcome for each in made.publish("v2").workers} == {
        "good": "committed",
        "lazy": "behind",
    }
    assert lazy.session.commit_pending(5.0)
    assert lazy.session.commit_pending(5.0)
    assert (lazy.session.version, lazy.contents) == ("v2", contents(weights))
    made.members.append(lazy)


@pytest.mark.parametrize("moved_by", ["shm", "file"])
def test_joiner_after_a_failed_round_gets_the_committed_version(
    fleet, faults, weights, tmp_path, moved_by
):
    name = f"tests-joined-{moved_by}"
    WeightTransferEngineFactory.register_engine(name, faults.wrap(moved_by))
    options = {"path": str(tmp_path / "store")} if moved_by == "file" else {}
    made = fleet(weights, engine=name, options=options)
    made.join()
    assert made.publish("v1").ok
    committed = contents(weights)
    weights["layer.0"] += 1
    # Sent in full, so that the trainer's engine has something to forget.
    faults.arm(Fault("flip", tensor=1))
    with pytest.raises(DigestMismatchError):
        made.publish("v2")
    late = made.join()
    assert late.session.commit_pending(5.0)
    assert (late.session.version, late.contents) == ("v1", committed)


def test_a_failed_publish_is_told_after_a_late_worker_is_up_to_date(fleet, faults, weights, until):
    WeightTransferEngineFactory.register_engine("tests-told", faults.wrap("shm"))
    made = fleet(weights, engine="tests-told")
    made.join()
    assert made.publish("v1").ok
    weights["layer.0"] += 1
    faults.arm(Fault("flip", tensor=1))
    with pytest.raises(DigestMismatchError):
        made.publish("v2")
    failed = made.publisher.status().last_error
    assert failed is not None
    assert made.join().session.commit_pending(5.0)
    until(lambda: made.publisher.status().round is None)
    assert made.publisher.status().last_error == failed


@pytest.mark.slow
def test_a_plan_beyond_the_limit_of_a_message_ends_the_round_with_limit_error(fleet):
    # Naming so many tensors alone may take seconds.
    made = fleet({"w": torch.zeros(1)}, engine="shm", deadline_s=60.0)
    made.join()
    assert made.publish("v1").ok
    made.source.clear()
    tensor = torch.zeros(1)
    for number in range(140_000):
        made.source[f"{number:06d}" + "x" * (MAX_NAME_NBYTES - 6)] = tensor.clone()
    with pytest.raises(LimitError, match="a Plan of"):
        made.publish("v2")
