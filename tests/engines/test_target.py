"""Where weights go: in place or by adopting staged memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wtransfer.engines.interface import TensorSpec
from wtransfer.engines.target import ModuleTarget, StateDictTarget, as_target
from wtransfer.testing.contents import contents


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False))


def update(module):
    return {n: (t + 1 if t.is_floating_point() else t + 5) for n, t in module.state_dict().items()}


@pytest.fixture(params=["adopt", "copy"])
def commit(request):
    return request.param


def test_the_schema_names_every_parameter_and_persistent_buffer(commit):
    module = model()
    schema = ModuleTarget(module, commit).schema()
    assert list(schema) == list(module.state_dict())
    assert schema["1.num_batches_tracked"] == TensorSpec(torch.int64, ())


def test_an_update_is_applied_bit_for_bit(commit):
    module = model()
    new = update(module)
    ModuleTarget(module, commit).apply(new)
    assert contents(module.state_dict()) == contents(new)


def test_the_parameters_stay_the_objects_that_they_were(commit):
    module = model()
    before = {name: id(each) for name, each in module.named_parameters()}
    ModuleTarget(module, commit).apply(update(module))
    assert {name: id(each) for name, each in module.named_parameters()} == before
    assert all(each.requires_grad for each in module.parameters())


def test_adopting_points_at_the_staged_memory_and_copying_does_not():
    for commit, adopts in (("adopt", True), ("copy", False)):
        module = model()
        address = module[0].weight.data_ptr()
        new = update(module)
        ModuleTarget(module, commit).apply(new)
        assert (module[0].weight.data_ptr() == new["0.weight"].data_ptr()) is adopts
        assert (module[0].weight.data_ptr() == address) is not adopts


def test_what_was_captured_brings_the_old_weights_back(commit):
    module = model()
    before = contents(module.state_dict())
    target = ModuleTarget(module, commit)
    captured = target.capture()
    target.apply(update(module))
    target.apply(captured)
    assert contents(module.state_dict()) == before


# FAULTS 17
def test_what_was_captured_brings_them_back_after_half_an_update(commit):
    module = model()
    before = contents(module.state_dict())
    target = ModuleTarget(module, commit)
    captured = target.capture()
    with pytest.raises(KeyError):
        target.apply({**dict(list(update(module).items())[:2]), "unknown": torch.ones(1)})
    assert contents(module.state_dict()) != before
    target.apply(captured)
    assert contents(module.state_dict()) == before


# FAULTS 45
@pytest.mark.parametrize("name", ["a", "b"])
def test_tied_tensors_stay_tied_whichever_name_came(commit, name):
    base = torch.zeros(3)
    tensors = {"a": base, "b": base.detach()}
    target = StateDictTarget(tensors, commit)
    assert target.schema() == {"a": TensorSpec(torch.float32, (3,), ("b",))}
    target.apply({name: torch.ones(3)})
    assert tensors["a"].tolist() == tensors["b"].tolist() == [1.0] * 3
    assert tensors["a"].data_ptr() == tensors["b"].data_ptr()


# FAULTS 45
def test_a_cast_happens_where_an_update_is_applied(commit):
    tensors = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    target = StateDictTarget(tensors, commit)
    target.apply({"w": torch.tensor([1.0, 1 + 2**-10, -2.5])})
    assert tensors["w"].dtype == torch.bfloat16
    assert tensors["w"].tolist() == [1.0, 1.0, -2.5]


def test_parts_of_a_flat_buffer_are_written_where_they_are():
    flat = torch.zeros(6)
    target = StateDictTarget({"a": flat[:3], "b": flat[3:]}, "adopt")
    captured = target.capture()
    target.apply({"a": torch.ones(3), "b": torch.full((3,), 2.0)})
    assert flat.tolist() == [1, 1, 1, 2, 2, 2]
    target.apply(captured)
    assert flat.tolist() == [0] * 6


def test_a_strided_tensor_keeps_its_strides(commit):
    tensors = {"w": torch.zeros(3, 2).t()}
    target = StateDictTarget(tensors, commit)
    new = torch.arange(6.0).view(2, 3)
    target.apply({"w": new})
    assert tensors["w"].stride() == (1, 2)
    assert torch.equal(tensors["w"], new)


def test_an_adopted_model_can_be_trained_on():
    module = model()
    ModuleTarget(module, "adopt").apply(update(module))
    module(torch.ones(2, 3)).sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()


def test_unknown_ways_to_commit_are_refused():
    with pytest.raises(ValueError, match="commit is 'move', expected 'adopt' or 'copy'"):
        StateDictTarget({}, "move")


def test_what_is_no_target_is_refused():
    with pytest.raises(TypeError, match="cannot serve a list: expected a torch module"):
        as_target([torch.zeros(1)], "adopt")


def test_a_target_of_ones_own_is_taken_as_it_is(commit):
    own = StateDictTarget({})
    assert as_target(own, commit) is own
