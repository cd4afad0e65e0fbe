"""Where weights go: in place or by adopting staged memory."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from wtransfer.errors import SchemaError
from wtransfer.testing.contents import contents, random_tensor
from wtransfer.weight_sync import storages
from wtransfer.weight_sync.storages import stands_alone
from wtransfer.weight_sync.worker.target import (
    SMALL_NBYTES,
    ModuleTarget,
    StateDictTarget,
    as_target,
)
from wtransfer.weights import TensorSpec


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False))


def update(module):
    return {n: (t + 1 if t.is_floating_point() else t + 5) for n, t in module.state_dict().items()}


def test_an_update_is_applied_bit_for_bit_and_the_parameters_stay_the_objects_that_they_were(
    commit,
):
    module = model()
    target, new = ModuleTarget(module, commit), update(module)
    assert list(target.schema()) == list(module.state_dict())
    assert target.schema()["1.num_batches_tracked"] == TensorSpec(torch.int64, ())
    before = {name: id(each) for name, each in module.named_parameters()}
    target.apply(new)
    assert contents(module.state_dict()) == contents(new)
    assert {name: id(each) for name, each in module.named_parameters()} == before
    assert all(each.requires_grad for each in module.parameters())


@pytest.mark.parametrize("numel", [SMALL_NBYTES // 4, SMALL_NBYTES])
def test_only_large_tensors_are_pointed_at_the_staged_memory(commit, numel):
    module = nn.Linear(numel, 1)
    address, new = module.weight.data_ptr(), update(module)
    ModuleTarget(module, commit).apply(new)
    adopts = commit == "adopt" and numel == SMALL_NBYTES
    assert module.weight.data_ptr() == (new["weight"].data_ptr() if adopts else address)


def test_torch_that_cannot_count_holders_points_nothing_at_staged_memory(monkeypatch):
    monkeypatch.setattr(storages, "_use_count", None)
    module = nn.Linear(SMALL_NBYTES, 1)
    address, new = module.weight.data_ptr(), update(module)
    ModuleTarget(module, "adopt").apply(new)
    assert contents(module.state_dict()) == contents(new)
    assert module.weight.data_ptr() == address


# FAULTS 17
def test_captured_tensors_restore_the_module_after_half_an_update(commit):
    module = model()
    before = contents(module.state_dict())
    target = ModuleTarget(module, commit)
    captured = target.capture()
    with pytest.raises(KeyError):
        target.apply({**dict(list(update(module).items())[:2]), "unknown": torch.ones(1)})
    assert contents(module.state_dict()) != before
    target.apply(captured)
    assert contents(module.state_dict()) == before


def test_unknown_ways_to_commit_are_refused():
    with pytest.raises(ValueError, match="commit is 'move', expected 'adopt' or 'copy'"):
        StateDictTarget({}, "move")


def test_object_that_is_no_target_is_refused():
    with pytest.raises(TypeError, match="cannot serve a list: expected a torch module"):
        as_target([torch.zeros(1)], "adopt")


def test_a_shape_that_changed_since_the_plan_is_an_error_and_not_broadcast(commit):
    tensors = {"w": torch.zeros(3)}
    with pytest.raises(SchemaError, match=r"'w' has shape \[3\] by now, the update has \[1\]"):
        StateDictTarget(tensors, commit).apply({"w": torch.ones(1)})


@pytest.mark.parametrize(
    "make",
    [
        lambda *shape: torch.ones(*shape, 2)[..., 0],
        lambda *shape: torch.ones(2, *shape)[0],
        lambda *shape: torch.ones(*shape, dtype=torch.float64),
        lambda *shape: torch.ones(*shape).share_memory_(),
        torch.ones,
    ],
    ids=["strided", "part", "dtype", "shared", "alone"],
)
@pytest.mark.parametrize("shape", [(3, 2), (SMALL_NBYTES, 2)], ids=["small", "large"])
def test_a_set_that_was_applied_is_never_written_into(make, shape):
    staged = make(*shape)
    tensors = {"w": torch.zeros(shape)}
    target = StateDictTarget(tensors)
    target.apply({"w": staged})
    assert tensors["w"].tolist() == staged.tolist()
    assert stands_alone(tensors["w"])
    target.apply({"w": torch.full(shape, 2.0)})
    assert staged.unique().tolist() == [1.0]


def test_a_model_that_moves_to_shared_memory_takes_no_version_with_it():
    tensors = {"w": torch.zeros(SMALL_NBYTES)}
    target = StateDictTarget(tensors)
    first = torch.ones(SMALL_NBYTES)
    target.apply({"w": first})
    tensors["w"].share_memory_()
    target.apply({"w": torch.full((SMALL_NBYTES,), 2.0)})
    assert first.unique().tolist() == [1.0]
    assert not first.is_shared()


def test_a_view_made_of_an_adopted_tensor_does_not_get_its_set_written_into():
    tensors = {"w": torch.zeros(SMALL_NBYTES)}
    target = StateDictTarget(tensors)
    first = torch.ones(SMALL_NBYTES)
    target.apply({"w": first})
    tensors["head"] = tensors["w"][:1]
    target.apply({"w": torch.full((SMALL_NBYTES,), 2.0)})
    assert first.unique().tolist() == [1.0]


class Elsewhere(torch.Tensor):
    """Says that it is on a device: stands in for one where there is none."""

    device = property(lambda _: torch.device("cuda"))


def test_captured_tensors_are_not_overwritten_by_an_update_from_another_device():
    tensors = {"a": torch.zeros(2), "b": torch.zeros(2)}
    target = StateDictTarget(tensors)
    captured = target.capture()
    target.apply({"a": torch.ones(2).as_subclass(Elsewhere)})
    assert tensors["a"].tolist() == [1.0, 1.0]
    target.apply(captured)
    assert tensors["a"].tolist() == [0.0, 0.0]


def test_one_staged_tensor_under_two_names_does_not_tie_them():
    tensors = {"a": torch.zeros(SMALL_NBYTES), "b": torch.zeros(SMALL_NBYTES)}
    target = StateDictTarget(tensors)
    one = torch.ones(SMALL_NBYTES)
    target.apply({"a": one, "b": one})
    assert list(target.schema()) == ["a", "b"]


UNWRITABLE = {
    "meta": (lambda: torch.zeros(3, device="meta"), "on the meta device"),
    "expanded": (lambda: torch.zeros(1).expand(4), "expanded"),
    "rows": (lambda: torch.zeros(1, 11)[:, ::10].expand(4, 2), "expanded"),
    "windows": (lambda: torch.zeros(5).unfold(0, 3, 1), "expanded"),
    "meeting": (lambda: torch.zeros(7).as_strided((2, 3), (2, 2)), "expanded"),
    "sparse": (lambda: torch.eye(3).to_sparse(), "of layout torch.sparse_coo"),
    "lazy": (lambda: nn.LazyLinear(2).weight, "lazy"),
    "nested": (lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), "nested"),
    "quantised": (lambda: torch.quantize_per_tensor(torch.zeros(4), 1, 0, torch.qint8), "quantise"),
}


def sharded():
    """Return a parameter of a module under ``fully_shard``, on one rank."""
    # It moves nothing, and opens no descriptors that stay.
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        module = nn.Linear(4, 4)
        fully_shard(module, mesh=init_device_mesh("cpu", (1,)))
        return module.weight
    finally:
        dist.destroy_process_group()


def fake():
    with FakeTensorMode():
        return nn.Parameter(torch.zeros(3))


UNWRITABLE |= {
    "sharded": (sharded, "a DTensor, which wraps others"),
    "fake": (fake, "a FakeTensor, which wraps others"),
    "wrapper": (lambda: TwoTensor(torch.zeros(3), torch.zeros(3)), "a TwoTensor, which wraps"),
}


@pytest.mark.parametrize("kind", UNWRITABLE)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:The PyTorch API of nested")
def test_unwritable_tensor_is_refused_and_named(commit, kind):
    make, reason = UNWRITABLE[kind]
    with pytest.raises(SchemaError, match=rf"1 of 2 tensors .*\n  odd: .*{reason}") as caught:
        StateDictTarget({"good": torch.zeros(2), "odd": make()}, commit)
    assert caught.value.piece == "odd"


@pytest.mark.parametrize("kind", ["sharded", "fake"])
def test_tensor_that_became_unwritable_is_refused_at_the_plan(fleet, commit, kind):
    weights = {"good": torch.ones(2), "odd": torch.ones(4, 4)}
    serving = {name: torch.zeros_like(each) for name, each in weights.items()}
    made = fleet(weights)
    worker = made.join(serving, commit=commit)
    serving["odd"] = UNWRITABLE[kind][0]()
    with pytest.raises(
        SchemaError, match=r"1 of 2 tensors cannot take .*\n  odd: a .*wraps"
    ) as told:
        made.publish("v1")
    assert (told.value.piece, told.value.phase) == ("odd", "plan")
    assert serving["good"].tolist() == [0.0, 0.0]
    assert worker.session.version is None


def test_tensor_whose_elements_lie_between_each_other_is_written(commit):
    tensors = {"odd": torch.zeros(8).as_strided((2, 3), (3, 2))}
    StateDictTarget(tensors, commit).apply({"odd": torch.arange(6.0).view(2, 3)})
    assert tensors["odd"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def test_memory_that_was_freed_is_neither_written_nor_read(commit):
    tensors = {"good": torch.zeros(2), "odd": torch.zeros(1 << 14)}
    target = StateDictTarget(tensors, commit)
    tensors["odd"].untyped_storage().resize_(0)
    with pytest.raises(SchemaError, match=r"odd'?(:| is) without all of its memory") as caught:
        target.apply({"odd": torch.ones(1 << 14)})
    assert caught.value.piece == "odd"
    with pytest.raises(SchemaError, match=r"odd'?(:| is) without all of its memory"):
        target.capture()
    with pytest.raises(SchemaError, match="odd: without all of its memory"):
        StateDictTarget(tensors, commit)


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no such dtype")
@pytest.mark.parametrize("shape", [(3, 5), (SMALL_NBYTES, 2), ()], ids=str)
def test_numbers_that_share_a_byte_are_applied_and_restored(fleet, commit, shape):
    old, new = (random_tensor(torch.float4_e2m1fn_x2, shape, seed) for seed in (1, 2))
    serving, weights = {"a": old.clone(), "b": torch.zeros(2)}, {"a": new, "b": torch.ones(2)}
    before = contents(serving)
    target = StateDictTarget(serving, commit)
    captured = target.capture()
    made = fleet(weights)
    made.join(serving, commit=commit)
    assert made.publish("v1").ok
    assert contents(serving) == contents(weights)
    StateDictTarget(serving, commit).apply(captured)
    assert contents(serving) == before


def test_a_model_made_in_inference_mode_is_written(commit):
    with torch.inference_mode():
        module = model()
    before, target = contents(module.state_dict()), ModuleTarget(module, commit)
    captured = target.capture()
    target.apply(update(module))
    target.apply(captured)
    assert contents(module.state_dict()) == before


def test_a_commit_in_inference_mode_leaves_parameters_that_can_be_trained(commit):
    module = model()
    new = {name: each.double() for name, each in update(module).items()}
    with torch.inference_mode():
        ModuleTarget(module, commit).apply(new)
    assert not any(each.is_inference() for each in module.state_dict(keep_vars=True).values())


class Viewed(nn.Module):
    """Computes with views of its parameters that its state does not name."""

    def __init__(self):
        super().__init__()
        self.fused = torch.zeros(8)
        self.part = nn.Parameter(self.fused[:4])
        self.whole = nn.Parameter(torch.zeros(4))
        self.register_buffer("view", self.whole.detach(), persistent=False)
        self.plain = nn.Parameter(torch.zeros(4))
        self.attribute = self.plain.detach()


def test_views_that_the_state_does_not_name_follow():
    module = Viewed()
    target = ModuleTarget(module, "adopt")
    captured = target.capture()
    new = {name: torch.ones(4) for name in ("part", "whole", "plain")}
    target.apply(new)
    for each in (module.fused[:4], module.view, module.attribute, *module.parameters()):
        assert each.tolist() == [1.0] * 4
    target.apply(captured)
    assert module.view.tolist() == module.whole.tolist() == [0.0] * 4
