"""Where an update lies while it is received, on any device: here the CPU."""

import threading

import pytest
import torch
from wtransfer.engines.incoming import NUM_AHEAD, receive
from wtransfer.manifest import Piece
from wtransfer.testing.communicator import memory_group
from wtransfer.transport.buckets import Layout, slices

from wtransfer_nccl.devices import Lane
from wtransfer_nccl.memory import BucketLanding, DeviceLanding, PinnedLanding

NBYTES = 1000
# Small ones, some without bytes (first, last, and between), and some larger than a bucket.
SIZES = [0, *[192] * 20, 0, 5000, 0, 0, 64, 1000, 936, 0, 3, *[200] * 30, 0]
LAYOUT = Layout(SIZES)
PIECES = [Piece(f"t{number}", "uint8", (size,)) for number, size in enumerate(SIZES)]
CONTENT = torch.arange(LAYOUT.nbytes).to(torch.uint8)
LANE = Lane(torch.device("cpu"))


def send(member):
    for bucket in LAYOUT.cut(NBYTES):
        for part in slices(bucket, NBYTES):
            place = slice(bucket.start + part.start, bucket.start + part.stop)
            member.broadcast(CONTENT[place], 0).wait()


@pytest.mark.parametrize(
    "landing",
    [
        BucketLanding(LAYOUT, NBYTES, LANE),
        DeviceLanding(LAYOUT.nbytes, LANE),
        PinnedLanding(LAYOUT.nbytes, NBYTES, LANE),
    ],
    ids=lambda each: type(each).__name__,
)
def test_every_tensor_is_there_when_its_bucket_is(landing):
    root, member = memory_group(2)
    sender = threading.Thread(target=send, args=(root,))
    sender.start()
    seen = []
    for bucket in receive(LAYOUT, landing, member, NBYTES, lambda: None):
        for number in range(bucket.first, bucket.last):
            tensor = landing.view(LAYOUT.starts[number], PIECES[number])
            assert tensor.shape == (SIZES[number],)
            assert tensor.equal(CONTENT[LAYOUT.starts[number] : LAYOUT.stops[number]])
            seen.append(number)
        if isinstance(landing, BucketLanding):
            # This one, and those of which parts are under way.
            assert len(landing._memory) <= 1 + NUM_AHEAD
    sender.join()
    assert seen == list(range(len(SIZES)))
