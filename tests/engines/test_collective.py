"""Both sides of engines that broadcast, in a group that complains of any mistake."""

from __future__ import annotations

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wtransfer.calls import start_call
from wtransfer.config import ParallelConfig, WeightTransferConfig
from wtransfer.engines.collective import (
    CollectiveInitInfo,
    CollectiveTrainerEngine,
    CollectiveTrainerInitInfo,
    CollectiveUpdateInfo,
    CollectiveWeightTransferEngine,
)
from wtransfer.errors import (
    GroupError,
    NotInitializedError,
    ProtocolError,
    RoundAbortedError,
)
from wtransfer.testing.communicator import memory_group
from wtransfer.testing.contents import contents
from wtransfer.transport.digests import digest
from wtransfer.transport.layout import TensorLayout
from wtransfer.transport.rendezvous import host_rendezvous
from wtransfer.weight_sync.trainer.digesting import DigestingSource
from wtransfer.weight_sync.trainer.source import StateDictSource

BUCKET_NBYTES = 256


@pytest.fixture(scope="module", autouse=True)
def made_once_in_a_process():
    """Let libuv, under torch's store, make the pipe that it keeps for the life of the process."""
    host_rendezvous("127.0.0.1").close()


def filled(numbers):
    """Return tensors of these numbers of elements, each with contents of its own."""
    return {f"t{i}": torch.arange(n, dtype=torch.int32) + 1000 * i for i, n in enumerate(numbers)}


class Trainer(CollectiveTrainerEngine):
    init_info_cls = CollectiveTrainerInitInfo

    def form_group(self, rendezvous, world_size):
        return self.client.group


class Worker(CollectiveWeightTransferEngine):
    init_info_cls = CollectiveInitInfo
    form_group = None


class Transfer:
    """A trainer and its workers; each worker receives on a thread."""

    def __init__(self, tensors, num_workers=2, bucket_nbytes=BUCKET_NBYTES, pause_s=0.0):
        self.source = DigestingSource(StateDictSource(tensors))
        self.group = self.pause_s = None
        group, *others = memory_group(1 + num_workers)
        self.pause_s = pause_s
        self.workers = [self.worker(each, bucket_nbytes) for each in others]
        self.received = [[] for _ in self.workers]
        client = SimpleNamespace(
            group=group,
            num_workers=num_workers,
            init_weight_transfer_engine=lambda info: None,
            update_weights=self.update,
        )
        options = CollectiveTrainerInitInfo(packed_buffer_size_bytes=bucket_nbytes)
        self.engine = Trainer.trainer_init(options, client=client, source=self.source)

    def worker(self, group, bucket_nbytes):
        made = Worker(WeightTransferConfig("own"), ParallelConfig())
        made._communicator, made._bucket_nbytes = group, bucket_nbytes
        return made

    def update(self, info):
        """Let every worker receive, as a session does."""
        threads = [
            threading.Thread(target=self.receive, args=(each, info, to))
            for each, to in zip(self.workers, self.received, strict=True)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(20)

    def receive(self, worker, info, to):
        found = {}

        def load_weights(pairs):
            time.sleep(self.pause_s)
            found.update((name, tensor.clone()) for name, tensor in pairs)

        worker.set_layout(self.source.layout)
        # A trainer that ends the round breaks the group.
        with contextlib.suppress(GroupError):
            worker.receive_weights(worker.parse_update_info(info), load_weights)
            to.append(contents(found))

    def run(self, rounds=1):
        """Send, and return what every worker has received, round by round."""
        try:
            for _ in range(rounds):
                self.source.plan("v")
                self.engine.send_weights()
        finally:
            self.engine.shutdown()
            for each in self.workers:
                each.shutdown()
        return self.received


SHAPES = {
    "one larger than a bucket": [3, 1000, 5],
    "all larger than a bucket": [300, 70, 200, 65],
    "many small": [1] * 200,
    "empty ones": [0, 0, 5, 0, 100, 0, 0],
    "only empty ones": [0, 0],
    "none": [],
    "each fills a bucket": [BUCKET_NBYTES // 4] * 7,
    "one": [10],
}


@pytest.mark.parametrize("numbers", SHAPES.values(), ids=SHAPES)
def test_everything_arrives_at_every_worker_in_every_round(numbers):
    tensors = filled(numbers)
    transfer = Transfer(tensors)
    assert transfer.run(rounds=2) == [[contents(tensors)] * 2] * 2
    assert transfer.source.digests() == [digest(tensor) for tensor in tensors.values()]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 100), max_size=12), st.integers(32, 600))
def test_any_tensors_arrive_in_buckets_of_any_size(numbers, bucket_nbytes):
    tensors = filled(numbers)
    assert Transfer(tensors, 1, bucket_nbytes).run() == [[contents(tensors)]]


@pytest.mark.parametrize("pause_s", [0.0, 0.01])
def test_a_bucket_is_not_rewritten_while_it_still_travels(pause_s):
    # Seven turns of the two buckets, and receivers that read as late as they may.
    tensors = filled([(1 << 20) // 4] * 28)
    transfer = Transfer(tensors, bucket_nbytes=2 << 20, pause_s=pause_s)
    assert transfer.run() == [[contents(tensors)]] * 2


def test_memory_is_two_buckets_whatever_the_update_is():
    transfer = Transfer(filled([(1 << 20) // 4] * 20), num_workers=1, bucket_nbytes=1 << 20)
    seen = []
    transfer.engine.allocate = lambda nbytes: (
        seen.append(nbytes) or torch.empty(nbytes, dtype=torch.uint8)
    )
    transfer.run(rounds=2)
    assert seen == [2 << 20]


def test_an_update_that_grows_gets_larger_buckets():
    tensors = filled([10, 10])
    transfer = Transfer(tensors, num_workers=1, bucket_nbytes=1 << 20)
    transfer.source.plan("v")
    transfer.engine.send_weights()
    tensors["t1"] = torch.ones(1 << 19)
    assert transfer.run()[0][1] == contents(tensors)


def test_tensors_are_named_by_the_info_of_a_trainer_without_a_layout():
    tensors = filled([5, 0, 70])
    group, other = memory_group(2)
    worker, found = Worker(WeightTransferConfig("own"), ParallelConfig()), {}
    worker._communicator, worker._bucket_nbytes = other, 1 << 20
    info = CollectiveUpdateInfo(
        names=list(tensors), dtype_names=["int32"] * 3, shapes=[[5], [0], [70]]
    )
    receiving = threading.Thread(target=worker.receive_weights, args=(info, found.update))
    receiving.start()
    memory = torch.zeros(64 + 280, dtype=torch.uint8)
    memory[:20] = tensors["t0"].view(torch.uint8)
    memory[64:] = tensors["t2"].view(torch.uint8)
    group.broadcast(memory, 0).wait()
    receiving.join(10)
    worker.shutdown()
    assert contents(found) == contents(tensors)


def test_an_update_that_nothing_describes_is_refused():
    (group,) = memory_group(1)
    worker = Worker(WeightTransferConfig("own"), ParallelConfig())
    worker._communicator = group
    with pytest.raises(NotInitializedError, match="no layout, and no tensors are named"):
        worker.receive_weights(CollectiveUpdateInfo(), lambda pairs: None)


def test_an_info_that_names_other_tensors_than_the_plan_takes_no_memory():
    (group,) = memory_group(1)
    worker = Worker(WeightTransferConfig("own"), ParallelConfig())
    worker._communicator = group
    worker.set_layout(TensorLayout.of_columns(["a"], ["uint8"], [[4]]))
    worker.recv_buffers = pytest.fail
    info = CollectiveUpdateInfo(names=["z"], dtype_names=["uint8"], shapes=[[1 << 40]])
    with pytest.raises(ProtocolError, match="other tensors than the plan"):
        worker.receive_weights(info, lambda pairs: None)


@pytest.mark.parametrize("field", ["names", "dtype_names", "shapes"])
def test_lists_of_different_lengths_are_refused(field):
    columns = {"names": ["a"], "dtype_names": ["int8"], "shapes": [[1]]}
    with pytest.raises(ValueError, match="entries, `names` has"):
        CollectiveUpdateInfo(**(columns | {field: []}))


def test_every_part_that_has_left_is_progress():
    # 4,000 bytes of one tensor in parts of 256: it would look like a stall otherwise.
    transfer, seen = Transfer(filled([1000]), num_workers=1), []
    note = transfer.source.note_progress
    transfer.source.note_progress = lambda: seen.append(1) or note()
    transfer.run()
    assert len(seen) == 16


def test_a_round_that_has_ended_ends_the_sending():
    transfer = Transfer(filled([1000]), num_workers=1)
    note = transfer.source.note_progress

    def end():
        transfer.source.stop("the test says so")
        note()

    transfer.source.note_progress = end
    transfer.source.plan("v")
    with pytest.raises(RoundAbortedError, match="the test says so"):
        transfer.engine.send_weights()
    # Broken off, the group complains of what was not waited for.
    for each in (transfer.engine, *transfer.workers):
        with contextlib.suppress(GroupError):
            each.shutdown()


def test_an_abort_ends_the_workers_wait():
    _trainer, group = memory_group(2)
    worker = Worker(WeightTransferConfig("own"), ParallelConfig())
    worker._communicator = group
    worker.set_layout(TensorLayout.of_columns(["a"], ["uint8"], [[4]]))
    worker._bucket_nbytes = 4
    ended = aborted_soon_after(
        worker, lambda: worker.receive_weights(CollectiveUpdateInfo(), lambda pairs: None)
    )
    assert ended.done.wait(5)
    with pytest.raises(GroupError, match="aborted"):
        ended.outcome()


def test_an_abort_ends_the_trainers_wait():
    transfer = Transfer(filled([1000]), num_workers=1)
    # Its worker never receives.
    transfer.engine.client.update_weights = lambda info: None
    transfer.source.plan("v")
    ended = aborted_soon_after(transfer.engine, transfer.engine.send_weights)
    assert ended.done.wait(5)
    with pytest.raises(GroupError, match="aborted"):
        ended.outcome()


def aborted_soon_after(engine, call):
    """Begin a call into an engine, abort the engine from here, and return how the call ends."""
    begun = start_call(call, "call")
    time.sleep(0.2)
    assert not begun.done.is_set()
    engine.abort_weight_update()
    return begun


@pytest.mark.parametrize("commit", ["adopt", "copy"])
def test_a_trainer_that_changes_its_tensors_is_followed_in_the_same_group(fleet, commit):
    tensors = {"a": torch.arange(6.0).view(2, 3), "empty": torch.empty(0, 2), "b": torch.tensor(5)}
    made = fleet({name: each.clone() for name, each in tensors.items()}, engine="gloo")
    member = made.join(commit=commit)
    for number, numel in enumerate((3, 3, 100_000, 3)):
        for tensors in (made.source, member.model):
            tensors["c"] = torch.full((numel,), float(number))
            tensors[f"new.{number // 2}"] = torch.full((2,), 5.0)
        made.source["c"].add_(1)
        assert made.publish(f"v{number}").ok
        assert contents(member.model) == contents(made.source)
