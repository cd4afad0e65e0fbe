"""What a trainer broadcasts from two buckets in turn arrives, however late it is read."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wtransfer.engines.incoming import HostLanding, receive
from wtransfer.engines.outgoing import NUM_BUCKETS, Outgoing
from wtransfer.errors import RoundAbortedError
from wtransfer.testing.communicator import memory_group
from wtransfer.testing.contents import contents
from wtransfer.transport.buckets import Layout
from wtransfer.transport.digests import digest
from wtransfer.transport.tensors import dtype_name, tensor_from
from wtransfer.weight_sync.trainer.digesting import DigestingSource
from wtransfer.weight_sync.trainer.source import StateDictSource

BUCKET_NBYTES = 256


def filled(numbers):
    """Return tensors of these numbers of elements, each with contents of its own."""
    return {f"t{i}": torch.arange(n, dtype=torch.int32) + 1000 * i for i, n in enumerate(numbers)}


class Transfer:
    """One trainer and its workers, each on a thread, in a group that complains of any mistake."""

    def __init__(self, tensors, num_workers=2, bucket_nbytes=BUCKET_NBYTES, worker_pause_s=0.0):
        self.tensors = tensors
        self.source = DigestingSource(StateDictSource(tensors))
        self.source.plan("v1")
        self.num_parts = 0
        self.memory = self.stream = None
        self._bucket_nbytes, self._pause_s = bucket_nbytes, worker_pause_s
        self._trainer, *self._workers = memory_group(1 + num_workers)

    def run(self, memory=None, rounds=1):
        """Send, and return what every worker has received, round by round."""
        received = [[] for _ in self._workers]
        threads = [
            threading.Thread(target=self._receive, args=(worker, found, rounds))
            for worker, found in zip(self._workers, received, strict=True)
        ]
        for thread in threads:
            thread.start()
        self.memory = memory
        for _ in range(rounds):
            self.send()
        for thread in threads:
            thread.join(20)
        for each in (self._trainer, *self._workers):
            each.close()
        return received

    def send(self):
        self.source.plan("v")
        outgoing = Outgoing(
            self.source.metadata,
            self._trainer,
            self._bucket_nbytes,
            self.memory,
            self._count,
            stream=self.stream,
        )
        self.memory, self.stream = outgoing.memory, outgoing.stream
        for _ in self.source.iter_into(outgoing):
            pass
        outgoing.finish()

    def _count(self):
        self.num_parts += 1

    def _receive(self, worker, found, rounds):
        for _ in range(rounds):
            found.append(contents(dict(self._received(worker))))

    def _received(self, worker):
        metadata = self.source.metadata
        layout = Layout([meta.nbytes for meta in metadata])
        memory = np.empty(layout.nbytes, np.uint8)
        landing = HostLanding(memory)
        for bucket in receive(layout, landing, worker, self._bucket_nbytes, on_part=lambda: None):
            time.sleep(self._pause_s)
            for number in range(bucket.first, bucket.last):
                meta = metadata[number]
                start = layout.starts[number]
                tensor = tensor_from(memory, start, dtype_name(meta.dtype), meta.shape)
                yield meta.name, tensor.clone()


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
def test_everything_arrives_at_every_worker(numbers):
    tensors = filled(numbers)
    assert Transfer(tensors).run() == [[contents(tensors)]] * 2


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 100), max_size=12), st.integers(32, 600))
def test_any_tensors_arrive_in_buckets_of_any_size(numbers, bucket_nbytes):
    tensors = filled(numbers)
    transfer = Transfer(tensors, num_workers=1, bucket_nbytes=bucket_nbytes)
    assert transfer.run() == [[contents(tensors)]]


@pytest.mark.parametrize("pause_s", [0.0, 0.01])
def test_a_bucket_is_not_rewritten_while_it_still_travels(pause_s):
    # Seven turns of the two buckets, and receivers that read as late as they may.
    tensors = filled([40] * 28)
    transfer = Transfer(tensors, worker_pause_s=pause_s)
    assert transfer.run() == [[contents(tensors)]] * 2


def test_memory_of_one_round_serves_the_next():
    tensors = filled([50] * 9)
    transfer = Transfer(tensors)
    first = transfer.run(rounds=3)
    assert first == [[contents(tensors)] * 3] * 2


def test_memory_is_two_buckets_whatever_the_update_is():
    tensors = filled([60] * 100)
    transfer = Transfer(tensors, num_workers=1)
    transfer.run()
    assert transfer.memory.size <= NUM_BUCKETS * 2 * BUCKET_NBYTES


def test_memory_that_is_too_small_is_replaced():
    tensors = filled([1000])
    memory = np.empty(64, np.uint8)
    transfer = Transfer(tensors, num_workers=1)
    assert transfer.run(memory) == [[contents(tensors)]]
    assert transfer.memory is not memory


def test_digests_are_those_of_the_trainers_tensors():
    tensors = filled([3, 500, 0, 20, 20, 20, 90])
    transfer = Transfer(tensors)
    transfer.run()
    assert transfer.source.digests() == [digest(tensor) for tensor in tensors.values()]


def test_nan_is_counted_per_tensor_across_the_turns_of_the_buckets():
    tensors = {f"t{i}": torch.zeros(30) for i in range(24)}
    expected = {}
    for number in (0, 1, 8, 9, 23):
        tensors[f"t{number}"][: number + 1] = float("nan")
        expected[f"t{number}"] = number + 1
    transfer = Transfer(tensors)
    assert transfer.run() == [[contents(tensors)]] * 2
    assert transfer.source.nonfinite == expected


def test_what_lay_in_a_bucket_before_is_not_counted_again():
    tensors = {f"t{i}": torch.full((30,), float("nan")) for i in range(24)}
    transfer = Transfer(tensors, num_workers=1)
    transfer.run(rounds=1)
    clean = {name: torch.zeros(7) for name in tensors}
    # The memory is full of NaN, also between the tensors of the new round.
    following = Transfer(clean, num_workers=1)
    assert following.run(transfer.memory) == [[contents(clean)]]
    assert following.source.nonfinite == {}


def test_every_part_that_has_left_is_progress():
    # 4,000 bytes of one tensor in parts of 256: it would look like a stall otherwise.
    transfer = Transfer(filled([1000]), num_workers=1)
    transfer.run()
    assert transfer.num_parts == 16


class Endless:
    """A group whose operations never end by themselves."""

    rank, size = 0, 2

    def __init__(self, source):
        self._source = source

    def broadcast(self, tensor, root):
        return self

    def wait(self):
        self._source.stop("the test says so")


@pytest.mark.parametrize("other", [(BUCKET_NBYTES * 2, 2), (BUCKET_NBYTES, 3)])
def test_how_tensors_follow_each_other_is_kept_for_the_same_buckets_only(other):
    source = DigestingSource(StateDictSource(filled([100] * 10)))
    source.plan("v1")

    def stream(nbytes, num_buckets, before=None):
        rank = Endless(source)
        options = {"num_buckets": num_buckets, "stream": before}
        return Outgoing(source.metadata, rank, nbytes, **options).stream

    first = stream(BUCKET_NBYTES, 2)
    assert stream(BUCKET_NBYTES, 2, first) is first
    assert stream(*other, first) is not first


def test_a_round_that_was_ended_ends_the_sending():
    source = DigestingSource(StateDictSource(filled([100] * 10)))
    source.plan("v1")
    outgoing = Outgoing(
        source.metadata, Endless(source), BUCKET_NBYTES, on_part=source.note_progress
    )
    with pytest.raises(RoundAbortedError, match="the test says so"):
        for _ in source.iter_into(outgoing):
            pass
