"""Memory is used again, but never under somebody who still looks at it (FAULTS 43, 44)."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from wtransfer.engines.collective import RecycledMemory

NBYTES = 1 << 16

LOOKS = {
    "array": lambda lent: lent,
    "slice": lambda lent: lent[100:200],
    "slice of a slice": lambda lent: lent[100:200][10:20],
    "memoryview": lambda lent: memoryview(lent)[5:],
    "other dtype": lambda lent: lent[:128].view(np.float32),
    "tensor": torch.from_numpy,
    "view of a tensor": lambda lent: torch.from_numpy(lent)[64:128].view(torch.int64),
    "placed tensor": lambda lent: torch.frombuffer(lent, dtype=torch.float32, offset=64),
    "parameter": lambda lent: torch.nn.Parameter(torch.from_numpy(lent).view(torch.float32), False),
}


def num_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def address(lent):
    return lent.ctypes.data


@pytest.fixture
def memory():
    recycled = RecycledMemory()
    yield recycled
    recycled.forget()


@pytest.mark.parametrize("how", LOOKS)
def test_memory_with_a_live_view_is_not_handed_out_again(memory, how):
    lent = memory.take(NBYTES)
    lent[:] = 7
    first = address(lent)
    look = LOOKS[how](lent)
    del lent
    others = [memory.take(NBYTES) for _ in range(3)]
    for other in others:
        assert address(other) != first
        other[:] = 9
    seen = look.detach().numpy() if isinstance(look, torch.Tensor) else np.asarray(look)
    assert set(seen.tobytes()) == {7}


@pytest.mark.parametrize("how", LOOKS)
def test_memory_without_a_live_view_is_handed_out_again(memory, how):
    lent = memory.take(NBYTES)
    first = address(lent)
    look = LOOKS[how](lent)
    del lent, look
    assert address(memory.take(NBYTES)) == first


def test_two_pieces_take_turns_where_one_is_in_use(memory):
    addresses = []
    in_use = None
    for _ in range(6):
        in_use = memory.take(NBYTES)
        addresses.append(address(in_use))
    assert len(set(addresses)) == 2
    assert addresses[0] == addresses[2] == addresses[4] != addresses[1]


def test_a_piece_that_is_too_small_is_not_handed_out(memory):
    small = memory.take(100)
    del small
    large = memory.take(NBYTES)
    assert large.shape == (NBYTES,)
    large[:] = 1


def test_a_larger_piece_serves_a_smaller_request(memory):
    first = address(memory.take(NBYTES))
    small = memory.take(100)
    assert (address(small), small.shape) == (first, (100,))


def test_free_pieces_that_do_not_serve_are_given_back(memory):
    taken = [memory.take(NBYTES) for _ in range(4)]
    num_before = num_descriptors()
    taken.clear()
    memory.take(NBYTES)
    assert num_before - num_descriptors() == 3


def test_memory_in_use_outlives_forget(memory):
    lent = memory.take(NBYTES)
    lent[:] = 3
    memory.forget()
    gc.collect()
    assert set(lent.tobytes()) == {3}
    assert address(memory.take(NBYTES)) != address(lent)


def test_another_thread_may_let_go(memory):
    first = address(memory.take(NBYTES))
    look = [torch.from_numpy(memory.take(NBYTES))]
    assert look[0].data_ptr() == first
    thread = threading.Thread(target=look.clear)
    thread.start()
    thread.join()
    assert address(memory.take(NBYTES)) == first


def test_no_bytes_at_all_can_be_taken(memory):
    assert memory.take(0).shape == (0,)


def test_taking_fresh_memory_can_be_ended(memory):
    def stop(_nbytes):
        raise RuntimeError("the round is over")

    with pytest.raises(RuntimeError, match="the round is over"):
        memory.take(NBYTES, stop)
    # Nothing of the attempt is left.
    assert memory.take(NBYTES).shape == (NBYTES,)
