"""The worker's engine and the trainer's, apart from what the conformance kit asks of all."""

import threading

import pytest
import torch
import torch.distributed
from wtransfer.config import ParallelConfig, WeightTransferConfig
from wtransfer.engines.collective import group_rank
from wtransfer.errors import GroupError, RoundAbortedError, StagingMemoryError
from wtransfer.testing.fleet import Fleet
from wtransfer.transport.digests import digest
from wtransfer.weight_sync.trainer.source import StateDictSource

from wtransfer_nccl import devices
from wtransfer_nccl.engine import NCCLWeightTransferEngine
from wtransfer_nccl.infos import NCCLWeightTransferUpdateInfo

has_nccl = torch.distributed.is_nccl_available()
has_cuda = torch.cuda.is_available()


def fleet(source, **options):
    made = {"deadline_s": options.pop("deadline_s", 10.0)}
    return Fleet(source, engine="nccl", options={"communicator": "gloo", **options}, **made)


def test_receiving_before_init_says_so():
    engine = NCCLWeightTransferEngine(WeightTransferConfig(), ParallelConfig())
    with pytest.raises(RuntimeError, match="not initialized"):
        engine.receive_weights(NCCLWeightTransferUpdateInfo(), list)
    with pytest.raises(RuntimeError, match="not initialized"):
        engine.make_room(1)
    engine.shutdown()


def test_a_rank_follows_from_the_worker_s_place():
    place = ParallelConfig(
        rank=3,
        world_size=8,
        tensor_parallel_size=2,
        pipeline_parallel_size=2,
        data_parallel_size=2,
        data_parallel_index=1,
    )
    assert group_rank(place, rank_offset=2, world_size=10) == 2 + 1 * (2 * 2) + 3


@pytest.mark.skipif(has_nccl and has_cuda, reason="nothing is missing here")
def test_missing_nccl_or_cuda_is_named_on_use_and_nothing_is_left_open():
    with Fleet({"a": torch.ones(2)}, engine="nccl") as made:
        made.join()
        with pytest.raises(GroupError) as caught:
            made.publish("v1")
    text = str(caught.value)
    assert ("this torch has no NCCL" in text) == (not has_nccl)
    assert ("needs a CUDA device: torch.cuda.is_available() is False" in text) == (not has_cuda)
    assert f"torch {torch.__version__}" in text


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("torch.distributed.is_available", "built without torch.distributed"),
        ("torch.distributed.is_nccl_available", "this torch has no NCCL"),
        ("torch.cuda.is_available", "needs a CUDA device: torch.cuda.is_available() is False"),
    ],
)
def test_each_missing_thing_is_named_alone(monkeypatch, missing, text):
    answers = dict.fromkeys(
        [
            "torch.distributed.is_available",
            "torch.distributed.is_nccl_available",
            "torch.cuda.is_available",
        ],
        True,
    )
    for name, answer in {**answers, missing: False}.items():
        monkeypatch.setattr(name, lambda answer=answer: answer)
    with pytest.raises(GroupError) as caught:
        NCCLWeightTransferEngine.available()
    reasons = str(caught.value).split("; ")
    assert text in reasons[0]
    assert len(reasons) == 2, "that one, and what to do"


@pytest.mark.parametrize(
    ("text", "rank", "local_rank", "expected"),
    [
        ("cuda", 1, None, "cuda:1"),
        ("cuda", 3, None, "cuda:1"),
        ("cuda", 0, "1", "cuda:1"),
        ("cuda:0", 1, "1", "cuda:0"),
        ("cuda:2", 0, None, "this process sees 2"),
        ("cpu", 0, None, "NCCL needs 'cuda' or 'cuda:NUMBER'"),
        ("gpu", 0, None, "'gpu' is no device"),
    ],
)
def test_a_device_is_named_or_follows_from_the_rank(monkeypatch, text, rank, local_rank, expected):
    monkeypatch.delenv(devices.LOCAL_RANK_VARIABLE, raising=False)
    if local_rank is not None:
        monkeypatch.setenv(devices.LOCAL_RANK_VARIABLE, local_rank)
    if expected.startswith("cuda:"):
        assert devices._cuda_device(text, rank, 2) == torch.device(expected)
        return
    with pytest.raises(GroupError, match=expected):
        devices._cuda_device(text, rank, 2)


@pytest.mark.parametrize(
    ("atomic", "note"),
    [
        ("device", "stages 400 bytes on cpu (atomic=device)"),
        ("pinned", "stages 400 bytes in pinned host memory (atomic=pinned)"),
        ("none", "stages 400 bytes beside the engine, which has its buckets (atomic=none)"),
    ],
)
def test_the_report_says_where_updates_are_staged(atomic, note):
    source = {"a": torch.arange(100.0)}
    with fleet(source, atomic=atomic) as made:
        made.join()
        report = made.publish("v1")
    (worker,) = report.workers
    assert note in worker.notes


def test_digests_are_those_that_devices_can_compute():
    source = {"a": torch.arange(1000.0), "b": torch.ones(3, dtype=torch.bfloat16)}
    with fleet(source) as made:
        member = made.join()
        round_ = made.publisher.publish("v1", wait=False)
        assert made.finish(round_).ok
        sender_source = made.publisher._runner.source
        assert sender_source.manifest.algorithm == "wsum64"
        assert sender_source.digests() == [digest(each, "wsum64") for each in source.values()]
        assert member.session.version == "v1"


# The last: what the session stages, and the engine's buckets.
@pytest.mark.parametrize(("atomic", "needs"), [("device", 400), ("pinned", 400), ("none", 800)])
def test_no_room_is_said_before_a_byte_moves(monkeypatch, atomic, needs):
    source = {"a": torch.arange(100.0)}
    with fleet(source, atomic=atomic) as made:
        member = made.join()
        monkeypatch.setattr("wtransfer.transport.memory.available_memory", lambda: 399)
        with pytest.raises(StagingMemoryError, match=f"{needs} bytes, 399 are available"):
            made.publish("v1")
        assert not member.model["a"].any()
        monkeypatch.undo()
        assert made.publish("v2").ok


def test_packed_comes_before_the_round_is_over():
    """As soon as all is in buckets, the trainer may change its weights."""
    source = {"a": torch.arange(100.0)}
    with fleet(source) as made:
        member = made.join()
        round_ = made.publisher.publish("v1", wait=False)
        round_.packed(5.0)
        source["a"].zero_()
        assert made.finish(round_).ok
        assert member.model["a"].equal(torch.arange(100.0))


class StuckSource(StateDictSource):
    """Does not come to its second tensor before it is let go on."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.go_on = threading.Event()

    def iter_full(self):
        for number, pair in enumerate(super().iter_full()):
            if number == 1:
                self.go_on.wait()
            yield pair


def test_a_rank_gives_a_bucket_up_when_the_trainer_has_said():
    weights = {"a": torch.arange(100.0), "b": torch.arange(100.0)}
    source = StuckSource(weights)
    made = fleet(source, timeout_s=0.5, packed_buffer_size_bytes=400, deadline_s=30.0)
    with made:
        made.join({name: torch.zeros_like(tensor) for name, tensor in weights.items()})
        # Neither at the round's deadline, which is a StallError, nor when torch would.
        with pytest.raises(GroupError, match="rank 1 of 2"):
            made.publish("v1")
        source.go_on.set()
        assert made.publish("v2").ok


def test_nonfinite_weights_are_counted_where_they_lie():
    source = {"a": torch.tensor([1.0, float("nan"), float("inf")])}
    with Fleet(source, engine="nccl", options={"communicator": "gloo"}, nonfinite="reject") as made:
        made.join()
        with pytest.raises(Exception, match="'a'"):
            made.publish("v1")


def test_a_round_that_ends_while_it_is_received_leaves_no_hanging_thread():
    source = {"a": torch.zeros(10), "b": torch.zeros(10)}
    with fleet(source) as made:
        made.join()
        assert made.publish("v1").ok
        round_ = made.publisher.publish("v2", wait=False)
        round_.abort("the test says so")
        with pytest.raises(RoundAbortedError, match="the test says so"):
            made.finish(round_)
        assert made.publish("v3").ok
