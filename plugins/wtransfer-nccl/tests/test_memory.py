"""Where an update is received, on any device: here the CPU."""

import threading

import pytest
import torch
from wtransfer.config import ParallelConfig, WeightTransferConfig
from wtransfer.engines.collective import NUM_AHEAD, CollectiveUpdateInfo, parts
from wtransfer.manifest import Manifest, Piece
from wtransfer.testing.communicator import memory_group
from wtransfer.transport.layout import TensorLayout

from wtransfer_nccl.devices import Lane
from wtransfer_nccl.engine import NCCLWeightTransferEngine
from wtransfer_nccl.memory import BucketBuffers, DeviceBuffers, PinnedBuffers

NBYTES = 1000
# Small ones, some without bytes (first, last, and between), and some larger than a bucket.
SIZES = [0, *[192] * 20, 0, 5000, 0, 0, 64, 1000, 936, 0, 3, *[200] * 30, 0, *[400_000] * 5]
LAYOUT = TensorLayout(
    Manifest(tuple(Piece(f"t{number}", "uint8", (size,)) for number, size in enumerate(SIZES)))
)
CONTENT = torch.arange(LAYOUT.nbytes).to(torch.uint8)
LANE = Lane(torch.device("cpu"))


def send(member):
    for bucket in LAYOUT.buckets(NBYTES):
        for start, stop in parts(bucket, NBYTES):
            place = slice(bucket.start + start, bucket.start + stop)
            member.broadcast(CONTENT[place], 0).wait()


@pytest.mark.parametrize(
    "buffers",
    [
        BucketBuffers(LAYOUT, NBYTES, LANE),
        DeviceBuffers(LAYOUT, LANE),
        PinnedBuffers(LAYOUT, NBYTES, LANE),
    ],
    ids=lambda each: type(each).__name__,
)
def test_every_tensor_is_there_when_its_bucket_is(buffers):
    root, member = memory_group(2)
    engine = NCCLWeightTransferEngine(WeightTransferConfig("nccl"), ParallelConfig())
    engine._communicator, engine._bucket_nbytes = member, NBYTES
    engine.recv_buffers = lambda _layout, _note_progress: buffers
    engine.set_layout(LAYOUT)
    sender = threading.Thread(target=send, args=(root,))
    sender.start()
    seen = []

    def load_weights(pairs):
        for name, tensor in pairs:
            number = LAYOUT.numbers[name]
            start = LAYOUT.starts[number]
            assert tensor.equal(CONTENT[start : start + SIZES[number]])
            seen.append(number)
        if isinstance(buffers, BucketBuffers):
            # This one, and those of which parts are under way.
            assert len(buffers._memory) <= 1 + NUM_AHEAD

    engine.receive_weights(CollectiveUpdateInfo(), load_weights)
    sender.join()
    engine.shutdown()
    assert seen == list(range(len(SIZES)))
