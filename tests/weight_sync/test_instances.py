"""The ranks of one instance commit all or none of them (FAULTS 16, in one process)."""

from __future__ import annotations

import threading
import time

import pytest

from wtransfer.errors import CommitError, NoWorkersError
from wtransfer.testing.contents import contents


@pytest.fixture
def ranks(fleet, engine, weights, commit, join):
    """An instance of two ranks, beside a single worker."""
    made = fleet(weights, engine=engine)
    for rank in range(2):
        join(made, commit, instance="both", rank=rank, num_ranks=2)
    join(made, commit)
    return made


def step_on(fleet):
    for tensor in fleet.source.values():
        tensor.add_(1)


def held(members):
    return [(m.session.version, m.session.fingerprint, m.contents) for m in members]


@pytest.mark.parametrize(("failing", "previous"), [(0, None), (1, "v1")])
def test_one_rank_that_cannot_apply_takes_the_other_back(ranks, failing, previous):
    if previous:
        assert ranks.publish(previous).ok
    before = held(ranks.members[:2])
    step_on(ranks)
    ranks.members[failing].target.fails_at = 2
    round_ = ranks.publisher.publish("v2", wait=False)
    errors = commit_once(ranks.members)
    report = round_.result(timeout_s=5)
    assert report.outcome == "mixed"
    outcomes = [each.outcome for each in report.workers]
    assert outcomes[failing] == "restored"
    assert outcomes[1 - failing] == "reverted"
    assert outcomes[2] == "committed"
    # Both whole, both on the old version, both said so: none of them raised for nothing.
    assert held(ranks.members[:2]) == before
    assert [each.fingerprint for each in report.workers[:2]] == [old[1] for old in before]
    assert set(errors) == {"worker-0", "worker-1"}
    assert f"rank {failing} of the instance: restored" in str(errors[f"worker-{1 - failing}"])
    assert all(error.restored for error in errors.values())
    assert ranks.members[2].contents == contents(ranks.source)

    step_on(ranks)
    assert ranks.publish("v3").ok
    assert [m.contents for m in ranks.members] == [contents(ranks.source)] * 3


def test_the_ranks_of_a_restored_instance_catch_up_together(
    fleet, weights, commit, join, report_of
):
    made = fleet(weights, engine="shm")
    members = [join(made, commit, instance="both", rank=r, num_ranks=2) for r in range(2)]
    assert made.publish("v1").ok
    step_on(made)
    members[1].target.fails_at = 2
    report_of(made.publish, "v2")
    end = time.monotonic() + 5
    while {m.session.version for m in members} != {"v2"}:
        assert time.monotonic() < end
        made.step()
    assert [m.contents for m in members] == [contents(weights)] * 2


def test_an_instance_counts_once_and_only_when_it_is_complete(fleet, weights):
    made = fleet(weights, min_workers=2)
    made.join(instance="both", rank=0, num_ranks=2)
    with pytest.raises(NoWorkersError, match="0 workers have joined"):
        made.publisher.publish("v1")
    made.join(instance="both", rank=1, num_ranks=2)
    with pytest.raises(NoWorkersError, match="1 workers have joined"):
        made.publisher.publish("v1")
    made.join()
    assert made.publish("v1").ok


def test_ranks_wait_for_each_other_before_the_next_step(fleet, weights):
    made = fleet(weights, engine="shm")
    first = made.join(instance="both", rank=0, num_ranks=2)
    second = made.join(instance="both", rank=1, num_ranks=2)
    round_ = made.publisher.publish("v1", wait=False)
    done = threading.Event()
    thread = threading.Thread(target=lambda: first.session.commit_pending(5) and done.set())
    thread.start()
    assert not done.wait(0.3)
    assert second.session.commit_pending(5)
    assert done.wait(5)
    thread.join()
    assert round_.result().ok


def commit_once(members):
    """Let every model take one step that commits; return what was raised, by worker."""
    errors = {}

    def step(member):
        try:
            assert member.session.commit_pending(5)
        except CommitError as error:
            errors[member.session.status().worker] = error

    threads = [threading.Thread(target=step, args=(member,)) for member in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors
