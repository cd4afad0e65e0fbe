"""The children's work: bytes really arrive, every round brings others, and no digest is left on."""

import pytest
import torch

from wtransfer.bench.jobs import buckets
from wtransfer.bench.jobs.weights import are_those_of, make, renew
from wtransfer.bench.sets import TensorSet
from wtransfer.errors import PeerLostError

PUBLISH = "wtransfer.bench.jobs.publishing:publish"
JOIN = "wtransfer.bench.jobs.joining:join"
BROADCAST = "wtransfer.bench.jobs.broadcasting"
SMALL = {"tensors": TensorSet("many", 4096, 20).plain(), "num_rounds": 2}


def arguments(**more):
    return (SMALL | more).items()


def test_every_value_differs_from_the_round_before():
    weights = make(TensorSet("many", 64, 3))
    renew(weights, 1)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    renew(weights, 2)
    assert all((weights[name] != before[name]).all() for name in weights)
    assert are_those_of(weights, 2)
    assert not are_those_of(before, 2)
    weights["tensor.1"][-1] = 1
    assert not are_those_of(weights, 2)


@pytest.mark.parametrize(
    "way", [pytest.param("tensor_by_tensor", marks=pytest.mark.slow), "in_buckets"]
)
def test_a_broadcast_brings_every_tensor_to_every_worker(play, way):
    job = f"{BROADCAST}:{way}"
    told = play(job, job, num_workers=2, arguments=arguments())
    assert told.trainer["nbytes"] == 20 * 4096
    assert len(told.trainer["seconds"]) == 2


def test_a_broadcast_that_loses_a_tensor_is_no_measurement(play):
    with pytest.raises(PeerLostError, match="did not bring every tensor"):
        play("send_but_one", "send_but_one", arguments=arguments())


def test_buckets_hold_all_bytes_in_order(monkeypatch):
    monkeypatch.setattr(buckets, "BUCKET_NBYTES", 10)
    tensors = [torch.arange(n, dtype=torch.int16) for n in (1, 12, 0, 5, 2)]
    cut = list(buckets.cut(tensors))
    assert [sum(len(piece) for piece in each) for each in cut] == [10, 10, 10, 10]
    packed = [buckets.pack(torch.zeros(16, dtype=torch.uint8), each) for each in cut]
    assert torch.equal(torch.cat(packed).view(torch.int16), torch.cat(tensors))
    copies = [torch.zeros_like(each) for each in tensors]
    for memory, pieces in zip(packed, buckets.cut(copies), strict=True):
        buckets.unpack(memory, pieces)
    assert all(map(torch.equal, copies, tensors))


@pytest.mark.parametrize("verified", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_rounds_are_told_with_and_without_verification(play, verified):
    told = play(PUBLISH, JOIN, arguments=arguments(verified=verified))
    assert [each["nbytes"] for each in told.trainer["rounds"]] == [20 * 4096] * 2


def test_nothing_is_digested_once_that_is_switched_off(play):
    told = play("digest_two", "return_at_once")
    assert told.trainer["digests"] == ["0" * 32] * 3


def test_a_digest_that_was_not_switched_off_is_noticed(play):
    with pytest.raises(PeerLostError, match="weights were digested"):
        play("publish_without_switching_off", "join_verified", arguments=arguments(verified=False))


def test_rounds_that_bring_the_same_weights_are_no_measurement(play):
    with pytest.raises(PeerLostError, match="two rounds of the bench have one fingerprint"):
        play("publish_the_same", JOIN, arguments=arguments(verified=True))
