"""A member of a publisher's group, on a plain target: what it may and may not do by itself."""

import dataclasses
import types

import pytest
import torch
import wtransfer
from engines import await_commit, report_of, until
from wtransfer.weight_sync.worker.target import StateDictTarget

from wtransfer_vllm.member import Member, Place, place_of


@pytest.fixture
def member():
    member = Member(StateDictTarget({"w": torch.zeros(4)}), "shm", Place("i", 0, 1))
    yield member
    member.leave()
    if member.session is not None:
        member.session.close()


def invite(member, publisher, **more):
    where = {"address": publisher.address, "token": publisher.token}
    member.join({"wtransfer": where | more})


@pytest.mark.parametrize("may_commit", [True, False])
def test_orphaned_update_is_committed_where_the_weights_have_memory(member, may_commit):
    with wtransfer.Publisher({"w": torch.ones(4)}) as lost:
        # Of its rounds alone: a busy machine's connections are silent for longer.
        lost._rules = dataclasses.replace(lost._rules, deadline_s=0.5)
        invite(member, lost)
        lost.wait_for_workers(1, timeout_s=20)
        left = lost.publish("left", wait=False)
        assert [worker.outcome for worker in report_of(left).workers] == ["pending"]
    with wtransfer.Publisher({"w": torch.ones(4)}) as publisher:
        invite(member, publisher, may_commit=may_commit)
        assert member.outcome.applied is may_commit
        assert member.outcome.error is None
        assert member.session.version == ("left" if may_commit else None)


def test_connected_publisher_is_not_left_for_another(member):
    with (
        wtransfer.Publisher({"w": torch.ones(4)}) as first,
        wtransfer.Publisher({"w": torch.zeros(4)}) as second,
    ):
        for publisher in (first, second, first):
            invite(member, publisher)
            first.wait_for_workers(1, timeout_s=20)
            refused = f"its publisher is {first.address}, connected for "
            assert (refused in (member.outcome.error or "")) is (publisher is second)
        round_ = first.publish("first", wait=False)
        await_commit(round_)
        member.commit()
        assert (member.outcome.applied, member.outcome.version) == (True, "first")
        report = round_.result(20)
        assert [worker.outcome for worker in report.workers] == ["committed"]
        assert member.outcome.fingerprint == report.fingerprint


def test_order_of_a_connected_publisher_waits_for_the_host_call(member):
    with (
        wtransfer.Publisher({"w": torch.ones(4)}) as first,
        wtransfer.Publisher({"w": torch.zeros(4)}) as second,
    ):
        invite(member, first)
        first.wait_for_workers(1, timeout_s=20)
        round_ = first.publish("first", wait=False)
        await_commit(round_)
        until(lambda: member.pending)
        # The engine would not know that its caches belong to other weights.
        invite(member, second)
        assert not member.outcome.applied
        assert (member.pending, member.session.version) == (True, None)
        member.commit()
        assert (member.outcome.applied, member.outcome.version) == (True, "first")
        assert [worker.outcome for worker in round_.result(20).workers] == ["committed"]


def test_engine_that_the_host_was_not_started_with_is_refused(member, tmp_path):
    with wtransfer.Publisher(
        {"w": torch.ones(4)}, engine="file", options={"path": str(tmp_path)}
    ) as other:
        invite(member, other)
        other.wait_for_workers(1, timeout_s=20)
        with pytest.raises(wtransfer.errors.PluginBlockedError, match="allows only 'shm'"):
            other.publish("x")


def test_commit_without_invitation_is_an_error(member):
    member.commit()
    assert member.outcome.error == "no publisher has asked this worker to join"


def test_lost_weights_are_reported_and_brought_again(member):
    with wtransfer.Publisher({"w": torch.ones(4)}) as publisher:
        invite(member, publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        round_ = publisher.publish("v", wait=False)
        await_commit(round_)
        member.commit()
        assert round_.result(20).ok
        member.lose_weights("asleep at level 2")
        outcome = member.outcome
        assert (outcome.touched, outcome.state, outcome.version) == (True, "empty", None)
        until(lambda: [each.version for each in publisher.workers()] == [None])
        until(lambda: member.pending)
        member.commit()
        assert (member.outcome.applied, member.outcome.version) == (True, "v")
        assert not member.pending


def test_pending_update_outlives_the_loss_of_the_weights(member):
    with wtransfer.Publisher({"w": torch.ones(4)}) as publisher:
        invite(member, publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        round_ = publisher.publish("v", wait=False)
        await_commit(round_)
        until(lambda: member.pending)
        member.lose_weights("reload_weights was called")
        assert (member.pending, member.outcome.state) == (True, "empty")
        member.commit()
        assert [worker.outcome for worker in round_.result(20).workers] == ["committed"]


def test_weights_lost_before_the_first_join_leave_the_session_empty(member):
    member.lose_weights("reload_weights was called")
    assert (member.session, member.pending) == (None, False)
    with wtransfer.Publisher({"w": torch.ones(4)}) as publisher:
        invite(member, publisher)
        assert (member.outcome.state, member.outcome.error) == ("empty", None)
        publisher.wait_for_workers(1, timeout_s=20)
        assert [worker.state for worker in publisher.workers()] == ["empty"]


def test_lost_weights_of_a_closed_session_are_ignored(member):
    with wtransfer.Publisher({"w": torch.ones(4)}) as publisher:
        invite(member, publisher)
    member.session.close()
    member.lose_weights("at exit")
    assert member.outcome.state == "fresh"


def test_leave_invitation_leaves_that_publisher_only(member):
    with (
        wtransfer.Publisher({"w": torch.ones(4)}) as first,
        wtransfer.Publisher({"w": torch.zeros(4)}) as second,
    ):
        invite(member, first)
        first.wait_for_workers(1, timeout_s=20)
        for publisher in (second, first, first):
            invite(member, publisher, leave=True)
            assert member.outcome.error is None
            assert (member.session.status().publisher is None) is (publisher is first)


def test_server_that_is_named_twice_keeps_its_first_name(member):
    with wtransfer.Publisher({"w": torch.ones(4)}) as publisher:
        for host, error in (
            ("http://one", None),
            ("http://two", "joined this publisher as http://one; name it once"),
            ("http://one", None),
        ):
            invite(member, publisher, host=host)
            assert member.outcome.error == error
            publisher.wait_for_workers(1, timeout_s=20)
            assert [each.host for each in publisher.workers()] == ["http://one"]
        invite(member, publisher, leave=True)
        until(lambda: not publisher.workers())
        invite(member, publisher, host="http://two")
        publisher.wait_for_workers(1, timeout_s=20)
        assert [each.host for each in publisher.workers()] == ["http://two"]


def test_failed_join_is_an_outcome_and_not_raised(member, monkeypatch):
    monkeypatch.setattr(wtransfer.WorkerSession, "join", _no_threads)
    with wtransfer.Publisher({"w": torch.ones(4)}) as publisher:
        invite(member, publisher)
    assert member.outcome.error == "can't start new thread"


def _no_threads(*_, **__):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(("value", "casts"), [(None, False), ("0", False), ("1", True)])
def test_environment_allows_other_floating_dtypes(member, monkeypatch, value, casts):
    if value is not None:
        monkeypatch.setenv("WTRANSFER_VLLM_CAST", value)
    with wtransfer.Publisher({"w": torch.ones(4, dtype=torch.float64)}) as publisher:
        invite(member, publisher)
        publisher.wait_for_workers(1, timeout_s=20)
        if casts:
            await_commit(publisher.publish("v", wait=False))
            member.commit()
            assert member.outcome.version == "v"
        else:
            hint = "WTRANSFER_VLLM_CAST=1 in the environment of vLLM"
            with pytest.raises(wtransfer.errors.SchemaError, match=hint):
                publisher.publish("v")


def test_cast_variable_other_than_0_or_1_is_refused(member, monkeypatch):
    monkeypatch.setenv("WTRANSFER_VLLM_CAST", "maybe")
    with wtransfer.Publisher({"w": torch.ones(4)}) as publisher:
        invite(member, publisher)
    assert member.outcome.error == "WTRANSFER_VLLM_CAST is 'maybe', expected 0 or 1"


@pytest.mark.parametrize(
    ("local_engines_only", "size_local", "host_ranks"),
    [(False, 4, None), (True, 1, 2), (True, 4, 8)],
)
def test_host_ranks_are_known_where_several_servers_are_one_group(
    local_engines_only, size_local, host_ranks
):
    config = types.SimpleNamespace(
        rank=1,
        world_size=2,
        data_parallel_index=3,
        data_parallel_size_local=size_local,
        local_engines_only=local_engines_only,
    )
    assert place_of(config, "id") == Place("vllm-id-3", 1, 2, host_ranks)
