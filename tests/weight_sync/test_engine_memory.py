"""Memory of engines: not the host's, with what they may ask then; or that of served weights.

Gloo stands for engines of a device here, with tensors of the CPU where theirs lie there.
"""

from typing import ClassVar

import pytest
import torch

from wtransfer.engines.factory import WeightTransferEngineFactory
from wtransfer.engines.gloo import GlooTrainerEngine, GlooWeightTransferEngine
from wtransfer.errors import EngineError, NonfiniteError, StagingMemoryError
from wtransfer.testing.contents import contents
from wtransfer.testing.fakes import MemoryEngine
from wtransfer.testing.fleet import Fleet
from wtransfer.testing.kit import registered_name
from wtransfer.transport.digests import digest


class DeviceTrainer(GlooTrainerEngine):
    digest_algorithm: ClassVar = "wsum64"
    num_buckets = 3


class DeviceEngine(GlooWeightTransferEngine):
    trainer_cls = DeviceTrainer
    room: ClassVar = 10_000

    def make_room(self, nbytes):
        if nbytes > self.room:
            raise StagingMemoryError(f"no room for {nbytes} bytes on the device")
        return f"stages {nbytes} bytes on the device"


@pytest.fixture(scope="module")
def engine():
    WeightTransferEngineFactory.register_engine("device memory", DeviceEngine)
    # What torch makes once in a process and keeps is no leftover of the first test.
    with Fleet({"a": torch.ones(1)}, engine="gloo") as fleet:
        fleet.join()
        fleet.publish("v1")
    return "device memory"


SOURCE = {
    "strided": torch.arange(600.0).view(20, 30).t(),
    "half": torch.ones(7, dtype=torch.bfloat16),
    "flags": torch.tensor([True, False]),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3),
}


@pytest.mark.parametrize("nbytes", [16 << 20, 100])
def test_tensors_are_digested_where_they_were_copied_to(engine, nbytes):
    with Fleet(SOURCE, engine=engine, options={"packed_buffer_size_bytes": nbytes}) as fleet:
        members = [fleet.join(), fleet.join()]
        for version in ("v1", "v2"):
            assert fleet.publish(version).ok
        assert [member.contents for member in members] == [contents(SOURCE)] * 2
        sent = fleet.publisher._runner.source
        assert sent.manifest.algorithm == "wsum64"
        assert sent.digests() == [digest(tensor, "wsum64") for tensor in SOURCE.values()]


def test_nonfinite_values_in_engine_memory_reject_the_round(engine):
    source = {"a": torch.tensor([1.0, float("nan"), float("inf")])}
    with Fleet(source, engine=engine, nonfinite="reject") as fleet:
        fleet.join()
        with pytest.raises(NonfiniteError, match="'a'"):
            fleet.publish("v1")


def test_an_engine_answers_for_its_own_memory(engine, monkeypatch):
    # The host's is not asked for.
    monkeypatch.setattr("wtransfer.weight_sync.worker.participant.require_memory", pytest.fail)
    with Fleet({"a": torch.ones(2500)}, engine=engine) as fleet:
        fleet.join()
        (worker,) = fleet.publish("v1").workers
        assert "stages 10000 bytes on the device" in worker.notes


def test_an_engine_without_room_refuses_the_plan(engine):
    with Fleet({"a": torch.ones(2501)}, engine=engine) as fleet:
        member = fleet.join()
        with pytest.raises(StagingMemoryError, match="no room for 10004 bytes on the device"):
            fleet.publish("v1")
        assert not member.model["a"].any()


# -- memory that is served


class TwoBuffers(MemoryEngine):
    """Takes two sets of buffers in turn, whatever becomes of a round."""

    tensors_valid_until: ClassVar[str] = "round"

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.buffers = {}, {}
        self.turn = 0

    def receive_weights(self, update_info, load_weights):
        own = self.buffers[self.turn]
        self.turn = 1 - self.turn

        def load(pairs):
            for name, tensor in pairs:
                if name not in own:
                    own[name] = tensor.clone()
                load_weights([(name, own[name].copy_(tensor))])

        super().receive_weights(update_info, load)


class Custom:
    """A target of a user's own, which computes with the tensors that it is given."""

    given = None

    def schema(self):
        return None

    def apply(self, tensors):
        self.given = tensors

    def capture(self):
        return self.given


LARGE = {"small": torch.zeros(3), "weight": torch.zeros(5000)}
TARGETS = {
    "adopts": (lambda: zeros(LARGE), {"commit": "adopt"}, "serves"),
    "keeps none": (lambda: zeros(LARGE), {"keep_previous": False}, "serves"),
    "another": (Custom, {}, "serves"),
    "copies": (lambda: zeros(LARGE), {"commit": "copy"}, "keeps for a rollback"),
}


def zeros(tensors):
    return {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}


@pytest.mark.parametrize("target", TARGETS)
def test_update_that_an_engine_writes_over_the_weights_of_a_worker_is_refused(target, caplog):
    source = zeros(LARGE)
    with Fleet(source, engine=registered_name("engines", TwoBuffers)) as made:
        make, options, what = TARGETS[target]
        member = made.join(make(), **options)
        assert made.publish("v1").ok
        source["weight"] += 1
        made.publisher.publish("a try", dry_run=True)
        serving = (member.session.version, member.session.state)
        with pytest.raises(
            EngineError, match="means valid until the worker releases them"
        ) as caught:
            made.publish("v2")
        assert "conformance of TwoBuffers" in str(caught.value)
        assert f" of version 'v1', which this worker {what}: " in str(caught.value)
        now = (member.session.version, member.session.state)
        assert now == (serving if target == "copies" else (None, "empty"))
        # The set in that memory is nobody's any more.
        assert made.publish("v3").ok
        assert member.session.state == "serving"
        if isinstance(member.model, dict):
            assert member.contents == contents(source)
    caplog.clear()
