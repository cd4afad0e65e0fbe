"""What was received is proven before anybody applies it."""

from __future__ import annotations

import errno
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wtransfer.errors import (
    DigestMismatchError,
    EngineError,
    ManifestError,
    ProtocolError,
    RoundAbortedError,
    SchemaError,
    StagingMemoryError,
)
from wtransfer.manifest import Manifest, Piece
from wtransfer.testing.contents import contents, random_tensor
from wtransfer.transport.digests import digest
from wtransfer.transport.layout import TensorLayout
from wtransfer.transport.memory import is_out_of_memory
from wtransfer.transport.tensors import dtype_name
from wtransfer.weight_sync.worker.staging import Staging

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
    return Staging(TensorLayout(Manifest(pieces)), copies=copies, on_progress=seen.append)


@pytest.fixture(params=[True, False], ids=["copies", "views"])
def empty(request):
    return staging(copies=request.param)


@settings(max_examples=50)
@given(st.permutations(list(TENSORS.items())), st.lists(st.integers(0, 4), max_size=3))
def test_order_and_batches_do_not_matter(pairs, cuts):
    progress = []
    staged = staging(progress=progress)
    edges = [0, *sorted(cuts), len(pairs)]
    for start, end in itertools.pairwise(edges):
        staged.load_weights(iter(pairs[start:end]))
    assert staged.digests() == DIGESTS
    assert progress == sorted(progress)
    assert progress[-1] == sum(tensor.nbytes for tensor in TENSORS.values())


# FAULTS 2
def test_a_name_outside_the_plan_is_refused(empty):
    with pytest.raises(ManifestError, match="'x', which the plan does not have"):
        empty.load_weights([("x", TENSORS["a"])])


# FAULTS 2
def test_a_name_that_comes_twice_is_refused(empty):
    empty.load_weights([("a", TENSORS["a"])])
    with pytest.raises(ManifestError, match="delivered 'a' twice"):
        empty.load_weights([("a", TENSORS["a"])])


def freed(tensor, nbytes=0):
    tensor.untyped_storage().resize_(nbytes)
    return tensor


WITHOUT_MEMORY = {
    "freed": lambda: freed(torch.ones(2, 3)),
    "cut": lambda: freed(torch.ones(2, 3), 20),
    "part of a freed buffer": lambda: freed(torch.ones(9, 3)[4:6]),
    "transposed": lambda: freed(torch.ones(3, 2).t()),
    "transposed, cut": lambda: freed(torch.ones(3, 2).t(), 20),
    "expanded": lambda: freed(torch.ones(1, 3).expand(2, 3)),
    "parameter": lambda: freed(torch.nn.Parameter(torch.ones(2, 3))),
    "in inference mode": torch.inference_mode()(lambda: freed(torch.ones(2, 3))),
    "negated": lambda: torch._neg_view(freed(torch.ones(2, 3))),
    "meta": lambda: torch.ones(2, 3, device="meta"),
}


# FAULTS 54
@pytest.mark.parametrize("case", WITHOUT_MEMORY)
def test_tensor_without_memory_is_refused_by_name(empty, case):
    tensor = WITHOUT_MEMORY[case]()
    with pytest.raises(EngineError, match="'a' without all of its memory") as caught:
        empty.load_weights([("a", tensor)])
    assert caught.value.piece == "a"
    assert not empty.tensors


# FAULTS 54
def test_memory_that_is_freed_after_its_delivery_is_named_before_the_vote():
    staged, tensor = staging(copies=False), torch.ones(2, 3)
    staged.load_weights([("a", tensor)])
    freed(tensor)
    with pytest.raises(EngineError, match="'a' without all of its memory"):
        staged.digest_again()


# FAULTS 1
@pytest.mark.parametrize(
    "tensor", [TENSORS["a"].double(), TENSORS["a"].view(3, 2), TENSORS["a"][:1], torch.ones(6)]
)
def test_another_form_than_planned_is_refused(empty, tensor):
    with pytest.raises(
        SchemaError, match=r"delivered 'a' as .* the plan says torch.float32 \[2, 3\]"
    ):
        empty.load_weights([("a", tensor)])


def test_digests_of_another_number_than_pieces_are_refused(empty):
    empty.load_weights(TENSORS.items())
    with pytest.raises(ManifestError, match="the publisher sent 3 digests, the plan has 4 pieces"):
        empty.compare(DIGESTS[:3])


# FAULTS 6
def test_pieces_that_differ_are_named_and_so_is_a_publisher_that_contradicts_itself(empty):
    empty.load_weights(TENSORS.items())
    error = empty.compare([DIGESTS[0], "0" * 32, DIGESTS[2], DIGESTS[0]])
    assert (type(error), error.pieces, error.piece) == (DigestMismatchError, ["b", "d"], "b")
    assert "2 of 4 pieces arrived with other bytes than the trainer sent: 'b', 'd'" in str(error)
    with pytest.raises(ProtocolError, match="has not the fingerprint that it announced"):
        empty.compare(DIGESTS)


# FAULTS 44
def test_a_buffer_that_is_reused_after_the_call_changes_nothing():
    staged = staging(copies=True)
    buffer = torch.empty(2, 3)
    for name in ("a", "b"):
        staged.load_weights([(name, buffer.copy_(TENSORS[name]))])
    staged.load_weights([(name, TENSORS[name]) for name in ("c", "d")])
    buffer.fill_(-1)
    assert staged.digests() == DIGESTS
    assert contents(staged.tensors) == contents(TENSORS)


def test_strided_tensors_are_staged_by_their_elements(empty):
    base = torch.empty(3, 2).copy_(TENSORS["a"].t())
    empty.load_weights([("a", base.t())])
    empty.load_weights([(name, TENSORS[name]) for name in ("b", "c", "d")])
    assert empty.digests() == DIGESTS


# FAULTS 45
def test_tied_weights_that_came_with_different_bytes_are_refused(empty):
    empty.load_weights(TENSORS.items())
    with pytest.raises(SchemaError, match="'a' and 'b' are one tensor") as caught:
        empty.check_ties({"a": "a", "b": "a"})
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
