"""A model goes from what it has adopted to the next update at once, unless anything differs."""

from __future__ import annotations

import contextlib
import itertools

import numpy as np
import pytest
import torch

from wtransfer.engines.interface import TensorSpec
from wtransfer.engines.outline import Outline
from wtransfer.engines.staged import StagedTensors
from wtransfer.errors import SchemaError
from wtransfer.testing.contents import contents
from wtransfer.transport.buckets import aligned
from wtransfer.transport.tensors import PART
from wtransfer.weight_sync.state import Group
from wtransfer.weight_sync.worker.adopting import Adopted
from wtransfer.weight_sync.worker.target import NotedTensors, StateDictTarget

SHAPES = {"a": (4,), "b": (4,), "square": (3, 3), "scalar": (), "row": (1, 6)}
OUTLINE = Outline(list(SHAPES), [torch.float32] * len(SHAPES), list(SHAPES.values()))


def placed(value, outline=OUTLINE, starts=None):
    """Return an update in memory of its own, every element with this value."""
    if starts is None:
        starts = [64 * number for number in range(len(outline))]
    memory = np.full(64 * len(outline), value, dtype=np.float32).view(np.uint8)
    update = StagedTensors(outline)
    assert update.put_places(memory, starts)
    return update


def filled(value, shapes=SHAPES):
    return contents({name: torch.full(shape, float(value)) for name, shape in shapes.items()})


@pytest.fixture(params=["at home", "pointed", "both"], autouse=True)
def small_nbytes(request, monkeypatch):
    """Up to which size tensors have homes: all of these, none, or some."""
    found = {"at home": 1 << 10, "pointed": -1, "both": 16}[request.param]
    monkeypatch.setattr("wtransfer.weight_sync.worker.target.SMALL_NBYTES", found)
    return found


@pytest.fixture
def all_pointed(monkeypatch):
    """No tensor has a home."""
    monkeypatch.setattr("wtransfer.weight_sync.worker.target.SMALL_NBYTES", -1)


@pytest.fixture
def model(small_nbytes):
    """A model, and its target, which has adopted two updates."""
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    target = StateDictTarget(tensors)
    for value in (1, 2):
        target.apply(placed(value))
    return tensors, target


@pytest.fixture
def read(monkeypatch):
    """Counts how often a target looks at everything anew."""
    found = []
    whole = StateDictTarget._read
    monkeypatch.setattr(StateDictTarget, "_read", lambda self: found.append(1) or whole(self))
    return found


def test_update_after_update_is_adopted_without_another_look(model, read, small_nbytes):
    tensors, target = model
    homes = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    for value in (3, 4):
        update = placed(value)
        target.apply(update)
        assert contents(tensors) == filled(value)
        for name, tensor in tensors.items():
            expected = homes[name] if tensor.nbytes <= small_nbytes else update[name].data_ptr()
            assert tensor.data_ptr() == expected
        assert list(target.schema()) == list(SHAPES)
    assert read == []


def test_of_names_that_a_model_has_no_more_nothing_is_kept():
    adopted = Adopted()
    for number in range(3):
        names = [f"{number}.home", f"{number}.pointed"]
        tensors = [adopted.give_home(names[0], torch.zeros(4)), torch.zeros(4)]
        adopted.enter(names[1], tensors[1].data_ptr())
        adopted.forget_others(names)
        assert len(adopted._homes.addresses) == 1
        assert list(adopted._spots.by_name) == names


def test_what_an_update_consisted_of_is_never_written_into(model):
    tensors, target = model
    first = placed(3)
    for update in (first, placed(4), placed(5)):
        target.apply(update)
    tensors["a"].fill_(6)
    tensors["square"].fill_(6)
    target.apply(placed(7))
    assert contents(dict(first)) == filled(3)
    assert contents(tensors) == filled(7)


def test_a_view_of_what_was_adopted_gets_no_update_written_into(model):
    tensors, target = model
    first = placed(3)
    target.apply(first)
    tensors["head"] = tensors["a"][:1]
    target.apply({"a": torch.full((4,), 4.0), "head": torch.full((1,), 5.0)})
    assert contents(dict(first)) == filled(3)
    assert tensors["head"].tolist() == [5.0]


def exchange_turned(tensors):
    a, b = tensors["a"], tensors["b"]
    a.data, b.data = b.data.t(), a.data.t()


def turn_and_move(tensors):
    tensors["b"].data = tensors["a"].data.t()
    tensors["a"].data = tensors["a"].data.clone()


def put_turned(tensors):
    tensors["b"] = tensors["a"].detach().t()
    tensors["a"] = torch.zeros(3, 3)


@pytest.mark.parametrize("change", [exchange_turned, turn_and_move, put_turned])
def test_no_update_is_written_into_whoever_came_to_share_its_memory(small_nbytes, change):
    outline = Outline(["a", "b"], [torch.float32] * 2, [(3, 3)] * 2)
    tensors = {name: torch.zeros(3, 3) for name in "ab"}
    target = StateDictTarget(tensors)
    first = placed(1, outline)
    for update in (placed(0, outline), first):
        target.apply(update)
    change(tensors)
    target.apply(placed(2, outline))
    assert contents(tensors) == filled(2, dict.fromkeys("ab", (3, 3)))
    target.apply(first)
    assert contents(tensors) == filled(1, dict.fromkeys("ab", (3, 3)))


def test_the_way_back_is_as_whole_after_the_model_was_written_into(model):
    tensors, target = model
    before = placed(3)
    target.apply(before)
    target.apply(placed(4))
    for tensor in tensors.values():
        tensor.zero_()
    target.apply(before)
    assert contents(tensors) == filled(3)


def test_what_is_captured_stays_whatever_is_applied(model):
    tensors, target = model
    captured = target.capture()
    for value in (3, 4):
        target.apply(placed(value))
    assert contents(captured) == filled(2)
    target.apply(captured)
    assert contents(tensors) == filled(2)


def test_a_tensor_that_parted_from_its_home_gets_another(model):
    tensors, target = model
    for value in (3, 4):
        old = tensors["b"].data
        tensors["b"].data = old.clone()
        target.apply(placed(value))
        assert contents(tensors) == filled(value)
        assert old.tolist() == [value - 1.0] * 4


def test_a_shorter_view_of_what_was_adopted_is_no_home(model):
    tensors, target = model
    update = placed(3)
    target.apply(update)
    tensors["square"] = tensors["square"].view(-1)[:3]
    target.apply({"square": torch.full((3,), 9.0)})
    assert tensors["square"].tolist() == [9.0] * 3
    assert update["square"].tolist() == [[3.0] * 3] * 3


def test_an_update_whose_places_lie_anyhow_comes_home_whole(model):
    tensors, target = model
    for starts in ([256, 192, 128, 64, 0], [0, 128, 64, 192, 256], [4, 64, 128, 192, 256]):
        memory = np.arange(80, dtype=np.float32)
        update = StagedTensors(OUTLINE)
        assert update.put_places(memory.view(np.uint8), starts)
        target.apply(update)
        for name, start in zip(SHAPES, starts, strict=True):
            expected = memory[start // 4 :][: tensors[name].numel()]
            assert tensors[name].flatten().tolist() == expected.tolist()


def move(tensors):
    tensors["square"].data = tensors["square"].data.clone()


def replace(tensors):
    tensors["square"] = torch.zeros(3, 3)


def reshape(tensors):
    tensors["square"].data = tensors["square"].data.view(9)


def turn(tensors):
    tensors["row"].data = tensors["row"].data.view(6, 1)


def retype(tensors):
    tensors["square"].data = tensors["square"].data.view(torch.int32)


def tie(tensors):
    tensors["b"] = tensors["a"]


def overlap(tensors):
    tensors["b"].data = tensors["a"].data


def add(tensors):
    tensors["new"] = tensors["a"].detach()


def rename(tensors):
    tensors["c"] = tensors.pop("square")


def wrap(tensors):
    tensors["a"] = tensors["a"].as_subclass(type("Own", (torch.Tensor,), {}))


CHANGES = [move, replace, reshape, turn, retype, tie, overlap, add, rename, wrap]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_was_done_to_the_model_is_noticed(model, read, change):
    tensors, target = model
    change(tensors)
    assert target.schema() == StateDictTarget(dict(tensors)).schema()
    assert read[0:1] == [1]


class Wrapper(torch.Tensor):
    """A tensor of another one, as quantising libraries make them."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function}")


UNWRITABLE = {
    "sparse": (torch.Tensor.to_sparse, "of layout torch.sparse_coo"),
    "mkldnn": (torch.Tensor.to_mkldnn, "of layout torch._mkldnn"),
    "lazy": (lambda _tensor: torch.nn.UninitializedBuffer(), "not initialized yet"),
    "wrapper": (Wrapper, "a Wrapper, which wraps others"),
    # In the same place, with the same shape, too.
    "expanded": (lambda tensor: tensor[:1, :1].expand(3, 3), "expanded: several"),
}


@pytest.mark.parametrize("case", UNWRITABLE)
def test_what_nothing_can_be_written_to_any_more_is_named(model, case):
    tensors, target = model
    convert, why = UNWRITABLE[case]
    tensors["square"] = convert(tensors["square"])
    for _ in range(2):
        with pytest.raises(SchemaError, match=f"square: {why}") as refused:
            target.schema()
        assert refused.value.piece == "square"
    with pytest.raises(SchemaError, match=f"square: {why}"):
        target.apply(placed(3))


@pytest.mark.parametrize("change", [move, replace, tie, overlap, add, wrap])
def test_what_still_fits_has_the_update_whatever_was_done_to_it(model, change):
    tensors, target = model
    change(tensors)
    target.apply(placed(5))
    assert contents({name: tensors[name] for name in SHAPES}) == filled(5)
    if "new" in tensors:
        assert tensors["new"].tolist() == [5.0] * 4


@pytest.mark.parametrize("change", [move, replace, tie, overlap, add, wrap])
def test_what_was_done_to_it_after_a_look_is_noticed_all_the_same(model, change):
    tensors, target = model
    target.schema()
    change(tensors)
    target.apply(placed(5))
    assert contents({name: tensors[name] for name in SHAPES}) == filled(5)
    tensors["a"].add_(1)
    assert (tensors["b"] is tensors["a"]) == (change is tie)
    assert contents({"square": tensors["square"]}) == filled(5, {"square": (3, 3)})


@pytest.mark.parametrize("change", [reshape, turn])
def test_what_was_viewed_otherwise_after_a_look_is_noticed(model, change):
    tensors, target = model
    target.schema()
    change(tensors)
    with pytest.raises(SchemaError, match=r"has shape .* by now"):
        target.apply(placed(5))


def transpose(tensors):
    tensors["square"].data = tensors["square"].data.t()


def negate(tensors):
    tensors["square"].data = torch._neg_view(tensors["square"].data)


@pytest.mark.parametrize("change", [retype, transpose, negate])
def test_what_is_read_otherwise_since_a_look_has_the_values_of_the_update(model, change):
    tensors, target = model
    target.schema()
    change(tensors)
    update = placed(5)
    update.memory[128:164].view(np.float32)[:] = np.arange(9)
    target.apply(update)
    assert tensors["square"].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert tensors["a"].tolist() == [5.0] * 4


def test_a_conjugate_since_a_look_has_the_values_of_the_update(small_nbytes):
    tensors = {"z": torch.zeros(2, dtype=torch.complex64)}
    outline = Outline(["z"], [torch.complex64], [(2,)])
    target = StateDictTarget(tensors)
    for number in range(3):
        update = StagedTensors(outline)
        memory = np.array([number + 1j, 2 - 3j], dtype=np.complex64)
        update.put_places(memory.view(np.uint8), [0])
        target.schema()
        tensors["z"].data = tensors["z"].data.conj()
        target.apply(update)
        assert tensors["z"].tolist() == memory.tolist()


def test_a_tensor_and_an_update_that_shrink_alike_leave_the_way_back_whole(small_nbytes):
    tensors = {"p": torch.zeros(25), "q": torch.zeros(4)}
    target = StateDictTarget(tensors)

    def update(number, value):
        return placed_at(Outline(["p", "q"], [torch.float32] * 2, [(number,), (4,)]), value)

    for value in (1, 2):
        target.apply(update(25, value))
    for number in (24, 23):
        tensors["p"].data = tensors["p"].data[:number]
        captured = target.capture()
        before = contents(captured)
        target.apply(update(number, number))
        assert tensors["p"].tolist() == [number] * number
        assert contents(captured) == before
        target.apply(captured)
        assert contents(tensors) == before


def placed_at(outline, value):
    starts = np.cumsum([0, *map(aligned, outline.sizes)]).tolist()
    memory = np.full(starts[-1], value, dtype=np.float32).view(np.uint8)[: starts[-1]]
    update = StagedTensors(outline)
    assert update.put_places(memory, starts[:-1])
    return update


def test_a_way_back_of_another_target_of_the_model_is_not_written_into(small_nbytes):
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    first, second = StateDictTarget(tensors), StateDictTarget(tensors)
    first.apply(placed(1))
    captured = second.capture()
    first.apply(placed(2))
    assert contents(captured) == filled(1)


def test_tied_tensors_that_broke_between_two_names_are_tied_again(small_nbytes, monkeypatch):
    weight = torch.zeros(4)
    tensors = {"a": weight, "b": weight.detach(), "c": torch.zeros(4)}
    target = StateDictTarget(tensors)
    schema, captured = target.schema(), target.capture()
    assert schema["a"].aliases == ("b",)
    with monkeypatch.context() as patch:
        patch.setattr(Group, "distinct", breaking_after_one)
        with contextlib.suppress(KeyboardInterrupt):
            target.apply({"c": torch.ones(4), "a": torch.ones(4)})
    assert tensors["a"].tolist() == [1.0] * 4
    # Small ones are written where they are, and cannot break there.
    assert (tensors["b"].tolist() == [1.0] * 4) == (small_nbytes >= 16)
    target.apply(captured)
    assert target.schema() == schema
    assert contents(tensors) == filled(0, {"a": (4,), "b": (4,), "c": (4,)})


def breaking_after_one(group, tensors):
    yield tensors[group.name]
    if group.aliases:
        raise KeyboardInterrupt


def test_an_update_in_other_forms_than_were_looked_at_is_converted(model):
    tensors, target = model
    target.schema()
    halves = Outline(list(SHAPES), [torch.float16] * len(SHAPES), list(SHAPES.values()))
    update = StagedTensors(halves)
    memory = np.full(32 * len(SHAPES), 7, dtype=np.float16).view(np.uint8)
    assert update.put_places(memory, [64 * number for number in range(len(SHAPES))])
    target.apply(update)
    assert contents(tensors) == filled(7)


def test_what_does_not_fit_any_more_is_converted_or_refused(model):
    tensors, target = model
    retype(tensors)
    target.apply(placed(5))
    assert tensors["square"].tolist() == [[5] * 3] * 3
    assert target.schema()["square"] == TensorSpec(torch.int32, (3, 3))


def test_one_place_under_two_names_does_not_tie_them(model):
    tensors, target = model
    target.apply(placed(6, starts=[0, 0, 128, 192, 256]))
    assert contents(tensors) == filled(6)
    tensors["a"].add_(1)
    assert tensors["b"].tolist() == [6.0] * 4


def test_one_tensor_that_came_twice_is_known_to_be_one(all_pointed):
    tensors = {name: torch.zeros(4) for name in "ab"}
    target, one = StateDictTarget(tensors), torch.ones(4)
    target.apply({"a": one})
    target.apply({"b": one})
    assert target.schema() == {"a": TensorSpec(torch.float32, (4,), ("b",))}


def test_an_update_in_another_order_is_adopted_by_name(model):
    tensors, target = model
    order = list(reversed(SHAPES))
    target.apply(placed(7, Outline(order, OUTLINE.dtypes, [SHAPES[name] for name in order])))
    assert contents(tensors) == filled(7)


class Breaks(StagedTensors):
    """Breaks when the third tensor is read."""

    def made(self, wanted):
        for number, tensor in enumerate(super().made(wanted)):
            if number == 2:
                raise KeyboardInterrupt
            yield tensor


def test_where_it_broke_is_known_and_the_way_back_is_whole(all_pointed, model):
    tensors, target = model
    before = placed(2)
    target.apply(before)
    breaking = Breaks(OUTLINE)
    breaking.put_places(placed(3).memory, before.starts)
    noted = NotedTensors(breaking)
    with pytest.raises(KeyboardInterrupt):
        target.apply(noted)
    assert noted.last_read == "square"
    assert tensors["a"].tolist() == [3.0] * 4
    target.apply(before)
    assert contents(tensors) == filled(2)


class BreaksAtTheEnd(StagedTensors):
    """Breaks when the last tensor has been applied."""

    def made(self, wanted):
        yield from super().made(wanted)
        raise KeyboardInterrupt


def test_what_broke_after_the_last_tensor_is_heard_of_as_what_it_is(all_pointed, model):
    tensors, target = model
    breaking = BreaksAtTheEnd(OUTLINE)
    breaking.put_places(placed(3).memory, [64 * number for number in range(len(SHAPES))])
    noted = NotedTensors(breaking)
    with pytest.raises(KeyboardInterrupt):
        target.apply(noted)
    assert noted.last_read == "row"
    target.apply(placed(4))
    assert contents(tensors) == filled(4)


def test_of_an_update_that_broke_is_known_what_was_adopted(all_pointed):
    names = [f"t{number}" for number in range(PART + 2)]
    outline = Outline(names, [torch.float32] * len(names), [(4,)] * len(names))
    tensors = {name: torch.zeros(4) for name in names}
    target = StateDictTarget(tensors)
    before = placed(1, outline)
    for update in (placed(0, outline), before):
        target.apply(update)
    breaking = BreaksLate(outline)
    breaking.put_places(placed(2, outline).memory, before.starts)
    with pytest.raises(KeyboardInterrupt):
        target.apply(breaking)
    assert [tensors[name].tolist()[0] for name in (names[0], names[-1])] == [2.0, 1.0]
    known = [tensors[name].data_ptr() in target._adopted.staged(tensors) for name in names]
    assert known == [True] * len(names)


class BreaksLate(StagedTensors):
    """Breaks when all but two tensors have been read."""

    def made(self, wanted):
        yield from itertools.islice(super().made(wanted), PART)
        raise KeyboardInterrupt


def test_an_update_is_adopted_at_once_also_after_single_tensors(model, read):
    tensors, target = model
    target.apply({"a": torch.full((4,), 8.0)})
    assert len(read) == 1
    target.apply(placed(9))
    assert contents(tensors) == filled(9)
    assert len(read) == 1


def test_what_was_adopted_under_names_that_are_gone_is_forgotten(model):
    tensors, target = model
    homes = target._adopted._homes
    tensors["new"] = tensors.pop("a")
    target.apply({name: torch.ones(each.shape) for name, each in tensors.items()})
    assert "a" not in target._adopted._spots.by_name
    assert not homes.has("a", tensors["new"].data_ptr(), 16)


def test_a_model_that_copies_adopts_nothing(model):
    tensors = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    target = StateDictTarget(tensors, "copy")
    addresses = {name: each.data_ptr() for name, each in tensors.items()}
    for value in (1, 2, 3):
        target.apply(placed(value))
        assert contents(tensors) == filled(value)
    assert {name: each.data_ptr() for name, each in tensors.items()} == addresses
