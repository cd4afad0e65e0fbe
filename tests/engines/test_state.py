"""What a module consists of, with tied storage counted once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from wtransfer.engines.outline import Outline
from wtransfer.weight_sync.state import (
    Group,
    Grouping,
    group_storages,
    look_apart,
    module_tensors,
    only_tensors,
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
def test_parameters_and_persistent_buffers_are_found():
    assert list(module_tensors(Tied())) == ["scale", "embed.weight", "head.weight"]


def test_the_tensors_are_the_modules_own():
    module = Tied()
    assert module_tensors(module)["embed.weight"] is module.embed.weight


# FAULTS 45
def test_tied_names_are_one_entry():
    entries = group_storages(module_tensors(Tied()))
    assert {name: entry.aliases for name, entry in entries.items()} == {
        "scale": (),
        "embed.weight": ("head.weight",),
    }
    assert len(entries["embed.weight"].tensors) == 1


def test_two_tensors_over_the_same_elements_are_one_entry_with_both():
    base = torch.zeros(3)
    entries = group_storages({"a": base, "b": base.detach()})
    assert list(entries) == ["a"]
    assert len(entries["a"].tensors) == 2
    assert not entries["a"].overlaps


def test_parts_of_one_buffer_are_entries_that_overlap():
    flat = torch.zeros(10)
    entries = group_storages({"a": flat[:5], "b": flat[5:], "alone": torch.zeros(5)})
    assert {name: entry.overlaps for name, entry in entries.items()} == {
        "a": True,
        "b": True,
        "alone": False,
    }


def test_another_view_of_the_same_memory_is_another_entry():
    base = torch.zeros(2, 3)
    assert list(group_storages({"a": base, "transposed": base.t()})) == ["a", "transposed"]


def test_empty_and_meta_tensors_are_never_taken_for_each_other():
    tensors = {
        "e1": torch.empty(0),
        "e2": torch.empty(0),
        "m1": torch.empty(2, device="meta"),
        "m2": torch.empty(2, device="meta"),
    }
    assert list(group_storages(tensors)) == list(tensors)


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
    assert group_storages({"a": base}, [base.detach()])["a"].overlaps
    assert not group_storages({"a": base}, [torch.zeros(3), torch.eye(2).to_sparse()])["a"].overlaps


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


# -- grouping again


def four():
    flat = torch.zeros(8)
    tied = torch.zeros(3, 3)
    return {"a": flat[:4], "b": flat[4:], "tied": tied, "again": tied.detach()}


GROUPS = (Group("a", (), True), Group("b", (), True), Group("tied", ("again",), False))


def test_groups_are_kept_as_long_as_nothing_changed_that_they_follow_from():
    grouping, tensors = Grouping(), four()
    groups = grouping.of(tensors)
    assert groups == GROUPS
    tensors["tied"].add_(1)
    assert grouping.of(tensors) is groups
    # All of them elsewhere, and sharing as before: that is what adopting an update does.
    assert grouping.of(four()) is groups


def untie(tensors):
    tensors["again"].data = torch.zeros(3, 3)


def tie(tensors):
    tensors["b"].data = tensors["a"].data


def transpose(tensors):
    tensors["again"].data = tensors["tied"].data.t()


def rename(tensors):
    tensors["c"] = tensors.pop("again")


def reorder(tensors):
    tensors["a"] = tensors.pop("a")


def resize(tensors):
    tensors["tied"].resize_(2, 2)


def reshape(tensors):
    tensors["a"].data = tensors["a"].data.view(2, 2)


def set_apart(tensors):
    tensors["a"].set_(torch.zeros(4))


def another_dtype(tensors):
    tensors["a"].data = tensors["a"].data.view(torch.int32)


def onto_a_device(tensors):
    tensors["a"] = tensors["a"].to("meta")


CHANGES = [
    untie,
    tie,
    transpose,
    rename,
    reorder,
    resize,
    reshape,
    set_apart,
    another_dtype,
    onto_a_device,
]


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_that_could_matter_is_seen(change):
    grouping, tensors = Grouping(), four()
    before = grouping.of(tensors)
    change(tensors)
    after = grouping.of(tensors)
    assert after is not before
    assert after == Grouping().of(tensors)
    assert grouping.of(tensors) is after


def onto_one_buffer(tensors):
    flat = torch.zeros(8)
    tensors["x"].data, tensors["y"].data = flat[:4], flat[4:]


def narrow(tensors):
    tensors["x"].data = tensors["x"].data[:3]


def to_meta(tensors):
    tensors["x"] = tensors["x"].to("meta")


def to_a_subclass(tensors):
    tensors["x"] = tensors["x"].as_subclass(type("Own", (torch.Tensor,), {}))


def to_sparse(tensors):
    tensors["x"] = tensors["x"].to_sparse()


def tie_far_apart(tensors):
    tensors["y"].data = tensors["x"].data


@pytest.mark.parametrize(
    "change", [onto_one_buffer, narrow, to_meta, to_a_subclass, to_sparse, tie_far_apart]
)
def test_a_change_among_many_that_stand_alone_is_seen(change):
    many = {f"t{number}": torch.zeros(4) for number in range(1500)}
    grouping, tensors = Grouping(), {"x": torch.zeros(4), **many, "y": torch.zeros(4)}
    before = grouping.of(tensors)
    assert grouping.of(tensors) is before
    change(tensors)
    after = grouping.of(tensors)
    assert after is not before
    assert after == Grouping().of(tensors)


def among_many():
    many = {f"t{number}": torch.zeros(4) for number in range(1500)}
    return {"x": torch.zeros(4), **many, "y": torch.zeros(4)}


def outline_of(tensors):
    values = tensors.values()
    return Outline(
        list(tensors), [each.dtype for each in values], [tuple(each.shape) for each in values]
    )


def test_tensors_are_apart_wherever_they_lie():
    tensors = among_many()
    outline = outline_of(tensors)
    assert look_apart(tensors, outline)
    assert look_apart({name: each.clone() for name, each in tensors.items()}, outline)
    # One behind the other; and elements that are shared, as long as none is the first of both.
    onto_one_buffer(tensors)
    assert look_apart(tensors, outline)
    assert look_apart({}, outline_of({}))


def drop_the_last(tensors):
    del tensors["y"]


def rename_the_last(tensors):
    tensors["z"] = tensors.pop("y")


def put_the_first_last(tensors):
    tensors["x"] = tensors.pop("x")


def read_otherwise(tensors):
    tensors["x"].data = tensors["x"].data.view(torch.int32)


def fold(tensors):
    tensors["x"].data = tensors["x"].data.view(2, 2)


@pytest.mark.parametrize(
    "change",
    [
        narrow,
        to_meta,
        to_a_subclass,
        to_sparse,
        tie_far_apart,
        drop_the_last,
        rename_the_last,
        put_the_first_last,
        read_otherwise,
        fold,
    ],
)
def test_of_one_that_is_not_as_it_was_none_are_said_to_be_apart(change):
    tensors = among_many()
    outline = outline_of(tensors)
    change(tensors)
    assert not look_apart(tensors, outline)


@pytest.mark.parametrize("number", [1, 2])
def test_empty_tensors_take_a_closer_look(number):
    tensors = {**among_many(), **{f"none{i}": torch.empty(0) for i in range(number)}}
    assert not look_apart(tensors, outline_of(tensors))


def test_of_a_mapping_only_tensors_are_taken_and_as_they_are():
    tensors = {"a": torch.zeros(2), "b": nn.Parameter(torch.ones(1))}
    found = only_tensors(tensors)
    assert found == tensors
    assert found is not tensors
    assert list(only_tensors({"step": 3, **tensors, "none": None})) == ["a", "b"]
    assert only_tensors({"own": tensors["a"].as_subclass(Own), "x": 1}).keys() == {"own"}


class Own(torch.Tensor):
    """A class of somebody's own."""


def test_a_tensor_without_a_name_that_comes_to_share_memory_is_seen():
    grouping, tensors, beside = Grouping(), {"a": torch.zeros(3)}, [torch.zeros(3)]
    assert grouping.of(tensors, beside) == (Group("a", (), False),)
    beside[0].data = tensors["a"].data
    assert grouping.of(tensors, beside) == (Group("a", (), True),)


@pytest.mark.parametrize("change", [untie, transpose, rename, reorder, resize])
def test_whoever_reads_one_of_each_group_misses_none_that_has_parted(change):
    grouping, tensors = Grouping(), four()
    grouping.of(tensors)
    change(tensors)
    assert grouping.kept(tensors) == Grouping().of(tensors)


def test_names_that_have_come_together_may_be_read_twice():
    grouping, tensors = Grouping(), four()
    assert grouping.kept(tensors) == GROUPS
    tie(tensors)
    assert grouping.kept(tensors) == GROUPS
    assert grouping.of(tensors)[0] == Group("a", ("b",), False)
