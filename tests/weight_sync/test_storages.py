"""What a module consists of, with tied storage counted once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wtransfer.weight_sync.storages import (
    group_storages,
    module_tensors,
    stands_alone,
    unnamed_tensors,
    unwrap,
)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


# FAULTS 45
def test_tied_names_are_one_entry():
    module = Tied()
    found = group_storages(module_tensors(module))
    assert list(found.tensors) == ["scale", "embed.weight"]
    assert list(found.ties) == ["embed.weight"]
    assert found.ties["embed.weight"]["head.weight"] is module.embed.weight
    assert not found.overlapping


@pytest.mark.parametrize(
    "tensor", [torch.zeros(0), torch.eye(3).to_sparse()], ids=["empty", "sparse"]
)
def test_tensor_without_memory_in_one_piece_is_tied_by_identity(tensor):
    other = tensor.clone()
    found = group_storages({"a": tensor, "b": other, "c": tensor})
    assert (list(found.tensors), {a: list(b) for a, b in found.ties.items()}) == (
        ["a", "b"],
        {"a": ["c"]},
    )
    assert not found.overlapping


def test_parts_of_one_buffer_are_entries_that_overlap():
    flat = torch.zeros(10)
    tensors = {"a": flat[:5], "b": flat[5:], "tied": flat[5:], "alone": torch.zeros(5)}
    found = group_storages(tensors)
    assert list(found.tensors) == ["a", "b", "alone"]
    assert found.overlapping == {"a", "b"}


def test_empty_and_meta_tensors_are_never_taken_for_each_other():
    tensors = {
        "e1": torch.empty(0),
        "e2": torch.empty(0),
        "part": torch.zeros(3)[:0],
        "m1": torch.empty(2, device="meta"),
        "m2": torch.empty(2, device="meta"),
    }
    found = group_storages(tensors)
    assert list(found.tensors) == list(tensors)
    assert not found.overlapping


def test_a_compiled_module_has_the_names_of_the_one_inside():
    module = Tied()
    compiled = torch.compile(module, backend="eager")
    assert unwrap(compiled) is module
    assert list(module_tensors(compiled)) == list(module_tensors(module))


def test_what_the_state_does_not_name_is_found():
    module = Tied()
    module.note = torch.ones(1)
    assert {id(each) for each in unnamed_tensors(module)} == {id(module.cache), id(module.note)}


def test_memory_shared_with_a_tensor_without_a_name_overlaps():
    base = torch.zeros(3)
    assert group_storages({"a": base}, [base.detach()]).overlapping == {"a"}
    others = [torch.zeros(3), torch.eye(2).to_sparse()]
    assert not group_storages({"a": base}, others).overlapping


def test_only_a_whole_private_contiguous_cpu_tensor_stands_alone():
    assert stands_alone(torch.zeros(2, 3))
    assert stands_alone(torch.zeros(0))
    with torch.inference_mode():
        inference = torch.zeros(2)
    others = [
        inference,
        torch.zeros(2, 3).t(),
        torch.zeros(4)[:2],
        torch.zeros(2).share_memory_(),
        torch.zeros(2, device="meta"),
        torch.zeros(2, dtype=torch.complex64).conj(),
    ]
    assert not any(map(stands_alone, others))
