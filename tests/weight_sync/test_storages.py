"""What a module consists of, with tied storage counted once."""

from __future__ import annotations

import functools
import random

import pytest
import torch
from torch import nn

from wtransfer.weight_sync.checkpoint_form import module_state
from wtransfer.weight_sync.storages import (
    covered_nbytes,
    group_storages,
    num_holders,
    shared_memory,
    stands_alone,
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
    found = group_storages(module_state(module))
    assert list(found.tensors) == ["scale", "embed.weight"]
    assert list(found.ties) == ["embed.weight"]
    assert found.ties["embed.weight"]["head.weight"] is module.embed.weight


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


def test_parts_of_one_buffer_are_entries_of_their_own():
    flat = torch.zeros(10)
    tensors = {"a": flat[:5], "b": flat[5:], "tied": flat[5:], "alone": torch.zeros(5)}
    found = group_storages(tensors)
    assert list(found.tensors) == ["a", "b", "alone"]
    assert list(found.ties) == ["b"]


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


def test_a_compiled_module_has_the_names_of_the_one_inside():
    module = Tied()
    compiled = torch.compile(module, backend="eager")
    assert unwrap(compiled) is module
    assert list(module_state(compiled)) == list(module_state(module))


HOLDERS = {
    "tie": lambda weight: nn.Parameter(weight.data),
    "view": lambda weight: weight[:1],
    "closure": lambda weight: functools.partial(torch.add, weight.detach(), 1),
    "array": lambda weight: weight.detach().numpy(),
    "graph": lambda weight: nn.functional.linear(torch.ones(2, 3, requires_grad=True), weight),
}


@pytest.mark.parametrize("kind", HOLDERS)
def test_holder_of_a_memory_is_counted_for_as_long_as_it_lives(kind):
    weight = nn.Linear(3, 3).state_dict(keep_vars=True)["weight"]
    assert num_holders(weight) == 1
    holder = HOLDERS[kind](weight)
    assert num_holders(weight) > 1
    del holder
    assert num_holders(weight) == 1


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


def test_memory_in_common_is_found_wherever_it_lies():
    """Against every pair, for tensors of one buffer in any order."""
    numbers = random.Random(1)
    flat = torch.zeros(64)

    def some():
        found = {}
        for number in range(numbers.randrange(1, 5)):
            begin = numbers.randrange(60)
            found[f"{number}"] = flat[begin : begin + numbers.randrange(1, 4) : 1]
        return found

    def covers(tensor):
        begin = tensor.storage_offset()
        return set(range(begin, begin + tensor.numel()))

    outcomes = set()
    for _ in range(500):
        one, other = some(), some()
        pairs = {(a, b) for a in one for b in other if covers(one[a]) & covers(other[b])}
        found = shared_memory(one, other)
        assert (found is None) == (not pairs)
        assert found is None or found in pairs
        outcomes.add(found is None)
    assert outcomes == {True, False}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(0), torch.zeros(0)),
        (torch.empty(3, device="meta"), torch.empty(3, device="meta")),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse()),
        (nn.UninitializedParameter(), nn.UninitializedParameter()),
    ],
    ids=["empty", "meta", "sparse", "lazy"],
)
def test_tensors_without_memory_have_none_in_common(one, other):
    assert shared_memory({"a": one}, {"a": other}) is None


@pytest.mark.parametrize(
    ("make", "nbytes"),
    [
        (lambda: torch.zeros(1).expand(1 << 34), 4),
        (lambda: torch.zeros(3, 1).expand(3, 1 << 34), 12),
        (lambda: torch.zeros(1 << 20).as_strided((1 << 19, 1 << 19), (1, 1)), 4 * ((1 << 20) - 1)),
    ],
    ids=["expanded", "rows", "windows"],
)
def test_elements_that_are_one_cost_nothing_to_count(make, nbytes):
    # One by one they would take 128 GiB and more.
    assert covered_nbytes([make()]) == nbytes


@pytest.mark.parametrize("seed", range(20))
def test_covered_bytes_are_those_of_any_strides(seed):
    generator = random.Random(seed)
    places, parts = torch.arange(400.0), []
    for _ in range(generator.randint(1, 3)):
        shape = [generator.randint(1, 4) for _ in range(generator.randint(0, 3))]
        strides = [generator.randint(0, 12) for _ in shape]
        parts.append(places.as_strided(shape, strides, generator.randint(0, 40)))
    shown = {place for part in parts for place in part.flatten().tolist()}
    assert covered_nbytes(parts) == 4 * len(shown)
