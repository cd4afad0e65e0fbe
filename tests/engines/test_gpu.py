"""Weights on a GPU by the engines that move host memory: copied from there, and back to there.

What moves them from GPU to GPU is `plugins/wtransfer-nccl`.
"""

import pytest
import torch

from wtransfer.testing.contents import contents
from wtransfer.testing.engine import EngineConformance
from wtransfer.testing.fleet import Fleet

if not torch.cuda.is_available():
    # Once, and not for each test of three kits.
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytestmark = pytest.mark.gpu
BUSY_CYCLES = 1_000_000_000
"""Of the GPU's clock: about half a second."""


class TestShm(EngineConformance):
    engine = "shm"
    device = "cuda"


class TestGloo(EngineConformance):
    engine = "gloo"
    device = "cuda"


class TestFile(EngineConformance):
    engine = "file"
    device = "cuda"

    def options_in(self, folder):
        return {"path": str(folder / "store")}


@pytest.fixture
def fleet():
    source = {"weight": torch.zeros(1 << 20, device="cuda"), "bias": torch.ones(3, device="cuda")}
    with Fleet(source) as made:
        yield made


@pytest.fixture
def stream():
    """A stream that is the thread's, and has something to do first."""
    made = torch.cuda.Stream()
    with torch.cuda.stream(made):
        torch.cuda._sleep(BUSY_CYCLES)
        yield made
    made.synchronize()


def test_update_holds_the_values_that_the_trainers_stream_has_yet_to_compute(fleet, stream):
    member = fleet.join()
    fleet.source["weight"].add_(1)
    assert not stream.query(), "the GPU is faster than this test thinks"
    round_ = fleet.publisher.publish("v1", wait=False)
    assert fleet.finish(round_).ok
    assert bool((member.model["weight"] == 1).all())


@pytest.mark.parametrize("commit", ["adopt", "copy"])
def test_kernels_queued_before_the_commit_read_the_old_weights(fleet, commit, request):
    member = fleet.join(commit=commit)
    model = member.model
    fleet.source["weight"].add_(1)
    round_ = fleet.publisher.publish("v1", wait=False)
    stream = request.getfixturevalue("stream")
    before = model["weight"].clone()
    assert not stream.query(), "the GPU is faster than this test thinks"
    assert member.session.commit_pending(10.0)
    after = model["weight"].clone()
    assert fleet.finish(round_).ok
    stream.synchronize()
    assert not before.any()
    assert contents({"weight": after}) == contents({"weight": fleet.source["weight"]})


def test_a_model_of_both_kinds_of_memory_is_updated_where_it_is():
    """What is offloaded to the host, adopts; what is on the device, is copied there."""
    source = {"here": torch.ones(5000), "there": torch.ones(5000, device="cuda")}
    with Fleet(source) as fleet:
        member = fleet.join({"here": torch.zeros(5000, device="cuda"), "there": torch.zeros(5000)})
        assert fleet.publish("v1").ok
        assert member.contents == contents(source)
        assert [each.device.type for each in member.model.values()] == ["cuda", "cpu"]
