"""A member of a publisher's group, on a plain target: what it may and may not do by itself."""

import pytest
import torch
import wtransfer
from engines import await_commit
from wtransfer.engines.target import StateDictTarget

from wtransfer_vllm.member import Member, Place


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
def test_what_a_lost_publisher_has_left_is_committed_where_there_is_memory(member, may_commit):
    with wtransfer.Publisher({"w": torch.ones(4)}, deadline_s=1.0) as lost:
        invite(member, lost)
        lost.wait_for_workers(1, timeout_s=20)
        assert [worker.outcome for worker in lost.publish("left").workers] == ["pending"]
    with wtransfer.Publisher({"w": torch.ones(4)}) as publisher:
        invite(member, publisher, may_commit=may_commit)
        assert member.outcome.applied is may_commit
        assert member.outcome.error is None
        assert member.session.version == ("left" if may_commit else None)


def test_a_publisher_that_is_still_there_is_not_left_for_another(member):
    with (
        wtransfer.Publisher({"w": torch.ones(4)}) as first,
        wtransfer.Publisher({"w": torch.zeros(4)}) as second,
    ):
        for publisher in (first, second, first):
            invite(member, publisher)
            publisher.wait_for_workers(1, timeout_s=20)
        round_ = first.publish("first", wait=False)
        await_commit(round_)
        member.commit()
        assert (member.outcome.applied, member.outcome.version) == (True, "first")
        assert [worker.outcome for worker in round_.result(20).workers] == ["committed"]


def test_an_engine_that_the_host_was_not_started_with_is_refused(member, tmp_path):
    with wtransfer.Publisher(
        {"w": torch.ones(4)}, engine="file", options={"path": str(tmp_path)}
    ) as other:
        invite(member, other)
        other.wait_for_workers(1, timeout_s=20)
        with pytest.raises(wtransfer.errors.PluginBlockedError, match="allows only 'shm'"):
            other.publish("x")


def test_who_was_never_invited_has_nothing_to_commit(member):
    member.commit()
    assert member.outcome.error == "no publisher has asked this worker to join"
