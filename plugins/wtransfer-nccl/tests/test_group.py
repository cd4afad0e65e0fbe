"""What `NCCLCommunicator` does with torch's group, on a real one: gloo's, which has the same face.

Point-to-point operations are left to `test_nccl.py`: gloo's do not say when they are done.
"""

import datetime as dt
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed
from wtransfer.errors import GroupError, StallError
from wtransfer.transport.rendezvous import host_rendezvous, join_rendezvous

from wtransfer_nccl import group as group_module
from wtransfer_nccl.group import NCCLCommunicator

CPU = torch.device("cpu")
seen_in_environment = []


class OnGloo(NCCLCommunicator):
    def _make(self, store, timeout_s):
        with group_module._surviving_errors():
            seen_in_environment.append(os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"])
        options = torch.distributed.ProcessGroupGloo._Options()
        options._devices = [torch.distributed.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = dt.timedelta(seconds=timeout_s)
        return torch.distributed.ProcessGroupGloo(store, self.rank, self.size, options)


def ranks_of(size, timeout_s=20.0, *, absent=(), operation_timeout_s=60.0):
    """Return what became of each rank: a communicator or an error."""
    hosted = host_rendezvous("127.0.0.1")

    def join(rank):
        meeting = hosted if rank == 0 else join_rendezvous(hosted.host, hosted.port, hosted.name)
        try:
            return OnGloo(
                meeting,
                rank,
                size,
                device=CPU,
                timeout_s=timeout_s,
                operation_timeout_s=operation_timeout_s,
            )
        except (GroupError, StallError) as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        made = list(pool.map(join, [rank for rank in range(size) if rank not in absent]))
    hosted.close()
    return made


@pytest.fixture
def ranks():
    made = ranks_of(3)
    yield made
    for rank in made:
        rank.close()


def test_bytes_of_the_root_arrive_everywhere(ranks):
    tensors = [torch.full((1000,), number, dtype=torch.uint8) for number in range(3)]
    pending = [rank.broadcast(tensor, 1) for rank, tensor in zip(ranks, tensors, strict=True)]
    for each in pending:
        each.wait()
    assert all(tensor.eq(1).all() for tensor in tensors)
    assert not torch.distributed.is_initialized()


def test_an_abort_ends_what_waits_and_what_comes_after(ranks):
    pending = ranks[1].broadcast(torch.zeros(10, dtype=torch.uint8), 0)
    threading.Timer(0.2, ranks[1].abort).start()
    with pytest.raises(GroupError, match="rank 1 of 3: the group was aborted"):
        pending.wait()
    with pytest.raises(GroupError, match="rank 1 of 3: the group was aborted"):
        ranks[1].broadcast(torch.zeros(10, dtype=torch.uint8), 0)
    ranks[1].abort()


def test_an_operation_is_given_up_when_it_was_said():
    first, second = ranks_of(2, operation_timeout_s=0.5)
    with pytest.raises(GroupError, match=r"rank 1 of 2: .*500ms"):
        second.broadcast(torch.zeros(10, dtype=torch.uint8), 0).wait()
    for rank in (first, second):
        rank.close()


def test_missing_ranks_are_named_and_the_group_is_not_begun():
    before = len(seen_in_environment)
    first, second = ranks_of(3, 0.3, absent=[1])
    for error in (first, second):
        assert isinstance(error, StallError)
        assert "ranks [1] of 3" in str(error)
    assert len(seen_in_environment) == before


@pytest.mark.parametrize("before", [None, "3"])
def test_only_groups_made_here_survive_their_errors(monkeypatch, before):
    if before is None:
        monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    else:
        monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", before)
    for rank in ranks_of(2):
        rank.close()
    assert seen_in_environment[-2:] == ["2", "2"]
    assert os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING") == before
