"""What was received is proven before anybody applies it."""

from __future__ import annotations

import errno
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wtransfer.errors import (
    DigestMismatchError,
    IncompleteUpdateError,
    ManifestError,
    RoundAbortedError,
    SchemaError,
    StagingMemoryError,
    TruncatedError,
)
from wtransfer.manifest import Manifest, Piece
from wtransfer.testing.contents import contents, random_tensor
from wtransfer.transport.digests import digest
from wtransfer.transport.host_tensors import HostTensors
from wtransfer.transport.tensors import byte_view, dtype_name
from wtransfer.weight_sync.worker.staging import Staging, is_out_of_memory

TENSORS = {
    "a": random_tensor(torch.float32, (2, 3), seed=1),
    "b": random_tensor(torch.float32, (2, 3), seed=2),
    "c": random_tensor(torch.bfloat16, (5,), seed=3),
    "d": torch.tensor(4),
}
DIGESTS = [digest(tensor) for tensor in TENSORS.values()]


def staging(tensors=TENSORS, *, copies=True, progress=None):
    pieces = tuple(Piece(n, dtype_name(t.dtype), tuple(t.shape)) for n, t in tensors.items())
    seen = [] if progress is None else progress
    return Staging(Manifest(pieces), copies=copies, on_progress=seen.append)


@pytest.fixture(params=[True, False], ids=["copies", "views"])
def empty(request):
    return staging(copies=request.param)


def test_what_arrived_whole_is_proven_with_digests_of_its_own(empty):
    assert empty.load_weights(TENSORS.items()) == set(TENSORS)
    assert empty.verify(DIGESTS, {}) == DIGESTS
    assert contents(empty.tensors) == contents(TENSORS)


@settings(max_examples=50)
@given(st.permutations(list(TENSORS.items())), st.lists(st.integers(0, 4), max_size=3))
def test_order_and_batches_do_not_matter(pairs, cuts):
    progress = []
    staged = staging(progress=progress)
    edges = [0, *sorted(cuts), len(pairs)]
    for start, end in itertools.pairwise(edges):
        staged.load_weights(iter(pairs[start:end]))
    assert staged.verify(DIGESTS, {}) == DIGESTS
    assert progress == sorted(progress)
    assert progress[-1] == sum(tensor.nbytes for tensor in TENSORS.values())


# FAULTS 2
def test_missing_pieces_are_named(empty):
    empty.load_weights([("a", TENSORS["a"]), ("c", TENSORS["c"])])
    with pytest.raises(
        IncompleteUpdateError, match="2 of 4 pieces never arrived: 'b', 'd'"
    ) as lost:
        empty.verify(DIGESTS, {})
    assert (lost.value.missing, lost.value.piece) == (["b", "d"], "b")


# FAULTS 2
def test_a_name_outside_the_plan_is_refused(empty):
    with pytest.raises(ManifestError, match="'x', which the plan does not have"):
        empty.load_weights([("x", TENSORS["a"])])


# FAULTS 2
def test_a_name_that_comes_twice_is_refused(empty):
    empty.load_weights([("a", TENSORS["a"])])
    with pytest.raises(ManifestError, match="delivered 'a' twice"):
        empty.load_weights([("a", TENSORS["a"])])


# FAULTS 1
@pytest.mark.parametrize(
    "tensor", [TENSORS["a"].double(), TENSORS["a"].view(3, 2), TENSORS["a"][:1], torch.ones(6)]
)
def test_another_form_than_planned_is_refused(empty, tensor):
    with pytest.raises(SchemaError, match=r"delivered 'a' as .* the plan says float32 \[2, 3\]"):
        empty.load_weights([("a", tensor)])


# FAULTS 6
def test_pieces_with_other_bytes_are_named(empty):
    swapped = {**TENSORS, "a": TENSORS["b"], "b": TENSORS["a"]}
    empty.load_weights(swapped.items())
    with pytest.raises(DigestMismatchError, match=r"2 of 4 pieces .* 'a', 'b'") as caught:
        empty.verify(DIGESTS, {})
    assert (caught.value.pieces, caught.value.piece) == (["a", "b"], "a")


def test_a_seal_of_another_length_is_refused(empty):
    empty.load_weights(TENSORS.items())
    with pytest.raises(ManifestError, match="the seal has 3 digests, the plan has 4 pieces"):
        empty.verify(DIGESTS[:3], {})


# FAULTS 44
def test_a_buffer_that_is_reused_after_the_call_changes_nothing():
    staged = staging(copies=True)
    buffer = torch.empty(2, 3)
    for name in ("a", "b"):
        staged.load_weights([(name, buffer.copy_(TENSORS[name]))])
    staged.load_weights([(name, TENSORS[name]) for name in ("c", "d")])
    buffer.fill_(-1)
    assert staged.verify(DIGESTS, {}) == DIGESTS
    assert contents(staged.tensors) == contents(TENSORS)


def test_strided_tensors_are_staged_by_their_elements(empty):
    base = torch.empty(3, 2).copy_(TENSORS["a"].t())
    empty.load_weights([("a", base.t())])
    empty.load_weights([(name, TENSORS[name]) for name in ("b", "c", "d")])
    assert empty.verify(DIGESTS, {}) == DIGESTS


# FAULTS 45
def test_tied_weights_that_came_with_different_bytes_are_refused(empty):
    empty.load_weights(TENSORS.items())
    with pytest.raises(SchemaError, match="'a' and 'b' are one tensor") as caught:
        empty.verify(DIGESTS, {"a": "a", "b": "a"})
    assert caught.value.piece == "b"


def test_a_stopped_round_ends_the_engines_loop(empty):
    def pairs():
        yield "a", TENSORS["a"]
        empty.stop("the trainer says so")
        yield "b", TENSORS["b"]
        pytest.fail("the engine went on")

    with pytest.raises(RoundAbortedError, match="the trainer says so"):
        empty.load_weights(pairs())


# FAULTS 18
@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_every_shortage_of_memory_is_one_error(error):
    class Short(torch.Tensor):
        def detach(self):
            raise error

    with pytest.raises(StagingMemoryError, match="no memory to stage 24 bytes") as caught:
        staging().load_weights([("a", TENSORS["a"].as_subclass(Short))])
    assert caught.value.__cause__ is error


# FAULTS 18: torch's own words, not ours.
def test_torch_really_says_it_like_that():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", [RuntimeError("shape mismatch"), OSError(errno.EPIPE, "pipe")])
def test_other_errors_are_no_shortage_of_memory(error):
    assert not is_out_of_memory(error)


@pytest.mark.parametrize("copies", [True, False])
def test_an_engine_may_point_its_tensor_elsewhere_when_the_call_has_returned(copies):
    made = staging(copies=copies)
    cursor = torch.empty(0)
    for name, tensor in TENSORS.items():
        cursor = cursor.to(tensor.dtype) if cursor.dtype != tensor.dtype else cursor
        cursor.data = tensor.clone()
        made.load_weights([(name, cursor)])
    cursor.data = torch.empty(0, dtype=cursor.dtype)
    assert contents(made.tensors) == contents(TENSORS)


# -- tensors that lie in one piece of memory

STARTS = [64 * number for number in range(len(TENSORS))]


def laid(memory=None, **instead):
    """Return the tensors in one piece of memory, with other columns `instead`."""
    if memory is None:
        memory = np.zeros(64 * len(TENSORS), dtype=np.uint8)
        for start, tensor in zip(STARTS, TENSORS.values(), strict=True):
            memory[start : start + tensor.nbytes] = byte_view(tensor)
    columns = {
        "names": list(TENSORS),
        "dtype_names": [dtype_name(tensor.dtype) for tensor in TENSORS.values()],
        "shapes": [tuple(tensor.shape) for tensor in TENSORS.values()],
        "starts": STARTS,
    }
    return HostTensors(memory, **(columns | instead))


def part(weights, *numbers):
    """Return some of them."""
    columns = (weights.names, weights.dtype_names, weights.shapes, weights.starts)
    return HostTensors(weights.memory, *([each[n] for n in numbers] for each in columns))


@pytest.mark.parametrize("batches", [[[0, 1, 2, 3]], [[0], [1, 2], [], [3]], [[2, 0], [3, 1]]])
def test_what_lies_in_memory_is_proven_whichever_way_it_came(empty, batches):
    whole = laid()
    for batch in batches:
        assert empty.load_weights(part(whole, *batch)) == {list(TENSORS)[n] for n in batch}
    assert empty.verify(DIGESTS, {}) == DIGESTS
    assert contents(empty.tensors) == contents(TENSORS)
    assert empty.nbytes == sum(tensor.nbytes for tensor in TENSORS.values())


def test_what_lies_in_plan_order_becomes_tensors_when_it_is_read():
    made, other, whole = staging(copies=False), staging(copies=False), laid()
    made.load_weights(part(whole, 0, 1))
    made.load_weights(part(whole, 2, 3))
    assert made.tensors.all_apart
    other.load_weights(part(whole, 1, 0, 2, 3))
    assert not other.tensors.all_apart


def test_memory_that_is_used_again_is_copied_where_the_engine_says_so():
    made, whole = staging(copies=True), laid()
    made.load_weights(whole)
    whole.memory[:] = 0xFF
    assert contents(made.tensors) == contents(TENSORS)


def test_some_may_come_by_themselves(empty):
    whole = laid()
    empty.load_weights(part(whole, 0, 1))
    empty.load_weights([("c", TENSORS["c"])])
    empty.load_weights(part(whole, 3))
    assert empty.verify(DIGESTS, {}) == DIGESTS
    assert contents(empty.tensors) == contents(TENSORS)


def test_each_of_two_memories_is_kept(empty):
    empty.load_weights(part(laid(), 0, 1))
    empty.load_weights(part(laid(), 2, 3))
    assert empty.verify(DIGESTS, {}) == DIGESTS
    assert contents(empty.tensors) == contents(TENSORS)


# FAULTS 6
def test_a_flipped_bit_in_memory_is_named(empty):
    whole = laid()
    whole.memory[64] ^= 1
    empty.load_weights(whole)
    with pytest.raises(DigestMismatchError, match=r"1 of 4 pieces .* 'b'"):
        empty.verify(DIGESTS, {})


# FAULTS 1, 2, 3
@pytest.mark.parametrize(
    ("instead", "error", "text"),
    [
        ({"names": ["a", "b", "x", "d"]}, ManifestError, "'x', which the plan does not have"),
        ({"names": ["a", "b", "a", "d"]}, ManifestError, "delivered 'a' twice"),
        (
            {"shapes": [(2, 3), (6,), (5,), ()]},
            SchemaError,
            r"delivered 'b' as float32 \[6\], the plan says float32 \[2, 3\]",
        ),
        (
            {"dtype_names": ["float32", "int32", "bfloat16", "int64"]},
            SchemaError,
            r"delivered 'b' as int32 \[2, 3\], the plan says float32 \[2, 3\]",
        ),
        ({"dtype_names": ["float32", "float32", "load", "int64"]}, ManifestError, "dtype 'load'"),
        ({"starts": [0, 64, 128, 249]}, TruncatedError, "does not lie within 256 bytes"),
        ({"starts": [-8, 64, 128, 192]}, TruncatedError, "does not lie within 256 bytes"),
        ({"starts": [0, 64, 128, 2**63]}, TruncatedError, "does not lie within 256 bytes"),
    ],
)
def test_what_memory_does_not_hold_as_planned_is_refused(empty, instead, error, text):
    with pytest.raises(error, match=text):
        empty.load_weights(laid(**instead))


def test_a_stopped_round_ends_between_two_tensors_in_memory():
    made = staging(copies=False)

    class Stops(np.ndarray):
        """Memory whose second tensor is not digested any more."""

        @property
        def data(self):
            view = memoryview(bytearray(self.tobytes()))

            class View:
                def __getitem__(self, place):
                    made.stop("the trainer says so")
                    return view[place]

            return View()

    whole = laid()
    with pytest.raises(RoundAbortedError, match="the trainer says so"):
        made.load_weights(laid(whole.memory.view(Stops)))
