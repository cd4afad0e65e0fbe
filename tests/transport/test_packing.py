"""Small tensors that are copied one by one and digested together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wtransfer.transport.digests import digest
from wtransfer.transport.packing import RUN_NBYTES, Run, pack

NAN = float("nan")
TENSORS = [
    torch.tensor([1.0, NAN, float("inf")]),
    torch.arange(6, dtype=torch.int64).view(2, 3),
    torch.ones(5, dtype=torch.bfloat16),
    torch.tensor(-float("inf"), dtype=torch.float64),
    torch.nn.Parameter(torch.ones(2, 2)),
]


def places(tensors, gap=64):
    starts = np.cumsum([0, *(-(-each.nbytes // gap) * gap for each in tensors)])
    return [
        slice(int(start), int(start) + each.nbytes)
        for start, each in zip(starts, tensors, strict=False)
    ]


@pytest.mark.parametrize("before", [0, 0xFF])
def test_tensors_are_copied_digested_and_screened_whatever_lay_between(before):
    memory = np.full(1024, before, dtype=np.uint8)
    run = Run(memory)
    where = places(TENSORS)
    assert [run.add(tensor, place) for tensor, place in zip(TENSORS, where, strict=True)] == [
        True
    ] * len(TENSORS)
    assert run.finish() == ([digest(each) for each in TENSORS], [2, 0, 0, 1, 0])
    copied = np.concatenate([memory[place] for place in where])
    assert copied.tobytes() == b"".join(
        each.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for each in TENSORS
    )
    assert set(memory[where[-1].stop :].tolist()) == {before}
    assert run.finish() == ([], [])


def test_a_tensor_is_copied_before_its_memory_may_be_used_again():
    run, buffer = Run(np.zeros(64, dtype=np.uint8)), torch.zeros(4)
    for number in range(4):
        assert run.add(buffer.fill_(number), slice(16 * number, 16 * number + 16))
    expected = [digest(torch.full((4,), float(number))) for number in range(4)]
    assert run.finish() == (expected, [0] * 4)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 3).t(),
        torch.zeros(8)[::2],
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(2, dtype=torch.complex64).conj().imag,
        torch.zeros(3, device="meta"),
        torch.eye(3).to_sparse(),
        torch.zeros(2).as_subclass(type("Own", (torch.Tensor,), {})),
        torch.zeros(0),
        torch.zeros(RUN_NBYTES + 1, dtype=torch.uint8),
    ],
    ids=["transposed", "strided", "conj", "neg", "meta", "sparse", "subclass", "empty", "large"],
)
def test_what_does_not_lie_flat_or_is_large_is_left_to_others(tensor):
    nbytes = tensor.numel() * tensor.itemsize
    assert not Run(np.zeros(2 * RUN_NBYTES, dtype=np.uint8)).add(tensor, slice(0, nbytes))


@pytest.mark.parametrize("nbytes", [0, 12, 20])
def test_a_place_of_another_size_is_never_written_to(nbytes):
    memory = np.zeros(32, dtype=np.uint8)
    assert not Run(memory).add(torch.ones(4), slice(0, nbytes))
    assert not memory.any()


def test_a_run_ends_where_it_would_leave_the_cache():
    run = Run(np.zeros(2 * RUN_NBYTES, dtype=np.uint8))
    half = torch.ones(RUN_NBYTES // 2 + 1, dtype=torch.uint8)
    first, second = slice(0, half.nbytes), slice(half.nbytes, 2 * half.nbytes)
    assert [run.add(half, first), run.add(half, second)] == [True, False]
    assert run.finish() == ([digest(half)], [0])
    assert run.add(half, second)


# -- those that stay


@pytest.mark.parametrize("before", [0, 0xFF])
def test_tensors_that_stay_are_packed_like_others(before):
    memory, where = np.full(1024, before, dtype=np.uint8), places(TENSORS)
    found = pack(
        memory,
        [place.start for place in where],
        [place.stop for place in where],
        [each.data_ptr() for each in TENSORS],
        [each.dtype for each in TENSORS],
    )
    assert found == ([digest(each) for each in TENSORS], [2, 0, 0, 1, 0])
    one_by_one = np.full(1024, before, dtype=np.uint8)
    run = Run(one_by_one)
    assert all(run.add(tensor, place) for tensor, place in zip(TENSORS, where, strict=True))
    assert memory.tobytes() == one_by_one.tobytes()


@pytest.mark.parametrize("start", [-8, 24])
def test_a_place_outside_of_the_memory_is_never_written_to(start):
    with pytest.raises(AssertionError, match="outside of its memory"):
        pack(np.zeros(32, np.uint8), [start], [start + 16], [0], [torch.float32])
