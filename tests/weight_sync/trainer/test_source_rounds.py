"""What is sent in a round is what the tensors are then, whatever was known of them before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wtransfer.engines.interface import ParamMeta
from wtransfer.errors import RoundAbortedError, SourceError
from wtransfer.transport.digests import digest
from wtransfer.weight_sync.trainer.digesting import DigestingSource
from wtransfer.weight_sync.trainer.sharded import ShardedSource
from wtransfer.weight_sync.trainer.source import StateDictSource


class Custom(StateDictSource):
    """A source whose metadata or passes a test replaces."""

    def __init__(self, tensors, read):
        super().__init__(tensors)
        self.read = read

    def iter_full(self):
        yield from self.read()


def packed(source, nbytes=1 << 20, kind="array"):
    """What one pass copies, bucket by bucket, by name."""
    layout, found, memories = source.layout, {}, []

    def allocate(bucket):
        memories.append(np.full(bucket.nbytes, 0xFF, dtype=np.uint8))
        return torch.from_numpy(memories[-1]) if kind == "tensor" else memories[-1]

    for bucket in source.iter_buckets(nbytes, allocate):
        for number in range(bucket.first, bucket.last):
            start = layout.starts[number] - bucket.start
            content = memories[-1][start : start + layout.sizes[number]]
            found[layout.names[number]] = content.tobytes()
    return found


def expected_bytes(tensors):
    return {
        name: each.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, each in tensors.items()
    }


def test_the_layout_is_kept_while_it_is_right():
    tensors = {"a": torch.zeros(2), "b": torch.ones(3)}
    source = DigestingSource(StateDictSource(tensors))
    layout = source.plan()
    tensors["a"] = torch.full((2,), 7.0)
    tensors["b"].data = torch.full((3,), 8.0)
    assert source.plan() is layout
    assert packed(source) == expected_bytes(tensors)


def reshaped(tensors):
    tensors["a"].resize_(5)


def retyped(tensors):
    tensors["a"] = tensors["a"].double()


def added(tensors):
    tensors["new"] = torch.ones(4)


def removed(tensors):
    del tensors["b"]


def parted(tensors):
    tensors["tied"].data = torch.full((3,), 9.0)


def turned(tensors):
    tensors["square"].data = tensors["square"].data.t()


def replaced(tensors):
    tensors["a"] = torch.full((2,), 5.0)


def swapped(tensors):
    tensors["a"], tensors["c"] = tensors["c"], tensors["a"]


@pytest.mark.parametrize(
    "change", [reshaped, retyped, added, removed, parted, turned, replaced, swapped]
)
def test_whatever_became_of_the_tensors_is_sent_in_the_next_round(change):
    b = torch.ones(3)
    tensors = {
        "a": torch.zeros(2),
        "b": b,
        "c": torch.tensor([3.0, 4.0]),
        "square": torch.arange(9.0).view(3, 3),
        "tied": b.detach(),
    }
    source = DigestingSource(StateDictSource(tensors))
    for _ in range(2):
        source.plan()
        packed(source)
    change(tensors)
    manifest = source.plan().manifest
    sent = packed(source)
    named = {name: tensors[name] for name in sent}
    assert sent == expected_bytes(named)
    assert set(tensors) - set(sent) <= {"tied"}
    assert source.digests() == [digest(each) for each in named.values()]
    assert [(p.name, p.shape) for p in manifest.pieces] == [
        (name, tuple(each.shape)) for name, each in named.items()
    ]
    if change is parted:
        assert "tied" in sent


def test_metadata_of_a_class_of_ones_own_is_read_anew():
    class Meta:
        def __init__(self, tensor):
            self.name, self.dtype, self.shape, self.digest = "a", tensor.dtype, tensor.shape, None

    tensors = {"a": torch.zeros(2)}
    meta = Meta(tensors["a"])

    class Own(Custom):
        metadata = (meta,)

    source = DigestingSource(Own({}, tensors.items))
    assert source.plan().manifest.pieces[0].shape == (2,)
    tensors["a"] = torch.ones(4)
    meta.shape = (4,)
    assert source.plan().manifest.pieces[0].shape == (4,)
    assert packed(source) == expected_bytes(tensors)


def test_a_source_may_yield_one_buffer_again_and_again():
    names, buffer = [f"t{number}" for number in range(300)], torch.zeros(1024)
    source = DigestingSource(
        Custom(
            {name: buffer.clone() for name in names},
            lambda: ((name, buffer.fill_(number)) for number, name in enumerate(names)),
        )
    )
    source.plan()
    assert packed(source) == expected_bytes(
        {name: torch.full((1024,), float(number)) for number, name in enumerate(names)}
    )


def test_large_strided_and_empty_tensors_are_packed_among_small_ones():
    tensors = {
        "one": torch.ones(3),
        "strided": torch.arange(12.0).view(3, 4).t(),
        "two": torch.full((5,), 2, dtype=torch.bfloat16),
        "large": torch.full((1 << 18,), 3.0),
        "empty": torch.empty(0),
        "scalar": torch.tensor(4),
        "nan": torch.tensor([float("nan"), 1.0]),
    }
    source = DigestingSource(StateDictSource(tensors))
    source.plan()
    assert packed(source) == expected_bytes(tensors)
    assert source.digests() == [digest(each) for each in tensors.values()]
    assert source.nonfinite == {"nan": 1}


# -- tensors that are all there


SMALL = {f"t{number}": torch.full((100,), float(number)) for number in range(3000)}


def standing(read):
    """A source of `SMALL` whose passes yield another dictionary's tensors."""
    source = DigestingSource(Custom(SMALL, read))
    source._own.iter_full = lambda: iter(read().items())
    source.plan()
    return source


def freed(tensors):
    tensors["t7"] = tensors["t7"].clone()
    tensors["t7"].untyped_storage().resize_(0)


def cut(tensors):
    tensors["t7"] = tensors["t7"].clone()
    tensors["t7"].untyped_storage().resize_(396)


def shape(tensors):
    tensors["t7"] = torch.zeros(10, 10)


def dtype(tensors):
    tensors["t7"] = torch.zeros(100, dtype=torch.int32)


def no_tensor(tensors):
    tensors["t7"] = "a string"


def order(tensors):
    tensors["t7"] = tensors.pop("t7")


def short(tensors):
    del tensors["t2999"]


def long(tensors):
    tensors["t3000"] = torch.zeros(100)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (freed, "'t7' has less memory than its shape needs"),
        (cut, "'t7' has less memory than its shape needs"),
        (shape, r"yields \('t7', torch.float32, \(10, 10\)\), its metadata says"),
        (dtype, r"yields \('t7', torch.int32, \(100,\)\), its metadata says"),
        (no_tensor, r"yields \('t7', 'str', \(\)\)"),
        (order, r"yields \('t8', torch.float32, \(100,\)\), its metadata says \('t7'"),
        (short, "ended before 't2999'"),
        (long, "yields 't3000' after the last tensor"),
    ],
)
def test_what_contradicts_the_metadata_is_found_among_many(spoil, text):
    tensors = dict(SMALL)
    spoil(tensors)
    with pytest.raises(SourceError, match=text):
        packed(standing(lambda: tensors))


def test_a_source_may_hold_its_tensors_in_any_way():
    module = torch.nn.Linear(20, 20)
    views = {"a": torch.arange(8.0)[4:], "w": module.weight, "t": module.weight.t(), "c": 3.0}
    tensors = {**views, "z": torch.zeros(2, dtype=torch.complex64).conj(), **SMALL}
    source = DigestingSource(StateDictSource(tensors))
    source.plan()
    sent = {name: each for name, each in tensors.items() if name != "c"}
    sent["z"] = sent["z"].resolve_conj()
    assert packed(source) == expected_bytes(sent)
    assert source.digests() == [digest(each) for each in sent.values()]


def test_weights_that_change_between_two_passes_are_caught_among_many():
    tensors = dict(SMALL)
    source = standing(lambda: tensors)
    packed(source)
    packed(source)
    tensors["t7"] = tensors["t8"]
    with pytest.raises(SourceError, match="'t7' had other bytes in a second pass"):
        packed(source)


def test_a_digest_that_was_known_before_is_compared_among_many():
    class Sealed(StateDictSource):
        @property
        def metadata(self):
            return [
                ParamMeta(m.name, m.dtype, m.shape, digest=digest(SMALL[m.name]))
                for m in super().metadata
            ]

    for value in (7.0, 8.0):
        source = DigestingSource(Sealed({**SMALL, "t7": torch.full((100,), value)}))
        source.plan()
        if value == 7:
            packed(source)
        else:
            with pytest.raises(SourceError, match="'t7' has other bytes than when its digest"):
                packed(source)


def test_what_is_not_finite_is_counted_among_many():
    nan = torch.tensor([float("nan")] * 2 + [1.0] * 98)
    tensors = {**SMALL, "t7": nan, "t2000": torch.full((100,), float("inf"))}
    source = standing(lambda: tensors)
    packed(source)
    assert source.nonfinite == {"t7": 2, "t2000": 100}


@pytest.mark.parametrize("algorithm", ["xxh3-128", "wsum64"])
@pytest.mark.parametrize("kind", ["array", "tensor"])
@pytest.mark.parametrize("nbytes", [1, 1 << 20, 1 << 30])
def test_every_bucket_is_there_when_it_is_yielded(kind, algorithm, nbytes):
    tensors = {**SMALL, "large": torch.ones(300_000), "none": torch.empty(0), "t": torch.zeros(3)}
    source, packed_at = DigestingSource(StateDictSource(tensors), algorithm), []
    source.plan()
    source.on_packed = lambda: packed_at.append(1)
    assert packed(source, nbytes, kind) == expected_bytes(tensors)
    assert packed_at == [1]
    assert source.digests() == [digest(each, algorithm) for each in tensors.values()]


@pytest.mark.parametrize("kind", ["array", "tensor"])
def test_what_lay_in_a_bucket_before_is_not_counted_again(kind):
    # Memory is full of NaN, also between the tensors.
    source = DigestingSource(StateDictSource({"a": torch.ones(3), "b": torch.ones(5)}))
    source.plan()
    packed(source, kind=kind)
    assert source.nonfinite == {}


def test_a_stopped_round_ends_between_two_buckets():
    source = standing(lambda: SMALL)
    passing = source.iter_buckets(1024, lambda bucket: np.zeros(bucket.nbytes, dtype=np.uint8))
    next(passing)
    source.stop("a worker was lost")
    with pytest.raises(RoundAbortedError, match="a worker was lost"):
        list(passing)


def test_a_round_that_has_ended_is_not_said_to_be_packed():
    source, said = DigestingSource(StateDictSource({"a": torch.ones(4)})), []
    source.on_packed = lambda: said.append(1)
    source.plan("v1")
    one_by_one = source.iter_into(lambda meta: np.empty(meta.nbytes, np.uint8))
    next(one_by_one)
    source.stop("the test says so")
    with pytest.raises(RoundAbortedError, match="the test says so"):
        next(one_by_one)
    assert said == []


class Doubled(StateDictSource):
    """Yields other tensors than it was made of."""

    def iter_full(self):
        return iter([(name, each * 2) for name, each in super().iter_full()])


@pytest.mark.parametrize("wrap", [lambda source: source, ShardedSource])
def test_a_class_with_passes_of_its_own_is_asked_for_them(wrap):
    source = DigestingSource(wrap(Doubled(SMALL)))
    for _ in range(2):
        source.plan()
        assert packed(source) == expected_bytes({n: t * 2 for n, t in SMALL.items()})


def test_memory_that_moves_after_the_plan_is_read_where_it_is():
    tensors = {"a": torch.zeros(4), "b": torch.ones(4)}
    source = DigestingSource(StateDictSource(tensors))
    source.plan()
    tensors["a"].untyped_storage().resize_(1 << 22)
    tensors["a"].fill_(7)
    assert packed(source) == expected_bytes(tensors)


def test_names_that_part_after_the_plan_are_not_sent_as_one():
    tied = torch.zeros(3)
    tensors = {"a": tied, "b": tied.detach()}
    source = DigestingSource(StateDictSource(tensors))
    source.plan()
    tensors["b"].data = torch.ones(3)
    with pytest.raises(SourceError, match="yields 'b' after the last tensor"):
        packed(source)
