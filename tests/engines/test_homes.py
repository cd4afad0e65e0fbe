"""Small tensors have memory of their own, to which updates are copied many at a time."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wtransfer.engines.outline import Outline
from wtransfer.engines.staged import StagedTensors
from wtransfer.transport.buckets import aligned
from wtransfer.weight_sync.worker import homes as homes_module
from wtransfer.weight_sync.worker.homes import Homes


def update_of(sizes, starts, value=0):
    """Return an update of bytes, each tensor with a value of its own."""
    names = [f"t{number}" for number in range(len(sizes))]
    outline = Outline(names, [torch.uint8] * len(sizes), [(size,) for size in sizes])
    memory = np.zeros(max(a + b for a, b in zip(starts, sizes, strict=True)), np.uint8)
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        memory[start : start + size] = 1 + (value + number) % 255
    update = StagedTensors(outline)
    assert update.put_places(memory, starts)
    return update


def given_homes(update, names=None):
    homes = Homes()
    wanted = names or update.outline.names
    return homes, {name: homes.give(name, update[name]) for name in wanted}


def places_of(update, tensors):
    """Return where tensors lie, in the order of an update; 0 where there is none."""
    return [tensors[name].data_ptr() if name in tensors else 0 for name in update.outline.names]


def behind_each_other(sizes):
    starts, end = [], 0
    for size in sizes:
        starts.append(end)
        end += aligned(size)
    return starts


SIZES = [64, 100, 128, 1, 4096]


def test_an_update_in_the_order_of_the_homes_is_one_copy():
    update = update_of(SIZES, behind_each_other(SIZES))
    homes, tensors = given_homes(update)
    moves = homes.moves(update, places_of(update, tensors))
    assert len(moves.copies) == 1
    assert not any(moves.leaving)
    moves.copy(update.memory)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, update[name])


def test_homes_are_tensors_alone_in_their_memory():
    like = torch.zeros(3, 5, dtype=torch.float16)
    homes = Homes()
    for name in "ab":
        home = homes.give(name, like)
        assert (home.shape, home.dtype) == (like.shape, like.dtype)
        assert home.untyped_storage().nbytes() == like.nbytes
        assert home.data_ptr() % 64 == 0
        assert homes.has(name, home.data_ptr(), like.nbytes)
        assert not homes.has(name, home.data_ptr(), like.nbytes + 2)
        assert not homes.has(name, home.data_ptr() + 64, like.nbytes)


def test_what_has_no_home_of_its_size_leaves():
    update = update_of(SIZES, behind_each_other(SIZES))
    homes, tensors = given_homes(update, ["t0", "t2", "t4"])
    tensors["t1"] = homes.give("t1", torch.zeros(99, dtype=torch.uint8))
    homes.forget("t4")
    moves = homes.moves(update, places_of(update, tensors))
    assert moves.leaving == [False, True, False, True, True]
    tensors["t4"].zero_()
    moves.copy(update.memory)
    assert torch.equal(tensors["t0"], update["t0"])
    assert torch.equal(tensors["t2"], update["t2"])
    assert not tensors["t4"].any()


@given(st.data())
def test_whatever_lies_wherever_comes_home(data):
    sizes = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=12))
    order = data.draw(st.permutations(range(len(sizes))))
    gaps = data.draw(st.lists(st.sampled_from([0, 0, 0, 1, 64, 128]), min_size=12, max_size=12))
    starts, end = [0] * len(sizes), 0
    for number, gap in zip(order, gaps, strict=False):
        starts[number] = end
        end += aligned(sizes[number]) + gap
    update = update_of(sizes, starts)
    known = data.draw(st.permutations(update.outline.names))
    chunk_nbytes = data.draw(st.sampled_from([128, 1024, 1 << 20]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(homes_module, "CHUNK_NBYTES", chunk_nbytes)
        homes, tensors = given_homes(update, known)
        homes.moves(update, places_of(update, tensors)).copy(update.memory)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, update[name])


def test_how_an_update_comes_home_is_worked_out_once_while_all_is_alike():
    starts = behind_each_other(SIZES)
    update = update_of(SIZES, starts)
    homes, tensors = given_homes(update)
    places = places_of(update, tensors)
    moves = homes.moves(update, places)
    assert homes.moves(update_of(SIZES, starts, 8), list(places)) is moves
    shorter = update_of([*SIZES[:4], 4095], starts)
    assert homes.moves(shorter, places).leaving == [False, False, False, False, True]
    later = update_of(SIZES, [start + 64 for start in starts])
    assert homes.moves(later, places).copies[0].staged.start == 64
    elsewhere = [0, *places[1:]]
    assert homes.moves(later, elsewhere).leaving == [True, False, False, False, False]
    assert not any(homes.moves(later, places).leaving)
    homes.forget("t0")
    assert homes.moves(later, places).leaving == [True, False, False, False, False]


def test_memory_goes_when_all_of_its_homes_are_forgotten_and_their_tensors_gone():
    homes, like = Homes(), torch.zeros(1 << 20, dtype=torch.uint8)
    tensors = [homes.give(name, like) for name in "ab"]
    chunk = weakref.ref(homes._homes["a"].chunk)
    assert homes._homes["b"].chunk is not chunk()
    homes.forget_others({"b", "c"})
    assert chunk() is not None
    del tensors[0]
    gc.collect()
    assert chunk() is None


def test_what_is_taken_at_once_grows_with_what_there_is():
    homes, like = Homes(), torch.zeros(1 << 14, dtype=torch.uint8)
    for number in range(1024):
        homes.give(str(number), like)
    assert len({id(home.chunk) for home in homes._homes.values()}) == 5


def test_homes_that_are_given_anew_again_and_again_take_no_more_than_twice_their_bytes():
    homes, like = Homes(), torch.zeros(1 << 14, dtype=torch.uint8)
    for _ in range(20):
        tensors = [homes.give(str(number), like) for number in range(256)]
        chunks = {id(home.chunk): home.chunk.nbytes for home in homes._homes.values()}
        assert sum(chunks.values()) <= 3 * 256 * like.nbytes
    assert len(tensors) == 256
