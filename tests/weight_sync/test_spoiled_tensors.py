"""An engine loses or changes tensors on one of two workers: neither of them commits."""

from __future__ import annotations

import pytest
import torch

from wtransfer.config import ParallelConfig, WeightTransferConfig
from wtransfer.engines.shm import (
    ShmInitInfo,
    ShmTrainerEngine,
    ShmUpdateInfo,
    ShmWeightTransferEngine,
)
from wtransfer.errors import (
    DigestMismatchError,
    IncompleteUpdateError,
    ManifestError,
    ProtocolError,
    SchemaError,
    TruncatedError,
)
from wtransfer.manifest import Manifest, Piece
from wtransfer.testing.contents import contents, random_tensor
from wtransfer.testing.faults import Fault
from wtransfer.transport.digests import digest
from wtransfer.transport.layout import TensorLayout
from wtransfer.transport.lease import SegmentExporter
from wtransfer.transport.memory import Segment
from wtransfer.weight_sync.messages import Compare

CAUGHT = {
    "drop": IncompleteUpdateError,
    "flip": DigestMismatchError,
    "swap": DigestMismatchError,
    "cast": SchemaError,
    "truncate": SchemaError,
    "duplicate": DigestMismatchError,
    "twice": ManifestError,
}
NAMED = {"duplicate": ["layer.2"], "swap": ["layer.1", "layer.2"]}


@pytest.fixture(params=["adopt", "copy"])
def two_workers(fleet, engine, weights, request):
    """A fleet of two workers at version v1, while the trainer has gone on."""
    made = fleet(weights, engine=engine)
    for _ in range(2):
        made.join(commit=request.param)
    assert made.publish("v1").ok
    for tensor in weights.values():
        tensor.add_(1)
    return made


def states(fleet):
    return [
        (each.session.version, each.session.fingerprint, each.session.state, each.contents)
        for each in fleet.members
    ]


# FAULTS 2, 6: promise 1 (all or nothing) and 2 (proof of receipt).
@pytest.mark.parametrize("action", CAUGHT)
def test_both_workers_stay_on_the_old_version_bit_for_bit(two_workers, faults, action):
    before = states(two_workers)
    faults.arm(Fault(action, tensor=1, worker=1, bit=3))
    with pytest.raises(CAUGHT[action]) as caught:
        two_workers.publish("v2")
    assert len(faults.fired) == 1
    assert states(two_workers) == before
    error = caught.value
    named = NAMED.get(action, ["layer.1"])
    assert (error.piece, getattr(error, "pieces", named)) == (named[0], named)
    assert error.piece in str(error)
    assert (error.worker, error.version) == ("worker-1", "v2")
    assert error.round_id

    assert two_workers.publish("v3").ok
    assert [each.contents for each in two_workers.members] == [contents(two_workers.source)] * 2


def test_digests_are_sent_once_to_the_worker_that_differs(two_workers, faults, sent):
    faults.arm(Fault("flip", tensor=1, worker=1, bit=3))
    with pytest.raises(DigestMismatchError, match=r"'layer\.1'"):
        two_workers.publish("v2")
    told = [(name, message.digests) for name, message, _ in sent if isinstance(message, Compare)]
    assert told == [("worker-1", [digest(tensor) for tensor in two_workers.source.values()])]
    sent.clear()
    assert two_workers.publish("v3").ok
    assert not [message for _, message, _ in sent if isinstance(message, Compare)]


# FAULTS 6
def test_every_single_bit_of_an_update_is_guarded(fleet, engines, faults):
    source = {
        "half": random_tensor(torch.bfloat16, (3,), seed=1),
        "flag": torch.tensor([True, False]),
        "count": torch.tensor(5, dtype=torch.int16),
        "weight": random_tensor(torch.float32, (2,), seed=2),
    }
    made = fleet(source, engine=engines["shm"])
    member = made.join()
    assert made.publish("v1").ok
    before = member.contents
    num_flipped = 0
    for number, (name, tensor) in enumerate(source.items()):
        for bit in range(tensor.nbytes * 8):
            faults.arm(Fault("flip", tensor=number, bit=bit))
            with pytest.raises(DigestMismatchError) as caught:
                made.publish("v2")
            assert caught.value.pieces == [name]
            num_flipped += 1
    assert len(faults.fired) == num_flipped == 8 * (6 + 2 + 2 + 8)
    assert member.contents == before
    assert made.publish("v3").ok


# FAULTS 5
def test_a_segment_that_is_too_short_is_refused_at_every_length():
    layout = TensorLayout(Manifest((Piece("a", "float32", (2,)), Piece("b", "float32", (3,)))))
    worker = ShmWeightTransferEngine(WeightTransferConfig("shm"), ParallelConfig())
    worker.set_layout(layout)
    exporter = SegmentExporter()
    worker.init_transfer_engine(ShmInitInfo(exporter.address, exporter.secret))
    try:
        for length in range(layout.nbytes):
            segment = Segment(length)
            exporter.export(length, segment)
            info, arrived = ShmUpdateInfo(segment=length, first=0, last=2), []
            with pytest.raises(TruncatedError, match="do not lie within"):
                worker.receive_weights(info, arrived.extend)
            assert arrived == []
            exporter.revoke(length)
            segment.close()
    finally:
        worker.shutdown()
        exporter.close()


class TruncatingTrainer(ShmTrainerEngine):
    """Announces other tensors than those that it has copied."""

    beyond = 0

    def send_weights(self):
        client = self.client

        class Client:
            def update_weights(self, info):
                first, last = (info[key] + TruncatingTrainer.beyond for key in ("first", "last"))
                client.update_weights({**info, "first": first, "last": last})

        self.client = Client()
        try:
            super().send_weights()
        finally:
            self.client = client


# FAULTS 5
@pytest.mark.parametrize("beyond", [1, 48, 2**20, 2**62, -1])
def test_tensors_outside_the_update_end_the_round(fleet, weights, beyond):
    TruncatingTrainer.beyond = 0
    made = fleet(weights, engine="shm", trainer=TruncatingTrainer)
    for _ in range(2):
        made.join()
    assert made.publish("v1").ok
    before = states(made)
    TruncatingTrainer.beyond = beyond
    with pytest.raises(ProtocolError, match="were announced of an update of"):
        made.publish("v2")
    assert states(made) == before
    TruncatingTrainer.beyond = 0
    assert made.publish("v3").ok
