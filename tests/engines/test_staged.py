"""What has arrived is a mapping of tensors, whether they exist already or not."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch

from wtransfer.engines.outline import Outline
from wtransfer.engines.staged import StagedTensors
from wtransfer.weight_sync.state import stands_alone

OUTLINE = Outline(
    ["a", "b", "none"], [torch.float32, torch.int64, torch.int8], [(2,), (1, 2), (0,)]
)
STARTS = [0, 64, 128]


def memory():
    made = np.zeros(128, dtype=np.uint8)
    made[:8].view(np.float32)[:] = [1.5, 2.5]
    made[64:80].view(np.int64)[:] = [3, 4]
    return made


@pytest.fixture
def placed():
    staged = StagedTensors(OUTLINE)
    assert staged.put_places(memory(), STARTS[:2])
    assert staged.put_places(staged.memory, STARTS[2:])
    return staged


def as_lists(staged):
    return {name: each.tolist() for name, each in staged.items()}


def test_places_are_read_as_tensors_in_plan_order(placed):
    assert as_lists(placed) == {"a": [1.5, 2.5], "b": [[3, 4]], "none": []}
    assert [(n, each.dtype, tuple(each.shape)) for n, each in placed.items()] == list(
        zip(OUTLINE.names, OUTLINE.dtypes, OUTLINE.shapes, strict=True)
    )
    assert (list(placed), len(placed)) == (["a", "b", "none"], 3)
    assert placed["b"].tolist() == [[3, 4]]


def test_each_has_a_storage_of_its_own_over_the_same_bytes(placed):
    assert all(map(stands_alone, placed.values()))
    placed["a"].add_(1)
    assert placed["a"].tolist() == [2.5, 3.5]
    assert placed["a"] is not placed["a"]


def test_a_tensor_keeps_the_memory_that_the_set_has_let_go_of(placed):
    tensor, kept = placed["a"], weakref.ref(placed.memory)
    del placed
    gc.collect()
    assert kept() is not None
    assert tensor.tolist() == [1.5, 2.5]


def test_what_has_not_arrived_is_not_there():
    staged = StagedTensors(OUTLINE)
    assert (list(staged), dict(staged.items()), "a" in staged) == ([], {}, False)
    staged.put_places(memory(), STARTS[:1])
    assert ("a" in staged, "b" in staged, "x" in staged, len(staged)) == (True, False, False, 1)
    for name in ("b", "x"):
        with pytest.raises(KeyError):
            staged[name]


def test_a_tensor_that_came_by_itself_stays_that_object():
    staged, own = StagedTensors(OUTLINE), torch.ones(1, 2, dtype=torch.int64)
    staged.put("b", own)
    assert staged["b"] is own
    assert (list(staged), "b" in staged, len(staged)) == (["b"], True, 1)


def test_places_come_first_and_in_one_memory():
    own = torch.ones(1, 2, dtype=torch.int64)
    made = StagedTensors(OUTLINE)
    made.put("b", own)
    assert not made.put_places(memory(), STARTS[:1])
    placed = StagedTensors(OUTLINE)
    assert placed.put_places(memory(), STARTS[:1])
    assert not placed.put_places(memory(), STARTS[1:])
    assert not placed.put_places(placed.memory, [64, 128, 192])
    placed.put("b", own)
    assert as_lists(placed) == {"a": [1.5, 2.5], "b": [[1, 1]]}


def apart(starts, outline, *, made=()):
    staged = StagedTensors(outline)
    staged.put_places(np.zeros(256, np.uint8), starts)
    for name in made:
        staged.put(name, torch.zeros(2))
    return staged.all_apart


def test_places_are_apart_when_all_are_there_and_none_is_anothers():
    two = Outline(["a", "b"], [torch.float32] * 2, [(2,)] * 2)
    assert apart([0, 64], two)
    assert apart([0, 8], two)
    assert not apart([0, 0], two)
    assert not apart([0, 4], two)
    assert not apart([64, 0], two)  # they are; this is not asked of places in another order
    assert not apart([0], two)
    assert not apart([0], two, made=["b"])
    assert not apart(STARTS, OUTLINE)  # an empty one is nowhere
